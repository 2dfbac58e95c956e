"""sum64 is what its definition says, over any way of computing it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import checksums
from kv_transfer.checksums import block_sums, chunk_sum, chunk_sums

BLOCKS = st.integers(1, 4).flatmap(
    lambda count: st.integers(1, 24).flatmap(
        lambda words: st.binary(min_size=count * words * 8, max_size=count * words * 8).map(
            lambda data: np.frombuffer(data, np.uint8).reshape(count, words * 8).copy()
        )
    )
)


def sum_of(blocks: np.ndarray) -> int:
    return chunk_sum(block_sums(blocks))


def by_definition(blocks: np.ndarray) -> int:
    """In Python's own integers."""
    mask = (1 << 64) - 1

    def mixed(word: int, place: int) -> int:
        x = (word + (place + 1) * 0x9E3779B97F4A7C15) & mask
        x ^= x >> 32
        x = x * 0xBF58476D1CE4E5B9 & mask
        x ^= x >> 29
        x = x * 0x94D049BB133111EB & mask
        return x ^ (x >> 32)

    sums = [sum(mixed(int.from_bytes(b[i : i + 8], "little"), i // 8) for i in range(0, len(b), 8)) & mask for b in map(bytes, blocks)]
    return sum(mixed(s, i) for i, s in enumerate(sums)) & mask


@given(BLOCKS)
def test_it_is_what_it_says(blocks: np.ndarray) -> None:
    assert sum_of(blocks) == by_definition(blocks)


def test_long_blocks_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_AT_ONCE", 7)
    blocks = np.random.default_rng(3).integers(0, 256, (3, 400), np.uint8)
    assert sum_of(blocks) == by_definition(blocks)


def test_known_values() -> None:
    assert chunk_sum([]) == 0
    # Both sides of a hand-over must agree on it, over versions too.
    assert sum_of(np.zeros((1, 8), np.uint8)) == 0xEC4EB5788BCAC3C3


@given(BLOCKS, st.data())
def test_any_flipped_bits_of_a_word_are_found(blocks: np.ndarray, data: st.DataObject) -> None:
    before = sum_of(blocks)
    words = blocks.view(np.uint64)
    row, column = data.draw(st.integers(0, words.shape[0] - 1)), data.draw(st.integers(0, words.shape[1] - 1))
    words[row, column] ^= np.uint64(data.draw(st.integers(1, 2**64 - 1)))
    assert sum_of(blocks) != before


@given(BLOCKS, st.integers(1, 23))
def test_parts_of_blocks_add_up(blocks: np.ndarray, cut: int) -> None:
    """Layers that travel by themselves have the sums that they have in the block."""
    cut = min(cut * 8, blocks.shape[1])
    parts = block_sums(blocks[:, :cut]) + block_sums(blocks[:, cut:], cut)
    np.testing.assert_array_equal(parts, block_sums(blocks))


def test_a_chunk_knows_its_blocks_order_and_number() -> None:
    sums = np.random.default_rng(1).integers(0, 2**64, 5, np.uint64, endpoint=False)
    assert len({chunk_sum(sums), chunk_sum(sums[::-1]), chunk_sum(sums[:4]), chunk_sum([*sums, 0])}) == 4


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=5), max_size=6))
def test_several_chunks_at_once(chunks: list[list[int]]) -> None:
    flat = np.array([x for chunk in chunks for x in chunk], np.uint64)
    assert chunk_sums(flat, [len(chunk) for chunk in chunks]) == [chunk_sum(chunk) for chunk in chunks]


def test_parts_of_words_are_refused() -> None:
    with pytest.raises(ValueError, match="64-bit"):
        block_sums(np.zeros((2, 12), np.uint8))
    with pytest.raises(ValueError, match="64-bit"):
        block_sums(np.zeros((2, 16), np.uint8), 4)
