"""Steps of a model with an encoder, in torch on any device: which of their tokens that reads, and attention of both stacks.

    a sequence's tokens     │ prompt, without its last │ its last token, the answer │
    read by                 │ encoder                  │ decoder                    │
    kept of each, by layer  │ keys and values of what  │ the decoder's own keys     │
                            │ the encoder gave         │ and values                 │
    the decoder sees        │ all, without a bias      │ up to its own, with a bias │

The last token of a prompt is the one that the decoder starts with. A token keeps as much in either part, so that blocks, their hand-over
and their account are those of any decoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from twostep.engine.batch import Batch
from twostep.model.kernels.delta_net import DeltaWeights
from twostep.model.kernels.latent import LatentWeights
from twostep.model.kernels.torch_attention import AttentionSpec, Ints, StatePlaces, block_rows, write_index
from twostep.model.step.kv_cache import KvCache

# [..., num_heads] from int64 [...]: a key's position less its query's.
Bias = Callable[[torch.Tensor], torch.Tensor]

# Keys and values of a layer that are gathered at once, but for one sequence that has more.
_GATHERED_BYTES = 1 << 24
# Biases of queries that are attended at once, but for one query that has more; their scores take as much again, or twice that. All of a
# prompt's would be quadratic in its length.
TILE_BYTES = 1 << 24


def _tiles(num_queries: int, query_bytes: int) -> Iterator[slice]:
    """Returns which queries of one sequence are attended at once, if the biases of one take so many bytes. That hangs on no other sequence,
    so that nor does the rounding."""
    size = max(1, TILE_BYTES // query_bytes)
    return (slice(first, min(first + size, num_queries)) for first in range(0, num_queries, size))


def _bias_of(by_distance: torch.Tensor, num_keys: int, tile: slice) -> torch.Tensor:
    """Returns [..., queries of the tile, num_keys] from [..., num_queries - 1 + num_keys]: what there is by distance, that of the last
    query to the first key first. Each query's row begins one number before that of the query in front of it."""
    num_queries = by_distance.shape[-1] - num_keys + 1
    rows = by_distance.unfold(-1, num_keys, 1)[..., num_queries - tile.stop : num_queries - tile.start, :]
    return rows.flip(-2)  # a copy


class EncoderStep:
    """One step's tokens: `prompts`, which the encoder reads, None where no sequence begins; `answers`, the decoder's, with their own
    attention; `crossing`, the attention of these to the prompts, which takes queries alone, [T, num_heads * D]."""

    def __init__(self, batch: Batch, cache: KvCache, num_heads: int, prompt_bias: Bias, answer_bias: Bias) -> None:
        assert batch.carried is None, "its steps take all tokens from the host"
        firsts, counts = batch.query_start[:-1], np.diff(batch.query_start).astype(np.int64)
        starts = batch.positions[firsts]
        begin = starts == 0
        num_encoded = np.where(begin, counts - 1, starts) if batch.num_encoded is None else batch.num_encoded.astype(np.int64)
        assert bool(np.where(begin, counts > num_encoded, starts >= num_encoded).all()), "the step that begins a sequence has its prompt"
        lengths = np.where(begin, num_encoded, 0)
        is_prompt = np.arange(len(batch.token_ids)) < np.repeat(firsts + lengths, counts)
        rows = np.flatnonzero(is_prompt)
        self.prompts = PromptPlan(batch, cache, rows, lengths[lengths > 0], num_heads, prompt_bias) if len(rows) else None
        queries = _Queries(rows=np.flatnonzero(~is_prompt), counts=counts - lengths, ends=batch.seq_lens.astype(np.int64))
        self.answers = AnswerPlan(batch, cache, queries, num_encoded, num_heads, answer_bias)
        self.crossing = CrossPlan(batch, cache, queries, num_encoded, num_heads)


