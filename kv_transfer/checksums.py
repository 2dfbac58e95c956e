"""Two 64-bit checksums: xxh3_64 of bytes that pass host memory, and sum64, which many processors add up, each in its own order, while
they write or copy the bytes. They find torn and reused memory, not forgery: there is no key.

sum64

    word     64 bits of a block, little-endian; `place` counts words from the block's start, layers and all
    mix      x = word + (place + 1) · STEP;  x ^= x >> 32;  x *= FIRST;  x ^= x >> 29;  x *= SECOND;  x ^= x >> 32       (mod 2^64)
    block    sum of mix over its words, or over those of a range of its layers                                        (mod 2^64)
    chunk    sum of mix(block's sum, block's place in the chunk)                                                      (mod 2^64)

`mix` is made like the finalizer of splitmix64 (Steele, Lea, Flood, 2014), with shifts that cost a GPU less. It is one-to-one in the
word: whatever changes a single word, so any flipped bit, any flipped bits within 64, changes the sum, always. The same holds for a
single block of a chunk. Changes of several words (swaps of words, slots, heads, layers or blocks, zeroed or torn ranges, another
block's contents) go unnoticed with a probability of 2^-64, about 5e-20, if `mix` is taken for a random function.

Here in numpy, for CPUs and as the oracle of the kernels (twostep/model/kernels/triton_sum64.py), which compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

WORD_BYTES = 8

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
# Words that are mixed at once: what a second-level cache holds.
_AT_ONCE = 1 << 16


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """Returns xxh3_64 of contiguous bytes, as an unsigned 64-bit int. Releases the GIL: call it in a thread."""
    return int(xxhash.xxh3_64_intdigest(data.data))


def mix(words: npt.NDArray[np.uint64], places: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns what each word adds to the sum; shapes broadcast."""
    x = words + (places + np.uint64(1)) * _STEP
    x ^= x >> np.uint64(32)
    x *= _FIRST
    x ^= x >> np.uint64(29)
    x *= _SECOND
    x ^= x >> np.uint64(32)
    return x


def block_sums(blocks: npt.NDArray[np.uint8], first_byte: int = 0) -> npt.NDArray[np.uint64]:
    """Returns uint64 [n] of blocks [n, bytes], or of a part of each that begins at `first_byte` of its block. Raises
    ValueError unless both are multiples of 8."""
    if blocks.shape[1] % WORD_BYTES or first_byte % WORD_BYTES:
        raise ValueError(f"sum64 takes blocks of whole 64-bit words, not {blocks.shape[1]} bytes from byte {first_byte} on")
    words = np.ascontiguousarray(blocks).view("<u8")
    sums = np.zeros(len(words), np.uint64)
    for start in range(0, words.shape[1], _AT_ONCE):
        part = words[:, start : start + _AT_ONCE]
        places = np.arange(part.shape[1], dtype=np.uint64) + np.uint64(first_byte // WORD_BYTES + start)
        for row in range(len(words)):
            # An array of one: numbers by themselves would warn that they wrap around.
            sums[row : row + 1] += mix(part[row], places).sum(dtype=np.uint64, keepdims=True)
    return sums


def chunk_sum(sums: npt.NDArray[np.uint64] | Sequence[int]) -> int:
    """Returns a chunk's sum, an unsigned 64-bit int, from the sums of its blocks, uint64 [n], in the chunk's order."""
    values = np.asarray(sums, np.uint64)
    return int(mix(values, np.arange(len(values), dtype=np.uint64)).sum(dtype=np.uint64))


def chunk_sums(sums: npt.NDArray[np.uint64], counts: Sequence[int]) -> list[int]:
    """Returns those of several chunks at once, from uint64 [sum of counts], chunk after chunk."""
    lengths = np.asarray(counts, np.int64)
    ends = np.cumsum(lengths)
    places = np.arange(len(sums)) - np.repeat(ends - lengths, lengths)
    running = np.concatenate((np.zeros(1, np.uint64), np.cumsum(mix(sums, places.astype(np.uint64)), dtype=np.uint64)))
    return [int(x) for x in running[ends] - running[ends - lengths]]
