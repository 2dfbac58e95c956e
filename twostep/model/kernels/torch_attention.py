"""Attention over the block pool in torch: rows of the pool are gathered per group of tiles, then torch's fused attention runs.

A *tile* is up to 128 consecutive tokens of one sequence (a decode token is a tile of one) and the keys up to its last token, so
that the early part of a long chunk does not attend to its late part. In a layer with a window its keys begin with the block of the
first one that its first token sees: blocks behind that are not read. Tiles alike in both lengths are padded and run as one group, of
so many that their keys and values are still in the processor's cache when attention reads them.

    slots   the layer as rows of [head_dim]                what a token writes
    blocks  the layer as rows of [block_size * head_dim]   what a tile reads      (see KvCache)

Both views start at their layer's first byte, so one index, made once per step, serves all layers. Gathering `blocks` with an index
[kv, tile, head, block] gives K and V of a group as [tile, head, token, head_dim], contiguous, in one call. The query heads that
share a KV head are laid beside each other as rows, so K and V are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from twostep.engine.batch import Batch, KvShape
from twostep.model.kernels.delta_net import DeltaWeights
from twostep.model.kernels.latent import LatentDims, LatentWeights
from twostep.model.kernels.torch_delta_net import delta_net
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.layer_groups import layer_places
from twostep.model.step.sequence_states import SequenceStates

Ints = npt.NDArray[np.int64]

_TILE = 128
# Decode contexts up to this long share a group whatever their lengths: gathering as much again costs about what a group does.
_SMALL_CONTEXT = 256
# Keys and values gathered at once, but for one tile that has more; of half a megabyte, attention reads them from a core's own cache.
_GATHERED_BYTES = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RopeTables:
    """cos and sin on the device, float32 [max_model_len, R / 2], R <= D even: the first R of a head's numbers turn; 0: none."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Holds what a model's attention needs besides its KV.

    rope     of each layer; layers share tables, and all turn as many numbers
    windows  of each layer: keys that a query sees, its own included; 0: all
    scale    what products of queries and keys are multiplied by; None: head_dim ** -0.5
    softcap  c: a product x, scaled, counts as c * tanh(x / c); 0: as it is
    sinks    of each layer, float32 [num_heads]: one more logit of each head, which takes its part of the softmax and adds nothing; empty:
             there are none (gpt-oss)
    latent   the numbers of latent attention, which has no windows; None: the pool has keys and values
    first    the layer that a step begins with
    placed   steps say where their tokens' states go (StatePlaces)
    """

    num_heads: int
    rope: Sequence[RopeTables]
    windows: Sequence[int]
    scale: float | None = None
    softcap: float = 0.0
    sinks: Sequence[torch.Tensor] = ()
    latent: LatentDims | None = None
    first: int = 0
    placed: bool = False

    @property
    def rotated(self) -> int:
        """Dimensions of a head that RoPE turns."""
        return 2 * self.rope[0].cos.shape[1]


class StatePlaces(NamedTuple):
    """Says where the states of T tokens go that a head drafts from, by slot as their KV does.

    slots   integer [T], the batch's; negative: nowhere
    before  integer [T], slots of the tokens before them; of a sequence's first one its own
    """

    slots: torch.Tensor
    before: torch.Tensor


def slots_before(batch: Batch, block_size: int) -> Ints:
    """Returns StatePlaces.before, int64 [T]."""
    owners = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start))
    before = np.maximum(batch.positions - 1, 0)
    # Of the first group of layers: there is one where a head drafts.
    slots: Ints = batch.block_tables[0, owners, before // block_size].astype(np.int64) * block_size + before % block_size
    return slots


def state_places(batch: Batch, cache: KvCache) -> StatePlaces:
    return StatePlaces(torch.from_numpy(batch.slots[0]), torch.from_numpy(slots_before(batch, cache.shape.block_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """N tiles attended together, padded to Q queries and C keys; G query heads share each of H KV heads.

    rows   int64 [N * Q], slice or None   which of the step's T tokens the queries are (padding repeats one); None: all T, in order
    valid  int64 or None           which of the N * Q results are no padding; None: all
    index  int64 [planes * N * H * B]   rows of a layer's `blocks` view
    mask   [N, 1, Q * G or 1, C] or None: additive, in the model's dtype; None: everything is visible
    behind bool [N, 1, C, 1] or None, with `mask`: keys behind the end of their tile's sequence
    """

    num_tiles: int
    num_queries: int
    num_keys: int
    rows: torch.Tensor | slice | None
    valid: torch.Tensor | None
    index: torch.Tensor
    mask: torch.Tensor | None
    behind: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """Columns of all tiles of a step: their sequence, first row of T, number of queries, first block and number of keys."""

    seq: Ints
    start: Ints
    num_queries: Ints
    first_block: Ints
    num_keys: Ints


class TorchAttentionPlan:
    """One step's AttentionPlan (see twostep/model/kernels/ops.py)."""

    def __init__(self, batch: Batch, cache: KvCache, spec: AttentionSpec) -> None:
        shape = cache.shape
        self.token_ids = torch.from_numpy(batch.token_ids)
        self.positions = torch.from_numpy(batch.positions)
        self.sample_rows: torch.Tensor | None = torch.from_numpy(batch.sample_rows)
        self._states = None if batch.state_tables is None else SequenceStates(batch, cache)
        self._places = state_places(batch, cache) if spec.placed else None
        self._cache = cache
        self._num_heads = spec.num_heads
        self._num_kv_heads = shape.num_kv_heads
        self._head_dim = shape.head_dim
        dtype = cache.dtype

        self._spec = spec
        self._turns = {tables: self._turns_of(tables, dtype) for tables in dict.fromkeys(spec.rope)}

        self._layers = layer_places(spec.windows, shape)
        self._write_indices = [torch.from_numpy(write_index(slots, shape)) for slots in batch.slots]
        share = spec.num_heads // shape.num_kv_heads
        # By what the layers of a kind see, and where: their group in the pool, and their window.
        self._kinds = [(place.group, window) for place, window in zip(self._layers, spec.windows, strict=False)]
        self._groups = {
            (group, window): _plan_groups(batch, batch.block_tables[group], shape, share, dtype, window)
            for group, window in dict.fromkeys(self._kinds)
        }

    def _turns_of(self, tables: RopeTables, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """[cos cos] and [-sin sin] of the step's tokens, [T, 1, R]."""
        c, s = tables.cos.index_select(0, self.positions), tables.sin.index_select(0, self.positions)
        return torch.cat((c, c), -1).to(dtype).unsqueeze(1), torch.cat((-s, s), -1).to(dtype).unsqueeze(1)

    @property
    def places(self) -> StatePlaces:
        assert self._places is not None
        return self._places

    def rotate_and_write(self, layer: int, qkv: torch.Tensor) -> None:
        self.write_beside(layer, qkv, self._spec)

    def write_beside(self, layer: int, qkv: torch.Tensor, spec: AttentionSpec) -> None:
        d, half = self._head_dim, spec.rotated // 2
        heads = qkv.view(qkv.shape[0], -1, d)
        if half:
            # x * [cos cos] + [x2 x1] * [-sin sin], with x = [x1 x2]
            tables = spec.rope[layer]
            if tables not in self._turns:
                self._turns[tables] = self._turns_of(tables, self._cache.dtype)
            cos, sin = self._turns[tables]
            turning = heads[:, : spec.num_heads + self._num_kv_heads, : 2 * half]
            swapped = torch.cat((turning[..., half:], turning[..., :half]), -1)
            turning.mul_(cos).addcmul_(swapped, sin)
        group, place = self._layers[layer]
        self._cache.write_rows(place, self._write_indices[group], heads[:, spec.num_heads :].reshape(-1, d))

    def write_latent(self, layer: int, kv: torch.Tensor, weights: LatentWeights) -> None:
        raise AssertionError("the pool keeps keys and values")

    def attend_delta(self, layer: int, projected: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
        assert self._states is not None
        return delta_net(self._states, layer, projected, weights)

    def attend_latent(self, layer: int, query: torch.Tensor, kv: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        raise AssertionError("the pool keeps keys and values")

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        query = qkv[:, : self._num_heads * self._head_dim]
        groups = self._groups[self._kinds[layer]]
        if len(groups) == 1 and groups[0].rows is None:
            return self._attend_group(groups[0], layer, query)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in groups:
            rows = group.rows
            assert rows is not None
            if isinstance(rows, slice):
                out[rows] = self._attend_group(group, layer, query[rows])
                continue
            result = self._attend_group(group, layer, query.index_select(0, rows))
            if group.valid is not None:
                result, rows = result.index_select(0, group.valid), rows.index_select(0, group.valid)
            out.index_copy_(0, rows, result)
        return out

    def _attend_group(self, group: _Group, layer: int, query: torch.Tensor) -> torch.Tensor:
        """[N * Q, num_heads * D] from the group's queries of that shape."""
        n, q, heads, d = group.num_tiles, group.num_queries, self._num_kv_heads, self._head_dim
        share = self._num_heads // heads
        kv = self._cache.read_rows(self._layers[layer].layer, group.index).view(self._cache.shape.num_planes, n, heads, -1, d)[
            :, :, :, : group.num_keys
        ]
        # A query and its G heads become Q * G rows of one KV head, and back.
        rows = query.view(n, q, heads, share, d).transpose(1, 2).reshape(n, heads, q * share, d)
        out = self._softmax(layer, rows, kv, group.mask)
        if group.behind is not None and not math.isfinite(out.sum(dtype=torch.float32).item()):
            # A slot behind a sequence's end holds what its block's owner before left there, and 0 * NaN is NaN. Looked at afterwards, since
            # clearing all of them beforehand would cost every step a pass over its keys.
            kv = kv.masked_fill(group.behind, 0.0)
            out = self._softmax(layer, rows, kv, group.mask)
        return out.view(n, heads, q, share, d).transpose(1, 2).reshape(n * q, self._num_heads * d)

    def _softmax(self, layer: int, rows: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention of `rows` [N, H, Q * G, D] over `kv` [planes, N, H, C, D]; of one plane, keys are values."""
        spec = self._spec
        if not spec.softcap and not spec.sinks:
            return F.scaled_dot_product_attention(rows, kv[0], kv[-1], attn_mask=mask, scale=spec.scale)
        scale = self._head_dim**-0.5 if spec.scale is None else spec.scale
        logits = (rows @ kv[0].transpose(-1, -2)).float().mul_(scale)
        if spec.softcap:
            logits = logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
        if mask is not None:
            logits = logits + mask.float()
        if not spec.sinks:
            return logits.softmax(-1).to(rows.dtype) @ kv[-1]
        # A row's G heads come one after the other for each query.
        share = self._num_heads // self._num_kv_heads
        sink = spec.sinks[layer].view(1, self._num_kv_heads, 1, share).expand(len(rows), -1, rows.shape[2] // share, -1)
        logits = torch.cat((logits, sink.reshape(len(rows), self._num_kv_heads, -1, 1)), -1)
        return logits.softmax(-1)[..., :-1].to(rows.dtype) @ kv[-1]


def _plan_groups(
    batch: Batch, block_tables: npt.NDArray[np.int32], shape: KvShape, share: int, dtype: torch.dtype, window: int
) -> list[_Group]:
    """Tiles grouped so that padding at most doubles the queries, and the keys of decode tokens (or up to the small context), and
    adds at most a tile's length to the keys of a prompt's tiles."""
    tiles = _cut(batch, shape.block_size, window)
    decode = tiles.num_queries == 1
    kv_kind = np.where(decode, np.ceil(np.log2(np.maximum(tiles.num_keys, _SMALL_CONTEXT))), -(-tiles.num_keys // _TILE))
    q_kind = np.ceil(np.log2(tiles.num_queries))
    kinds, member = np.unique(np.stack((q_kind, kv_kind), axis=1), axis=0, return_inverse=True)
    member = member.reshape(-1)
    groups = []
    for kind in range(len(kinds)):
        alike = np.flatnonzero(member == kind)
        key_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
        at_once = max(1, _GATHERED_BYTES // (int(tiles.num_keys[alike].max()) * key_bytes))
        parts = [alike[start : start + at_once] for start in range(0, len(alike), at_once)]
        groups += [_plan_group(batch, block_tables, shape, share, dtype, window, tiles, part) for part in parts]
    return groups


def _cut(batch: Batch, block_size: int, window: int) -> _Tiles:
    starts = batch.query_start[:-1].astype(np.int64)
    num_queries = np.diff(batch.query_start).astype(np.int64)
    num_tiles = -(-num_queries // _TILE)
    seq = np.repeat(np.arange(len(starts)), num_tiles)
    # Which tile of its sequence each is.
    nth = np.arange(len(seq)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    length = np.minimum(num_queries[seq] - nth * _TILE, _TILE)
    # The position of a tile's first query.
    first = (batch.seq_lens.astype(np.int64) - num_queries)[seq] + nth * _TILE
    first_block = np.maximum(first - window + 1, 0) // block_size if window else np.zeros_like(first)
    return _Tiles(
        seq=seq,
        start=starts[seq] + nth * _TILE,
        num_queries=length,
        first_block=first_block,
        num_keys=first + length - first_block * block_size,
    )


def _plan_group(
    batch: Batch,
    block_tables: npt.NDArray[np.int32],
    shape: KvShape,
    share: int,
    dtype: torch.dtype,
    window: int,
    tiles: _Tiles,
    members: Ints,
) -> _Group:
    num_queries, num_keys, first_block = tiles.num_queries[members], tiles.num_keys[members], tiles.first_block[members]
    n, q, c = len(members), int(num_queries.max()), int(num_keys.max())
    # Padding repeats a tile's last block.
    nth = np.minimum(np.arange(-(-c // shape.block_size)), -(-num_keys[:, None] // shape.block_size) - 1)
    tables = block_tables[tiles.seq[members, None], first_block[:, None] + nth].astype(np.int64)
    kv = np.arange(shape.num_planes)[:, None, None, None] * shape.num_kv_heads
    head = np.arange(shape.num_kv_heads)[:, None]
    index = block_rows(shape, tables)[:, None, :] + kv + head

    # Padding repeats a tile's last query, which sees at least one key.
    rows = (tiles.start[members, None] + np.minimum(np.arange(q), num_queries[:, None] - 1)).reshape(-1)
    in_order = bool((rows == np.arange(rows[0], rows[0] + len(rows))).all())
    which = slice(int(rows[0]), int(rows[0]) + len(rows)) if in_order else torch.from_numpy(rows)
    valid = None if bool((num_queries == q).all()) else torch.from_numpy(np.flatnonzero(np.arange(q) < num_queries[:, None]))
    # Places of the queries among their tile's keys.
    places = batch.positions[rows].reshape(n, q) - first_block[:, None] * shape.block_size
    visible = q == 1 and bool((num_keys == c).all()) and not (window and bool((places >= window).any()))
    return _Group(
        num_tiles=n,
        num_queries=q,
        num_keys=c,
        rows=None if in_order and len(rows) == len(batch.token_ids) else which,
        valid=valid,
        index=torch.from_numpy(index.reshape(-1)),
        mask=None if visible else _mask(places, c, share, dtype, window),
        behind=None if visible else torch.from_numpy(np.arange(c) >= num_keys[:, None])[:, None, :, None],
    )


def write_index(slots: Ints, shape: KvShape) -> Ints:
    """Rows of a layer's `slots` view that tokens write to these slots [T]: int64 [T * shape.vectors], token by token."""
    block, slot = np.divmod(slots, shape.block_size)
    rows: Ints = (block_rows(shape, block)[:, None] + np.arange(shape.vectors)) * shape.block_size + slot[:, None]
    return rows.reshape(-1)


def block_rows(shape: KvShape, blocks: Ints) -> Ints:
    """The `blocks` row of a block's first K head."""
    return blocks * (shape.num_layers * shape.vectors)


def _mask(places: Ints, num_keys: int, share: int, dtype: torch.dtype, window: int) -> torch.Tensor:
    """[N, 1, Q * share, C] (one row where Q is 1): 0 up to each query's place and within its window, -inf elsewhere."""
    own, keys = torch.from_numpy(places)[:, None, :, None], torch.arange(num_keys)
    hidden = keys > own
    if window:
        hidden |= keys <= own - window
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return mask.repeat_interleave(share, 2) if places.shape[1] > 1 else mask