class EncoderPlan(ABC):
    """An AttentionPlan (ops.py) of some of a step's rows."""

    def __init__(self, batch: Batch, cache: KvCache, rows: Ints, num_heads: int) -> None:
        device = cache.tensor.device
        self.token_ids = torch.from_numpy(batch.token_ids[rows]).to(device)
        self.positions = torch.from_numpy(batch.positions[rows]).to(device)
        # Their places among the rows.
        self.sample_rows = torch.from_numpy(np.searchsorted(rows, batch.sample_rows)).to(device)
        self._cache = cache
        self._num_heads = num_heads
        self._width = num_heads * cache.shape.head_dim
        self._slots = torch.from_numpy(write_index(batch.slots[0, rows], cache.shape)).to(device)

    def write(self, layer: int, kv: torch.Tensor) -> None:
        """Writes keys and values of all rows, [T, 2 * num_heads * D]."""
        self._cache.write_rows(layer, self._slots, kv.reshape(-1, self._cache.shape.head_dim))

    @abstractmethod
    def rotate_and_write(self, layer: int, qkv: torch.Tensor) -> None: ...

    @abstractmethod
    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor: ...

    def attend_latent(self, layer: int, query: torch.Tensor, kv: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        raise AssertionError("the pool keeps keys and values")

    @property
    def places(self) -> StatePlaces:
        raise AssertionError("no head drafts for a model with an encoder")

    def write_beside(self, layer: int, qkv: torch.Tensor, spec: AttentionSpec) -> None:
        raise AssertionError("no head drafts for a model with an encoder")

    def write_latent(self, layer: int, kv: torch.Tensor, weights: LatentWeights) -> None:
        raise AssertionError("the pool keeps keys and values")

    def attend_delta(self, layer: int, projected: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
        raise AssertionError("the model has no states")


class PromptPlan(EncoderPlan):
    """Every token of a prompt sees all of it. Nothing is read from the pool: the step has the prompt whole."""

    def __init__(self, batch: Batch, cache: KvCache, rows: Ints, lengths: Ints, num_heads: int, bias: Bias) -> None:
        super().__init__(batch, cache, rows, num_heads)
        self._lengths: list[int] = lengths.tolist()
        self._longest = longest = max(self._lengths)
        # [num_heads, 2 * longest - 1]
        self._by_distance = bias(torch.arange(1 - longest, longest, device=cache.tensor.device)).t()

    def rotate_and_write(self, layer: int, qkv: torch.Tensor) -> None:
        """Keeps nothing: what the encoder's own layers project is seen in this step alone."""

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        heads = qkv.view(len(qkv), 3, self._num_heads, -1).permute(1, 2, 0, 3)
        attended = []
        for query, keys, values in (prompt.unsqueeze(1) for prompt in heads.split(self._lengths, 2)):
            length = query.shape[2]
            by_distance = self._by_distance[:, self._longest - length : self._longest + length - 1]
            for tile in _tiles(length, self._num_heads * length * query.element_size()):
                mask = _bias_of(by_distance, length, tile)
                attended.append(F.scaled_dot_product_attention(query[:, :, tile], keys, values, attn_mask=mask, scale=1.0))
        return torch.cat(attended, 2)[0].transpose(0, 1).reshape(len(qkv), self._width)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Queries:
    """The decoder's rows of a step's T tokens, sequence by sequence: how many of each, and how long that is with them."""

    rows: Ints
    counts: Ints
    ends: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """N sequences attended together, with Q queries each and padded to C keys; one sequence, if Q > 1.

    rows         int64 [N * Q]          of the decoder's rows
    index        int64 [2 * N * H * B]  blocks as KvCache.read_rows takes them
    by_distance  [N, H or 1, Q - 1 + C], as _bias_of takes it, in the model's dtype: -inf for keys behind a query, and for one
                 query also for hidden keys
    hidden       bool [N, 1, C, 1], keys that no query of the sequence sees: what lies there need not be a number
    blind        bool [N, 1, 1, 1], sequences that have no keys; None: all have some
    """

    rows: torch.Tensor
    index: torch.Tensor
    num_queries: int
    by_distance: torch.Tensor
    hidden: torch.Tensor
    blind: torch.Tensor | None

    def mask(self, tile: slice) -> torch.Tensor:
        """Returns [N, H or 1, queries of the tile, C]: what is added to their products with the keys."""
        if self.num_queries == 1:
            return self.by_distance.unsqueeze(2)  # there as it is, for all layers: most steps have no other groups
        return _bias_of(self.by_distance, self.hidden.shape[2], tile).masked_fill_(self.hidden.transpose(2, 3), -torch.inf)


class PoolPlan(EncoderPlan):
    """The decoder's tokens see a range of their sequence's keys in the pool, [first, stop), and of these none behind themselves."""

    def __init__(
        self, batch: Batch, cache: KvCache, queries: _Queries, first: Ints, stop: Ints, num_heads: int, bias: Bias | None = None
    ) -> None:
        super().__init__(batch, cache, queries.rows, num_heads)
        shape = cache.shape
        self._groups: list[_Group] = []
        row_starts = np.cumsum(queries.counts) - queries.counts
        key_bytes = shape.vectors * shape.head_dim * cache.dtype.itemsize
        # Those with one query by how many keys they have; the others, prompts computed again, one by one.
        order = np.lexsort((stop - first, queries.counts))
        members: list[int] = []
        for sequence in order.tolist():
            num_bytes = (len(members) + 1) * int(stop[sequence] - first[sequence]) * key_bytes
            if members and (queries.counts[sequence] > 1 or num_bytes > _GATHERED_BYTES):
                self._groups.append(self._group(batch, np.array(members), queries, row_starts, first, stop, bias))
                members = []
            members.append(sequence)
        self._groups.append(self._group(batch, np.array(members), queries, row_starts, first, stop, bias))

    def _group(
        self, batch: Batch, members: Ints, queries: _Queries, row_starts: Ints, first: Ints, stop: Ints, bias: Bias | None
    ) -> _Group:
        shape, device = self._cache.shape, self._cache.tensor.device
        num_queries = int(queries.counts[members[0]])
        first, stop = first[members, None], stop[members, None]
        first_block = np.minimum(first, np.maximum(stop - 1, 0)) // shape.block_size
        num_blocks = -(-stop // shape.block_size) - first_block
        # Padding repeats a sequence's last block.
        nth = np.minimum(np.arange(max(1, int(num_blocks.max()))), np.maximum(num_blocks - 1, 0))
        blocks = block_rows(shape, batch.block_tables[0, members[:, None], first_block + nth].astype(np.int64))
        planes = np.arange(shape.num_planes)[:, None, None, None] * shape.num_kv_heads
        index = blocks[:, None] + planes + np.arange(shape.num_kv_heads)[:, None]
        keys = first_block * shape.block_size + np.arange(nth.shape[1] * shape.block_size)
        outside = (keys < first) | (keys >= stop)
        # Of the last query to all keys; of those before it, to keys that lie further and further behind.
        distances = torch.from_numpy(keys[:, :1] - queries.ends[members, None] + 1 + np.arange(num_queries - 1 + keys.shape[1])).to(device)
        by_distance = torch.zeros(1, 1, 1, dtype=self._cache.dtype, device=device)
        if bias is not None:
            by_distance = bias(distances).transpose(1, 2)
        unseen = distances > 0
        if num_queries == 1:
            unseen |= torch.from_numpy(outside).to(device)
        blind = (first >= stop)[..., None, None]
        rows = row_starts[members, None] + np.arange(num_queries)
        return _Group(
            rows=torch.from_numpy(rows.reshape(-1)).to(device),
            index=torch.from_numpy(index.reshape(-1)).to(device),
            num_queries=num_queries,
            by_distance=by_distance.masked_fill(unseen[:, None], -torch.inf),
            hidden=torch.from_numpy(outside[:, None, :, None]).to(device),
            blind=torch.from_numpy(blind).to(device) if blind.any() else None,
        )

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        shape = self._cache.shape
        out = qkv.new_empty(len(qkv), self._width)
        for group in self._groups:
            num_seqs = len(group.hidden)
            kv = self._cache.read_rows(layer, group.index).view(shape.num_planes, num_seqs, shape.num_kv_heads, -1, shape.head_dim)
            # What a block's owner before left there may be no number, and 0 * NaN is NaN.
            keys, values = kv.masked_fill(group.hidden, 0.0)
            query = qkv[:, : self._width].index_select(0, group.rows).view(num_seqs, group.num_queries, self._num_heads, -1).transpose(1, 2)
            parts = [
                F.scaled_dot_product_attention(query[:, :, tile], keys, values, attn_mask=group.mask(tile), scale=1.0)
                for tile in _tiles(group.num_queries, num_seqs * self._num_heads * keys.shape[2] * keys.element_size())
            ]
            attended = torch.cat(parts, 2)
            if group.blind is not None:
                attended = attended.masked_fill(group.blind, 0.0)
            out.index_copy_(0, group.rows, attended.transpose(1, 2).reshape(-1, self._width))
        return out


class AnswerPlan(PoolPlan):
    """A token of an answer sees those before it and itself."""

    def __init__(self, batch: Batch, cache: KvCache, queries: _Queries, num_encoded: Ints, num_heads: int, bias: Bias) -> None:
        super().__init__(batch, cache, queries, num_encoded, queries.ends, num_heads, bias)

    def rotate_and_write(self, layer: int, qkv: torch.Tensor) -> None:
        self.write(layer, qkv[:, self._width :])


class CrossPlan(PoolPlan):
    """A token of an answer sees its prompt, of which trials of one token have none."""

    def __init__(self, batch: Batch, cache: KvCache, queries: _Queries, num_encoded: Ints, num_heads: int) -> None:
        super().__init__(batch, cache, queries, np.zeros_like(num_encoded), num_encoded, num_heads)

    def rotate_and_write(self, layer: int, qkv: torch.Tensor) -> None:
        """The prompt's keys and values are there."""
