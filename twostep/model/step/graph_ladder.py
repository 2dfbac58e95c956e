"""Which steps are worth a CUDA graph, and what the graphs keep of a GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What the driver keeps for one captured step besides its tensors: some hundred kernel nodes.
_GRAPH_BYTES = 4 << 20
_SMALLEST_SHARING = 4
# Prompts in one step, at most: more of them are short, and few steps.
_MOST_CHUNKS = 16
# Rows of a step with decodes up to which it is captured: beyond, the device takes longer than the host's launches. Not of mixtures of
# experts, which launch several times as many kernels for as little work.
_MOST_MIXED_ROWS = 1024


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """Says what a captured step has room for: `rows` tokens, of `decodes` sequences with one each and `chunks` of prompts. Without chunks,
    rows and decodes are the same, and every row is sampled."""

    rows: int
    decodes: int
    chunks: int = 0

    @property
    def num_seqs(self) -> int:
        return self.decodes + self.chunks

    def holds(self, *, rows: int, decodes: int, chunks: int) -> bool:
        return rows <= self.rows and decodes <= self.decodes and chunks <= self.chunks


def ladder(largest: int) -> list[int]:
    """Returns the batch sizes worth a graph, up to `largest`: at most one in eight rows, or seven, is padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 1, 32)]
    return [size for size in sizes if size < largest] + [largest]


def sharing_ladder(sizes: Sequence[int]) -> list[int]:
    """Returns the batch sizes, of those with a graph, that have another, in which a prefix that sequences share is read once for all of
    them. Every second one: a prefix long enough to be worth it saves more than the padding costs."""
    return sorted(size for size in sorted(sizes, reverse=True)[::2] if size >= _SMALLEST_SHARING)


def mixed_ladder(most_rows: int, max_num_seqs: int, *, has_experts: bool = False) -> list[StepShape]:
    """Returns the shapes of steps with prompts that are worth a graph, of up to `most_rows` tokens.

    Rows of decodes and of chunks are one run, padded at its end: what padding costs is matrix products, whose tiles it mostly fills.
    These are the rows from which on cuBLAS takes longer on an H200 (benchmarks/RESULTS.md); for 384 to 480 of them it takes longer than
    for 512. Places for decodes that stay empty cost nothing, but are rows, so that some sizes are enough."""
    rows = [16, 32, 64, 128, 160, 192, 256, 320, 384, 512, 640, 768, *range(1024, most_rows + 1, 256)]
    decodes = [size for size in (0, 32, 64, 128, *range(256, max_num_seqs, 128)) if size < max_num_seqs] + [max_num_seqs]
    chunks = min(_MOST_CHUNKS, max_num_seqs)
    return [
        StepShape(count, size, chunks)
        for count in rows
        if count <= most_rows
        for size in decodes
        # The places for decodes are rows, too.
        if size == 0 or size <= count <= (most_rows if has_experts else _MOST_MIXED_ROWS)
    ]


def graph_bytes(max_num_seqs: int, most_rows: int, *, has_experts: bool, logits_bytes: int, row_bytes: int) -> int:
    """About what captured steps keep: their memory, in which they take turns, and what the driver needs for each. `logits_bytes`: of one
    sampled row's logits; `row_bytes`: what a row has besides in that memory at once."""
    sizes, mixed = ladder(max_num_seqs), mixed_ladder(most_rows, max_num_seqs, has_experts=has_experts)
    count = len(sizes) + len(sharing_ladder(sizes)) + len(mixed)
    return count * _GRAPH_BYTES + (max_num_seqs + _MOST_CHUNKS) * logits_bytes + max([max_num_seqs, *(s.rows for s in mixed)]) * row_bytes
