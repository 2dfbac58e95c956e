"""Latent attention over the block pool in torch (latent.py): decodes and short chunks absorbed, others expanded, whichever costs less.

Absorbed, all heads are the query heads of one KV head whose keys are its values: torch_attention.py attends. Expanded, a sequence's keys
and values are made once a layer, and tiles of its queries attend to those before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from twostep.engine.batch import Batch
from twostep.model.kernels.delta_net import DeltaWeights
from twostep.model.kernels.latent import LatentWeights, absorb, expands, values_of
from twostep.model.kernels.torch_attention import AttentionSpec, StatePlaces, TorchAttentionPlan, state_places, write_index
from twostep.model.step.kv_cache import KvCache

_TILE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """New tokens of one sequence: rows of T, the keys before them, and `blocks` rows of a layer (see TorchAttentionPlan) of all keys."""

    rows: slice
    context: int
    blocks: torch.Tensor


class TorchLatentPlan:
    """One step's AttentionPlan over a pool of latents."""

    def __init__(self, batch: Batch, cache: KvCache, spec: AttentionSpec) -> None:
        assert spec.latent is not None
        assert spec.scale is not None
        self.token_ids = torch.from_numpy(batch.token_ids)
        self.positions = torch.from_numpy(batch.positions)
        self.sample_rows: torch.Tensor | None = torch.from_numpy(batch.sample_rows)
        self._places = state_places(batch, cache) if spec.placed else None
        self._cache = cache
        self._spec = spec
        self._dims, self._scale = spec.latent, spec.scale
        # float32 [T, rope / 2]
        self._cos, self._sin = (table.index_select(0, self.positions) for table in (spec.rope[0].cos, spec.rope[0].sin))
        self._write_index = torch.from_numpy(write_index(batch.slots[0], cache.shape))
        num_queries = np.diff(batch.query_start).astype(np.int64)
        sizes = zip(num_queries[:, None], batch.seq_lens.astype(np.int64)[:, None], strict=True)
        expanded = np.array([count[0] > 1 and expands(count, length, self._dims) for count, length in sizes], np.bool_)
        self._chunks = [self._chunk(batch, seq) for seq in np.flatnonzero(expanded).tolist()]
        rest = np.flatnonzero(~expanded)
        rows = np.flatnonzero(np.repeat(~expanded, num_queries))
        self._rows = torch.from_numpy(rows)
        self._absorbed = TorchAttentionPlan(_part(batch, rest, rows), cache, replace(spec, placed=False)) if len(rest) else None

    @property
    def places(self) -> StatePlaces:
        assert self._places is not None
        return self._places

    def write_beside(self, layer: int, qkv: torch.Tensor, spec: AttentionSpec) -> None:
        raise AssertionError("the pool keeps latents")

    def rotate_and_write(self, layer: int, qkv: torch.Tensor) -> None:
        raise AssertionError("the pool keeps latents")

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the pool keeps latents")

    def attend_delta(self, layer: int, projected: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
        raise AssertionError("the pool keeps latents")

    def attend_latent(self, layer: int, query: torch.Tensor, kv: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        dims = self._dims
        self.write_latent(layer, kv, weights)
        heads = query.view(len(query), -1, dims.query)
        turned = self._turned(heads[..., dims.nope :])
        out = query.new_empty(len(query), heads.shape[1] * dims.value)
        for chunk in self._chunks:
            of_chunk = torch.cat((heads[chunk.rows, :, : dims.nope], turned[chunk.rows]), -1)
            out[chunk.rows] = self._attend_expanded(layer, of_chunk, chunk, weights)
        if self._absorbed is not None:
            everything = not self._chunks
            absorbed = absorb(query if everything else query.index_select(0, self._rows), weights, dims)
            absorbed[..., dims.latent :] = turned if everything else turned.index_select(0, self._rows)
            attended = self._absorbed.attend(layer, absorbed.view(len(absorbed), -1)).view_as(absorbed)
            values = values_of(attended[..., : dims.latent], weights, dims)
            if everything:
                return values
            out.index_copy_(0, self._rows, values)
        return out

    def write_latent(self, layer: int, kv: torch.Tensor, weights: LatentWeights) -> None:
        dims = self._dims
        latent = F.rms_norm(kv[:, : dims.latent], (dims.latent,), weights.norm, weights.eps)
        self._cache.write_rows(layer, self._write_index, torch.cat((latent, self._turned(kv[:, dims.latent :])), -1))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, ..., rope], rotated, its pairs as halves."""
        low, high = (x[..., 0::2], x[..., 1::2]) if self._dims.interleaved else x.chunk(2, -1)
        cos, sin = (self._cos, self._sin) if x.dim() == 2 else (self._cos[:, None], self._sin[:, None])
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)

    def _attend_expanded(self, layer: int, query: torch.Tensor, chunk: _Chunk, weights: LatentWeights) -> torch.Tensor:
        """[Q, num_heads * value] of a sequence's queries [Q, num_heads, dims.query]."""
        dims, num_heads = self._dims, query.shape[1]
        num_keys = chunk.context + len(query)
        kept = self._cache.read_rows(layer, chunk.blocks).view(-1, dims.kept)[:num_keys]
        made = F.linear(kept[:, : dims.latent], weights.up.view(-1, dims.latent)).view(num_keys, num_heads, -1).transpose(0, 1)
        rope = kept[:, dims.latent :].expand(num_heads, -1, -1)
        keys, values = torch.cat((made[..., : dims.nope], rope), -1), made[..., dims.nope :]
        # As wide as keys: torch's fused attention takes no others. What is added stays zero.
        wide = F.pad(values, (0, max(0, dims.query - dims.value)))
        out = query.new_empty(len(query), num_heads, dims.value)
        for start in range(0, len(query), _TILE):
            rows = query[start : start + _TILE]
            end = chunk.context + start + len(rows)
            position = torch.arange(end - len(rows), end)
            mask = torch.zeros(len(rows), end, dtype=query.dtype).masked_fill_(torch.arange(end) > position[:, None], -torch.inf)
            attended = F.scaled_dot_product_attention(
                rows.transpose(0, 1)[None], keys[None, :, :end], wide[None, :, :end], attn_mask=mask, scale=self._scale
            )
            out[start : start + _TILE] = attended[0, ..., : dims.value].transpose(0, 1)
        return out.view(len(query), -1)

    def _chunk(self, batch: Batch, seq: int) -> _Chunk:
        shape = self._cache.shape
        start, stop = int(batch.query_start[seq]), int(batch.query_start[seq + 1])
        length = int(batch.seq_lens[seq])
        blocks = batch.block_tables[0, seq, : -(-length // shape.block_size)].astype(np.int64)
        return _Chunk(
            rows=slice(start, stop), context=length - (stop - start), blocks=torch.from_numpy(blocks * (shape.num_layers * shape.vectors))
        )


def _part(batch: Batch, seqs: Sequence[int] | npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> Batch:
    """Some sequences of a batch and their rows, none of them sampled."""
    counts = np.diff(batch.query_start)[seqs]
    return replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        query_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        seq_lens=batch.seq_lens[seqs],
        block_tables=batch.block_tables[:, seqs],
        slots=batch.slots[:, rows],
        sample_rows=np.zeros(0, np.int64),
        sampling=(),
    )
