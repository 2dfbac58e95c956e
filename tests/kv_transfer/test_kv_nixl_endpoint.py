"""Endpoints as text, and descriptors: few, large, and of exactly the bytes of the blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.nixl.endpoint import NixlEndpoint, laid_out, merge_runs
from twostep.errors import DataLoss, Unavailable

ENDPOINT = NixlEndpoint(
    agent="twostep-1",
    metadata=b"nixl",
    memory="VRAM",
    device=3,
    pool_address=1 << 46,
    num_blocks=1000,
    block_bytes=4096,
    probe_address=77,
    probe_bytes=16,
)


@given(st.lists(st.integers(0, 40), max_size=60))
def test_runs_are_the_ids_and_no_two_touch(ids: list[int]) -> None:
    first, counts = merge_runs(np.array(ids, np.int64))
    assert [i for f, c in zip(first.tolist(), counts.tolist(), strict=True) for i in range(f, f + c)] == ids
    assert all(f + c != g for f, c, g in zip(first.tolist(), counts.tolist(), first.tolist()[1:], strict=False))


@given(st.lists(st.integers(0, 999), min_size=1, max_size=60), st.integers(0, 1 << 40))
def test_near_and_far_pair_up_and_the_near_side_is_dense(ids: list[int], address: int) -> None:
    far = ENDPOINT.of_blocks(ids)
    near = laid_out(address, far[:, 1], 5)
    assert far.dtype == near.dtype == np.uint64
    assert (far[:, 2] == 3).all()
    assert (near[:, 2] == 5).all()
    place = 0
    for (near_at, size, _), (far_at, far_size, _) in zip(near.tolist(), far.tolist(), strict=True):
        assert (near_at, size) == (address + place, far_size)
        count = size // 4096
        assert far_at == (1 << 46) + 4096 * ids[place // 4096]
        assert ids[place // 4096 : place // 4096 + count] == list(range(ids[place // 4096], ids[place // 4096] + count))
        place += size
    assert place == len(ids) * 4096


@pytest.mark.parametrize("ids", [[1000], [-1], [3, 1000, 4]])
def test_blocks_outside_of_the_pool_are_refused(ids: list[int]) -> None:
    with pytest.raises(DataLoss, match="1000 blocks"):
        ENDPOINT.of_blocks(ids)
    with pytest.raises(DataLoss, match="1000 blocks"):
        ENDPOINT.check(ids)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=20), st.integers(0, 4000), st.integers(1, 96))
def test_a_part_of_each_block(ids: list[int], start: int, size: int) -> None:
    far = ENDPOINT.of_blocks(ids, slice(start, start + size))
    assert far.tolist() == [[(1 << 46) + 4096 * i + start, size, 3] for i in ids]


@given(st.binary(min_size=1, max_size=300), st.integers(0, (1 << 64) - 1))
def test_text_and_back(metadata: bytes, address: int) -> None:
    endpoint = replace(ENDPOINT, metadata=metadata, pool_address=address)
    assert NixlEndpoint.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: "",
        lambda t: "kv:worker:1:1",
        lambda t: t.replace("nixl:1:", "nixl:2:"),
        lambda t: t.replace("VRAM", "TAPE"),
        lambda t: t + "!",
        lambda t: t.replace(":3:", ":-3:"),
        lambda t: t.replace(":3:", ":x:"),
        lambda t: t.replace(":77:", f":{1 << 64}:"),
        lambda t: t.replace("twostep-1", ""),
        lambda t: t[: t.rindex(":") + 1],
        lambda t: t + "A" * (1 << 20),
    ],
)
def test_what_is_no_endpoint_is_unavailable(damage: object) -> None:
    assert callable(damage)
    with pytest.raises(Unavailable):
        NixlEndpoint.parse(damage(str(ENDPOINT)))
