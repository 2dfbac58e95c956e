"""Prefix hashes: canonical, keyed, unit-independent, incremental, quick."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.errors import InvalidRequest
from twostep.keys.secret import DeploymentSecret, secret_check
from twostep.prefix import PrefixHasher, derive_key, prefix_hashes, token_bytes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)
FIELDS = {"tenant": "t", "salt": "s", "model_fingerprint": "m", "dtype": "bfloat16", "quantization": "none"}


def test_bytes_are_canonical() -> None:
    assert token_bytes([1, 258, 2**32 - 1]) == b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\xff"


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["1"]])
def test_what_is_no_token_is_refused(bad: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        token_bytes(bad)


@pytest.mark.parametrize("key", [b"k", b"k" * 64, b"k" * 65])
def test_a_hash_is_the_hmac_of_all_before_it(key: bytes) -> None:
    tokens = list(range(10))
    expected = [hmac.new(key, token_bytes(tokens[:n]), hashlib.sha256).digest()[:16] for n in (4, 8)]
    assert prefix_hashes(key, tokens, 4) == expected


@given(TOKENS, st.integers(1, 9), st.integers(1, 4))
def test_equal_boundaries_have_equal_hashes_whatever_the_unit(tokens: list[int], unit: int, times: int) -> None:
    small, large = prefix_hashes(b"k", tokens, unit), prefix_hashes(b"k", tokens, unit * times)
    assert len(small) == len(tokens) // unit
    assert small[times - 1 :: times] == large


@given(st.lists(TOKENS, max_size=6), st.integers(1, 20))
def test_growing_gives_the_same_hashes(parts: list[list[int]], unit: int) -> None:
    hasher = PrefixHasher(b"k", unit)
    news = [list(hasher.extend(part)) for part in parts]
    whole = prefix_hashes(b"k", [token for part in parts for token in part], unit)
    assert [digest for new in news for digest in new] == hasher.hashes == whole
    assert hasher.num_tokens == sum(map(len, parts))


def test_every_field_of_the_key_counts_and_none_runs_into_the_next() -> None:
    keys = [derive_key(DeploymentSecret(b"secret"), **FIELDS), derive_key(DeploymentSecret(b"other"), **FIELDS)]
    keys += [derive_key(DeploymentSecret(b"secret"), **(FIELDS | {name: value + "x"})) for name, value in FIELDS.items()]
    keys.append(derive_key(DeploymentSecret(b"secret"), **(FIELDS | {"tenant": "ts", "salt": ""})))
    keys.append(derive_key(DeploymentSecret(b"secret"), **(FIELDS | {"tenant": "", "salt": "ts"})))
    assert len(set(keys)) == len(keys)
    assert derive_key(DeploymentSecret(b"secret"), tenant="t", salt="s", model_fingerprint="m", dtype="bfloat16") == keys[0]


def test_secret_check_tells_secrets_apart_and_not_what_they_are() -> None:
    assert secret_check(DeploymentSecret(b"one")) == secret_check(DeploymentSecret(b"one")) != secret_check(DeploymentSecret(b"two"))
    assert "one" not in secret_check(DeploymentSecret(b"one"))


def test_a_unit_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        PrefixHasher(b"k", 0)
