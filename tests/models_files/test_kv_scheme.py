"""A checkpoint's words on its KV are read in the ways of the libraries that write it, refused by the key where it cannot be honoured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twostep.checkpoint.kv_scheme import KvScheme, kv_format, read_kv_scheme
from twostep.errors import SetupError

# As compressed-tensors 0.19 writes it.
STATIC: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": None,
    "observer_kwargs": {},
    "scale_dtype": None,
    "strategy": "tensor",
    "symmetric": True,
    "type": "float",
    "zp_dtype": None,
}
FP8 = KvScheme("fp8", static=True)


def read(model_dir: Path, scheme: object, **more: object) -> KvScheme | None:
    return read_kv_scheme(model_dir, {"quantization_config": {"kv_cache_scheme": scheme, **more}})


@pytest.mark.parametrize(
    ("scheme", "more", "want"),
    [
        (None, {}, None),
        (STATIC, {}, FP8),
        ("static", {}, FP8),
        (STATIC | {"strategy": "attn_head"}, {}, KvScheme("fp8", static=True, by_head=True)),
        ({"num_bits": 8, "type": "float"}, {"kv_cache_quant_algo": "FP8"}, FP8),
        (None, {"kv_cache_quant_algo": "FP8"}, FP8),
        (STATIC | {"dynamic": True, "strategy": "token"}, {}, KvScheme("fp8", static=False)),
        (STATIC | {"dynamic": True, "type": "int"}, {}, KvScheme("int8", static=False)),
    ],
    ids=str,
)
def test_what_libraries_write_is_read(scheme: object, more: dict[str, object], want: KvScheme | None, tmp_path: Path) -> None:
    assert read(tmp_path, scheme, **more) == want


@pytest.mark.parametrize(
    ("scheme", "more", "key"),
    [
        (STATIC | {"num_bits": 4}, {}, "kv_cache_scheme.num_bits"),
        (STATIC | {"type": "int"}, {}, "kv_cache_scheme.type"),
        (STATIC | {"type": "fp"}, {}, "kv_cache_scheme.type"),
        (STATIC | {"strategy": "channel"}, {}, "kv_cache_scheme.strategy"),
        (STATIC | {"strategy": "attn_head", "type": "int"}, {}, "kv_cache_scheme.type"),
        (STATIC | {"symmetric": False}, {}, "kv_cache_scheme.symmetric"),
        (STATIC | {"group_size": 32}, {}, "kv_cache_scheme.group_size"),
        (STATIC | {"dynamic": "local"}, {}, "kv_cache_scheme.dynamic"),
        (["fp8"], {}, "kv_cache_scheme"),
        ("dynamic", {}, "kv_cache_scheme"),
        (None, {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo"),
        (STATIC | {"dynamic": True}, {"kv_cache_quant_algo": "FP8"}, "kv_cache_scheme"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_its_key(scheme: object, more: dict[str, object], key: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError) as caught:
        read(tmp_path, scheme, **more)
    assert f"quantization_config.{key} " in caught.value.message


def test_modelopts_file_is_read_and_must_not_contradict(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}))
    assert read_kv_scheme(tmp_path, {}) == FP8
    assert read(tmp_path, STATIC) == FP8
    with pytest.raises(SetupError):
        read(tmp_path, STATIC | {"dynamic": True})


def test_the_flag_goes_before_the_checkpoint() -> None:
    assert [kv_format(asked, None) for asked in ("auto", "exact", "fp8", "int8", "int4")] == ["none", "none", "fp8", "int8", "int4"]
    assert [kv_format(asked, FP8) for asked in ("auto", "exact", "fp8", "int8")] == ["fp8", "none", "fp8", "int8"]
