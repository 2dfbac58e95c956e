"""`Ops` for NVIDIA GPUs: Triton kernels between torch's matrix products (cuBLAS)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from twostep.engine.batch import Batch, KvShape
from twostep.model.kernels import delta_trial, torch_delta_net, triton_elementwise, triton_prefill, triton_routing
from twostep.model.kernels.delta_net import DeltaWeights
from twostep.model.kernels.experts import EveryExpert, ExpertRouter, Experts, ExpertWeights, Routing
from twostep.model.kernels.latent import LatentDims, LatentWeights, absorb, values_of
from twostep.model.kernels.ops import Activation, AttentionPlan, Linear, LinearInParts, Ops
from twostep.model.kernels.quantized_weight import QuantizedWeight
from twostep.model.kernels.step_inputs import StepInputs, slots_of
from twostep.model.kernels.step_upload import StepUpload
from twostep.model.kernels.torch_attention import AttentionSpec, StatePlaces, slots_before
from twostep.model.kernels.triton_decode import decode_attention
from twostep.model.kernels.triton_decode_plan import DecodePlan
from twostep.model.kernels.triton_delta_net import StateRows, delta_net, most_chunks, owners
from twostep.model.kernels.triton_experts import TritonExperts
from twostep.model.kernels.triton_latent import LatentProgram, latent_chunks, latent_decode, latent_decode_plan, latent_program
from twostep.model.kernels.triton_latent_expanded import ExpandedChunks, ExpandedScratch, attend_expanded, expanded_chunks
from twostep.model.kernels.triton_latent_write import write_latent
from twostep.model.kernels.triton_launch import DecodeWorkspace, num_sms_of
from twostep.model.kernels.triton_linear import StreamedLinear, can_stream, exact_linear
from twostep.model.kernels.triton_prefill import HOPPER_ROWS, num_leading_decodes, uses_hopper
from twostep.model.kernels.triton_progress import StepProgress, note_layers
from twostep.model.kernels.triton_quantized_input import RoundedBeside
from twostep.model.kernels.triton_quantized_linear import QUANTIZED_DTYPES, QuantizedLinear, prepare
from twostep.model.kernels.triton_shared_prefix import SharedPrefix, serves_shared
from twostep.model.kernels.triton_tokens import MAX_SAMPLED_ROWS, carry_tokens, go_on
from twostep.model.step.graph_ladder import StepShape
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.layer_groups import layer_places
from twostep.model.step.sequence_states import SequenceStates

log = logging.getLogger(__name__)


# How chunks are attended; None: by the Hopper kernel.
ChunkTile = triton_prefill.TileShape | LatentProgram | None


class TritonOps(Ops):
    """The operations of one device, for one thread."""

    # What is added to the chosen experts' sum would be three kernels more.
    joins_shared_experts = True

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._capability = torch.cuda.get_device_capability(self._device) if self._device.type == "cuda" else None
        self.upload = StepUpload(self._device)
        self.progress = StepProgress(self._device)
        # What the rows of the last step sampled: the next one may carry it.
        self.tokens = torch.zeros(MAX_SAMPLED_ROWS, dtype=torch.int64, device=device)
        # By row of this step, of those behind drafts of the step before: how many of these were accepted.
        self.accepted = torch.zeros(MAX_SAMPLED_ROWS, dtype=torch.int32, device=device)
        # Whether kernels prove themselves before they serve.
        self.tries = self._device.type == "cuda"
        self._trouble: dict[tuple[object, ...], str] = {}
        self.decode_workspace = DecodeWorkspace(device)
        self._scratch: ExpandedScratch | None = None
        self.shared_workspace = DecodeWorkspace(device)
        # Whether kernels serve gated delta nets; else torch does, and such steps cannot be captured.
        self.has_delta_kernels = True
        self._decode_plans: dict[tuple[object, ...], DecodePlan] = {}

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._streamed(weight, bias, gated=False) or (lambda x: F.linear(x, weight, bias))

    def prepare_exact(self, weight: torch.Tensor, dtype: torch.dtype) -> Linear:
        narrow = weight.to(dtype)
        # With no more digits than `dtype` has it loses nothing in that: sums are in float32.
        is_narrow = torch.equal(narrow.float(), weight)
        if not is_narrow or self._streamed(narrow, None, gated=False) is None:
            return super().prepare_exact(weight, dtype)
        return partial(exact_linear, weight=weight, narrow=narrow)

    def prepare_gated(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._streamed(weight, bias, gated=True) or (lambda x: self.silu_mul(F.linear(x, weight, bias)))

    def _streamed(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> StreamedLinear | None:
        """None where cuBLAS is to multiply: no kernel takes this weight, or those that do failed their trial on this card."""
        if not can_stream(weight):
            return None
        layer = StreamedLinear(weight, bias, gated=gated)
        kind = (tuple(weight.shape), weight.dtype, gated)
        if self.tries and kind not in self._trouble:
            self._trouble[kind] = layer.trial()
            if self._trouble[kind]:
                log.warning("linear layers of %s: %s; cuBLAS multiplies instead", list(weight.shape), self._trouble[kind])
        return None if self._trouble.get(kind) else layer

    def prepare_quantized(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, *, gated: bool = False) -> Linear:
        if dtype not in QUANTIZED_DTYPES:
            return super().prepare_quantized(weight, bias, dtype, gated=gated)
        layer = QuantizedLinear(prepare(weight, self._device), bias, gated=gated)
        how = None if weight.activations is None else weight.activations.how
        kind = (weight.shape, weight.values.dtype, weight.group, weight.block_rows, weight.zeros is None, weight.float4, how, dtype, gated)
        if self.tries and kind not in self._trouble:
            self._trouble[kind] = layer.trial(weight, dtype)
            if self._trouble[kind]:
                log.warning("quantized layers of %s: %s; they are made dense for every product", list(weight.shape), self._trouble[kind])
        return super().prepare_quantized(weight, bias, dtype, gated=gated) if self._trouble.get(kind) else layer

    def route(
        self,
        logits: torch.Tensor,
        router: ExpertRouter,
        correction: torch.Tensor | None = None,
        load: torch.Tensor | None = None,
        gate: torch.Tensor | None = None,
    ) -> Routing:
        return triton_routing.route(logits, router, correction, load, gate)

    def prepare_experts(self, weights: ExpertWeights, router: ExpertRouter, dtype: torch.dtype) -> Experts:
        if not weights.held:
            return super().prepare_experts(weights, router, dtype)
        layer, right = TritonExperts(weights, router, dtype), EveryExpert(weights)
        kind = ("experts", weights.kind, router, dtype)
        if self.tries and kind not in self._trouble:
            self._trouble[kind] = layer.trial(right)
            if self._trouble[kind]:
                log.warning("experts of %s: %s; each multiplies all tokens instead", weights.kind, self._trouble[kind])
        return right if self._trouble.get(kind) else layer

    def prepare_delta(self, weights: DeltaWeights) -> None:
        kind = ("delta net", weights.dims, weights.conv.dtype)
        if self.tries and kind not in self._trouble:
            self._trouble[kind] = delta_trial.trial(weights)
            if self._trouble[kind]:
                log.warning("gated delta nets: %s; torch computes them, and steps are not captured", self._trouble[kind])
                self.has_delta_kernels = False

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return triton_elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._add(x, residual, None, weight, eps)

    def add_normed(self, x: torch.Tensor, residual: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, eps: float) -> torch.Tensor:
        return self._add(x, residual, w1, w2, eps)

    def join_rms_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, then: Linear
    ) -> torch.Tensor:
        return self._join(linear, x, residual, None, weight, eps, then)

    def join_normed(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, eps: float, then: Linear
    ) -> torch.Tensor:
        return self._join(linear, x, residual, w1, w2, eps, then)

    def _add(self, x: torch.Tensor, residual: torch.Tensor, first: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """add_rms_norm; with the weight of a `first` norm, of x, add_normed."""
        return triton_elementwise.add_rms_norm(x, residual, weight, eps, first_weight=first)

    def _join(
        self,
        linear: Linear,
        x: torch.Tensor,
        residual: torch.Tensor,
        first: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        then: Linear,
    ) -> torch.Tensor:
        y = linear.parts(x) if isinstance(linear, LinearInParts) else linear(x)
        if isinstance(then, QuantizedLinear) and then.weight.takes_rounded:
            how = then.weight.activations
            assert how is not None
            rounded = triton_elementwise.add_rms_norm_rounded(y, residual, weight, eps, how, first_weight=first)
            return then.of_rounded(rounded, residual.dtype)
        if isinstance(then, RoundedBeside) and then.wants(len(residual)):
            normed, rounded = triton_elementwise.add_rms_norm_beside(y, residual, weight, eps, then.how, first_weight=first)
            then.leave(normed, rounded)
            return then(normed)
        return then(self._add(y, residual, first, weight, eps))

    def norm_rotate_and_write(
        self,
        plan: AttentionPlan,
        layer: int,
        qkv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
    ) -> None:
        assert isinstance(plan, TritonAttentionPlan)
        plan.rotate_and_write(layer, qkv, triton_elementwise.HeadNorms(q_weight, k_weight, eps))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return triton_elementwise.silu_mul(gate_up)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return triton_elementwise.gate(gate_up, activation)

    def plan_attention(self, batch: Batch, cache: KvCache, spec: AttentionSpec) -> TritonAttentionPlan:
        """Sequences of one token that come first are decoded; the rest attend as chunks of a prompt, in the same step."""
        kv = cache.shape
        assert len(batch.block_tables) == len(batch.slots) == kv.num_groups
        num_queries = np.diff(batch.query_start).astype(np.int64)
        num_decodes = num_leading_decodes(num_queries.tolist(), kv.block_size)
        num_queries[:num_decodes] = 0
        max_queries = int(num_queries.max())
        tile, tokens = self._chunk_tile(cache, spec, max_queries)
        token_ids, positions, sample_rows, query_start, seq_lens, tiles, number, *by_group = self.upload.send(
            (
                batch.token_ids,
                batch.positions,
                batch.sample_rows,
                batch.query_start,
                batch.seq_lens,
                triton_prefill.plan_tiles(num_queries, batch.seq_lens.astype(np.int64), tokens),
                np.array([self.progress.number], np.int32),
                *batch.slots,
                *batch.block_tables,
            )
        )
        if batch.carried is not None:
            (carried,) = self.upload.send((batch.carried,))
            carry_tokens(token_ids, carried, self.tokens)
        if batch.behind is not None:
            (table,) = self.upload.send((batch.behind.table,))
            go_on(table, self.tokens, token_ids, positions, by_group[0], seq_lens, self.accepted)
        step = StepTensors(
            token_ids=token_ids,
            positions=positions,
            slots=by_group[: kv.num_groups],
            sample_rows=sample_rows,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=by_group[kv.num_groups :],
            tiles=tiles,
        )
        plan = TritonAttentionPlan(step, cache, spec, tile)
        if spec.latent is not None and num_decodes < len(num_queries):
            plan.expanded = self._expanded_chunks(num_queries, batch.seq_lens.astype(np.int64), cache, spec)
        if batch.state_tables is not None:
            plan.states = self._state_rows(batch) if self.has_delta_kernels else SequenceStates(batch, cache)
        if spec.placed:
            (before,) = self.upload.send((slots_before(batch, kv.block_size),))
            plan.placed_at = StatePlaces(plan.slots[0], before)
        if batch.mark_layers:
            plan.progress = self.progress.word, number
        if num_decodes:
            plan.decode = {window: self._decode_plan(cache, spec, num_decodes, window) for window in dict.fromkeys(spec.windows)}
            plan.num_decodes = num_decodes
        return plan

    def warm_up_drafts(self) -> None:
        """Compiles what steps behind drafts need: the first one would hold up everybody's."""
        for dtype in (torch.int32, torch.int64):  # as captured steps have them, and others
            table, lengths, row = (torch.zeros(size, dtype=torch.int32, device=self._device) for size in ((1, 7), 1, 1))
            go_on(table, self.tokens, row.to(dtype), row.to(dtype), row.to(dtype), lengths, self.accepted)

    def _state_rows(self, batch: Batch) -> StateRows:
        assert batch.state_sources is not None
        assert batch.state_tables is not None
        counts = np.diff(batch.query_start)
        others = np.flatnonzero(counts != 1)
        num_decodes = int(others[0]) if len(others) else len(counts)
        places = owners(batch.query_start, np.arange(len(counts)))
        sequences, offsets, sources, tables = self.upload.send((*places, batch.state_sources, batch.state_tables))
        return StateRows(
            sequences=sequences,
            offsets=offsets,
            sources=sources,
            tables=tables,
            num_decodes=num_decodes,
            most_chunks=sum(most_chunks(int(count), 1) for count in counts[num_decodes:]),
        )

    def _proven(self, kv: KvShape, spec: AttentionSpec) -> bool:
        """Returns whether the Hopper kernel has passed its trial on this card, or needs none."""
        plain = kv.quantization == "none" and not spec.softcap and not spec.sinks
        if plain or not self.tries:
            return True
        softcap, sinks = spec.softcap, bool(spec.sinks)
        kind = ("attention", kv.dtype, kv.quantization, kv.num_kv_heads, kv.head_dim, kv.block_size, spec.num_heads, softcap, sinks)
        if kind not in self._trouble:
            # Gluon is there, and needed, on Hopper only.
            from twostep.model.kernels.hopper_trial import trial  # noqa: PLC0415

            self._trouble[kind] = trial(kv, spec.num_heads, self._device, softcap=softcap, sinks=sinks)
            if self._trouble[kind]:
                log.warning("attention of prompts: %s; the portable kernel attends them", self._trouble[kind])
        return not self._trouble[kind]

    def _chunk_tile(self, cache: KvCache, spec: AttentionSpec, max_queries: int) -> tuple[ChunkTile, int]:
        """Returns the tile of the kernel that attends chunks of at most so many tokens, and its tokens."""
        kv, num_heads = cache.shape, spec.num_heads
        if spec.latent is not None:
            program = latent_program(cache, spec.latent, num_heads=num_heads, max_queries=max_queries)
            return program, program.tokens
        share = num_heads // kv.num_kv_heads
        if uses_hopper(kv, num_heads=num_heads, max_queries=max_queries, capability=self._capability) and self._proven(kv, spec):
            return None, HOPPER_ROWS // share
        quantized = cache.quantized is not None
        shape = triton_prefill.tile_shape(cache.dtype, kv.head_dim, share, max(1, max_queries), quantized=quantized)
        return shape, shape.num_rows // share

    def _expanded_chunks(
        self, num_queries: npt.NDArray[np.int64], seq_lens: npt.NDArray[np.int64], cache: KvCache, spec: AttentionSpec
    ) -> ExpandedChunks | None:
        """None: chunks attend absorbed."""
        dims = spec.latent
        assert dims is not None
        if self._scratch is None:
            self._scratch = ExpandedScratch(dims, spec.num_heads, cache.dtype, self._device)
        return expanded_chunks(num_queries, seq_lens, dims=dims, scratch=self._scratch, dtype=cache.dtype, upload=self.upload)

    def _decode_plan(self, cache: KvCache, spec: AttentionSpec, num_seqs: int, window: int) -> DecodePlan:
        """Made once: steps of this stream refresh it one after the other."""
        key = (cache.shape, spec.num_heads, num_seqs, window, spec.softcap, bool(spec.sinks))
        if key not in self._decode_plans:
            self._decode_plans[key] = self._new_decode_plan(cache, spec, num_seqs, window)
        return self._decode_plans[key]

    def _new_decode_plan(
        self, cache: KvCache, spec: AttentionSpec, num_seqs: int, window: int, shared: SharedPrefix | None = None
    ) -> DecodePlan:
        if spec.latent is not None:
            program = latent_program(cache, spec.latent, num_heads=spec.num_heads, max_queries=1)
            device = cache.tensor.device
            return latent_decode_plan(cache.shape, program, num_seqs=num_seqs, device=device, workspace=self.decode_workspace)
        return DecodePlan(
            cache.shape,
            num_heads=spec.num_heads,
            num_seqs=num_seqs,
            device=cache.tensor.device,
            workspace=self.decode_workspace,
            window=window,
            shared=shared,
            softcap=spec.softcap,
            sinks=bool(spec.sinks),
        )

    def captured_inputs(self, shape: StepShape, cache: KvCache, spec: AttentionSpec) -> StepInputs:
        """Returns the inputs of a captured step, for `plan_captured`."""
        tile_tokens = self._chunk_tile(cache, spec, shape.rows if shape.chunks else 1)[1]
        padding_length = -1 if _decodes_apart(cache) else 1
        return StepInputs(
            shape,
            tile_tokens,
            self._device,
            padding_length=padding_length,
            num_groups=cache.shape.num_groups,
            has_states=cache.shape.num_state_blocks > 0,
            placed=cache.shape.block_size if spec.placed else 0,
        )

    def plan_captured(
        self,
        inputs: StepInputs,
        block_tables: Sequence[torch.Tensor],
        cache: KvCache,
        spec: AttentionSpec,
        *,
        states: Sequence[torch.Tensor] = (),
        sharing: bool = False,
    ) -> TritonAttentionPlan:
        """A step whose inputs are on the device and may change between runs.

        block_tables  of each group of layers int32 [num_seqs, B]
        states        int32 [num_seqs, num_state_blocks] twice, of a model whose layers keep states: Batch.state_sources, .state_tables
        sharing       layers without a window read what `plan.shared` lists once for all that share it; only without chunks
        """
        shape, kv, num_heads, windows = inputs.shape, cache.shape, spec.num_heads, spec.windows
        decodes_apart = _decodes_apart(cache)
        assert not shape.chunks or decodes_apart, "chunks over such a pool are not captured"
        if shape.chunks:
            sample_rows, query_start, tiles = inputs.tensor("sample_rows"), inputs.tensor("query_start"), inputs.tensor("tiles").view(-1, 2)
        else:
            # Every row is a sequence and is sampled; where no decode kernel takes the pool, it is a chunk of one token.
            sample_rows = None
            query_start = torch.arange(shape.rows + 1, dtype=torch.int32, device=self._device)
            first = torch.zeros_like(query_start)
            tiles = torch.stack((torch.cat((first.new_tensor([shape.rows]), query_start[:-1])), first), 1)
        step = StepTensors(
            token_ids=inputs.tensor("token_ids"),
            positions=inputs.tensor("positions"),
            slots=[inputs.tensor(slots_of(group)) for group in range(kv.num_groups)],
            sample_rows=sample_rows,
            query_start=query_start,
            seq_lens=inputs.tensor("seq_lens"),
            block_tables=block_tables,
            tiles=tiles,
        )
        plan = TritonAttentionPlan(step, cache, spec, self._chunk_tile(cache, spec, shape.rows if shape.chunks else 1)[0])
        if spec.placed:
            plan.placed_at = StatePlaces(step.slots[0], inputs.tensor("before"))
        if states:
            sources, tables = states
            plan.states = StateRows(
                sequences=inputs.tensor("sequences"),
                offsets=inputs.tensor("offsets"),
                sources=sources,
                tables=tables,
                num_decodes=shape.decodes,
                most_chunks=most_chunks(shape.rows, shape.chunks),
            )
        if shape.chunks:
            plan.progress = self.progress.word, inputs.tensor("number")
        if decodes_apart and shape.decodes:
            if sharing and serves_shared(kv, num_heads=num_heads, windows=windows):
                plan.shared = SharedPrefix(
                    kv, num_heads=num_heads, num_seqs=shape.decodes, device=cache.tensor.device, workspace=self.shared_workspace
                )
            plan.decode = {
                window: self._new_decode_plan(cache, spec, shape.decodes, window, None if window else plan.shared)
                for window in dict.fromkeys(windows)
            }
            plan.num_decodes = shape.decodes
        return plan


def _decodes_apart(cache: KvCache) -> bool:
    """Returns whether the decode kernel takes this pool."""
    return cache.shape.block_size % 16 == 0


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A Batch on the device (shapes in twostep/engine/batch.py; int64 may be int32). `slots` and `block_tables` are those of each group of
    layers, each at an address that is a multiple of 16, as kernels are compiled for. `sample_rows` None: all rows, in order."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: Sequence[torch.Tensor]
    sample_rows: torch.Tensor | None
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: Sequence[torch.Tensor]
    tiles: torch.Tensor


class TritonAttentionPlan:
    """One step's AttentionPlan (see twostep/model/kernels/ops.py). Looks at no value on the device, so that a step can be captured."""

    def __init__(self, step: StepTensors, cache: KvCache, spec: AttentionSpec, tile_shape: ChunkTile) -> None:
        self.token_ids = step.token_ids
        self.positions = step.positions
        self.slots = step.slots
        self.sample_rows = step.sample_rows
        self._step = step
        self._cache = cache
        self._spec = spec
        self._places = layer_places(spec.windows, cache.shape)
        # Of one group, those with KV; some models have others beside them.
        self._last_layer = (cache.shape.num_layers if cache.shape.num_groups == 1 else len(spec.windows)) - 1
        self._tile_shape = tile_shape
        # By window: the decode kernel serves the first `num_decodes` sequences, of one token each. The tiles are those of the others.
        self.decode: dict[int, DecodePlan] = {}
        self.num_decodes = 0
        # See `places`; None: nobody asks.
        self.placed_at: StatePlaces | None = None
        # What layers without KV keep; None: there are none.
        self.states: StateRows | SequenceStates | None = None
        self.shared: SharedPrefix | None = None
        # Chunks of latent attention for which keys and values are made; None: they attend absorbed.
        self.expanded: ExpandedChunks | None = None
        # Where the step says how far it is, and its number (triton_progress.py); None: nowhere.
        self.progress: tuple[torch.Tensor, torch.Tensor] | None = None
        # For the Hopper kernel: the same for all layers.
        self._pool_blocks: Any = None

    @property
    def places(self) -> StatePlaces:
        assert self.placed_at is not None
        return self.placed_at

    def write_beside(self, layer: int, qkv: torch.Tensor, spec: AttentionSpec) -> None:
        step, tables = self._step, spec.rope[layer]
        triton_elementwise.rotate_and_write(
            qkv, step.positions, step.slots[0], tables.cos, tables.sin, self._cache, layer, spec.num_heads, self.progress
        )
        self._note(layer)

    def write_latent(self, layer: int, kv: torch.Tensor, weights: LatentWeights) -> None:
        # Of latent attention all layers turn alike, a head's among them.
        dims, tables = self._spec.latent, self._spec.rope[0]
        assert dims is not None
        # No query turns.
        turned = kv.new_empty(len(kv), 0, dims.rope)
        write_latent(
            kv, turned, kv, self._step.positions, self._step.slots[0], tables.cos, tables.sin, self._cache, layer,
            weights=weights, dims=dims,
            progress=self.progress,
        )  # fmt: skip
        self._note(layer)

    def _note(self, layer: int) -> None:
        """The layer's KV is written; of the last one nothing else would tell."""
        if self.progress is not None and layer == self._last_layer:
            note_layers(*self.progress, layer + 1)

    def refresh(self) -> None:
        """Shares out the decodes: before anything attends, in the first layer of each step."""
        for plan in self.decode.values():
            plan.refresh(self._step.seq_lens[: self.num_decodes])

    def rotate_and_write(self, layer: int, qkv: torch.Tensor, norms: triton_elementwise.HeadNorms | None = None) -> None:
        """`norms`: of each head of queries and keys, before it turns."""
        step, spec, (group, place) = self._step, self._spec, self._places[layer]
        if layer == spec.first:
            self.refresh()
            if self._tile_shape is None and self._cache.quantized is None:
                for tables in step.block_tables:
                    triton_prefill.clear_tails(self._cache, step.seq_lens[self.num_decodes :], tables[self.num_decodes :])
        cos, sin = spec.rope[layer].cos, spec.rope[layer].sin
        triton_elementwise.rotate_and_write(
            qkv, step.positions, step.slots[group], cos, sin, self._cache, place, spec.num_heads, progress=self.progress, norms=norms
        )

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        step, spec, head_dim = self._step, self._spec, self._cache.shape.head_dim
        num_heads, (group, place) = spec.num_heads, self._places[layer]
        out = qkv.new_empty(len(qkv), num_heads * head_dim)
        if self.decode:
            some = slice(0, self.num_decodes)
            decode_attention(
                qkv.view(len(qkv), -1, head_dim)[some, :num_heads],
                self._cache,
                place,
                step.block_tables[group][some],
                step.seq_lens[some],
                plan=self.decode[spec.windows[layer]],
                scale=spec.scale,
                sinks=spec.sinks[layer] if spec.sinks else None,
                out=out.view(len(qkv), num_heads, -1)[some],
            )
        if self.num_decodes < len(step.seq_lens):
            self._attend_chunks(layer, qkv, out)
        self._note(layer)
        return out

    def attend_delta(self, layer: int, projected: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
        step, rows = self._step, self.states
        assert rows is not None
        if isinstance(rows, SequenceStates):
            return torch_delta_net.delta_net(rows, layer, projected, weights)
        return delta_net(projected, self._cache, layer, rows=rows, positions=step.positions, query_start=step.query_start, weights=weights)

    def attend_latent(self, layer: int, query: torch.Tensor, kv: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        step, spec, cache, dims, scale = self._step, self._spec, self._cache, self._spec.latent, self._spec.scale
        assert dims is not None
        assert scale is not None
        if layer == spec.first:
            self.refresh()
        tables, chunks = spec.rope[layer], self.expanded
        if chunks is None:
            absorbed = absorb(query, weights, dims)
            turned = absorbed[..., dims.latent :]
        else:
            turned = query.new_empty(len(query), spec.num_heads, dims.rope)
        write_latent(
            query, turned, kv, step.positions, step.slots[0], tables.cos, tables.sin, cache, layer, weights=weights, dims=dims,
            progress=self.progress,
        )  # fmt: skip
        if chunks is None:
            attended = query.new_empty(len(query), spec.num_heads, dims.latent)
            self._attend_absorbed(layer, absorbed, attended, dims, scale)
            out = values_of(attended, weights, dims)
        else:
            out = query.new_empty(len(query), spec.num_heads * dims.value)
            attend_expanded(
                query,
                turned,
                out,
                cache,
                layer,
                chunks=chunks,
                weights=weights,
                dims=dims,
                query_start=step.query_start,
                seq_lens=step.seq_lens,
                block_tables=step.block_tables[0],
                scale=scale,
            )
            if self.decode:
                some = slice(0, self.num_decodes)
                absorbed = absorb(query[some], weights, dims)
                absorbed[..., dims.latent :] = turned[some]
                attended = query.new_empty(self.num_decodes, spec.num_heads, dims.latent)
                self._attend_absorbed(layer, absorbed, attended, dims, scale)
                out[some] = values_of(attended, weights, dims)
        if self.progress is not None and layer == cache.shape.num_layers - 1:
            note_layers(*self.progress, layer + 1)
        return out

    def _attend_absorbed(self, layer: int, absorbed: torch.Tensor, out: torch.Tensor, dims: LatentDims, scale: float) -> None:
        """Of the decodes, and of chunks unless their keys and values are made."""
        step, cache = self._step, self._cache
        if self.decode:
            some = slice(0, self.num_decodes)
            latent_decode(
                absorbed[some],
                out[some],
                cache,
                layer,
                step.block_tables[0][some],
                step.seq_lens[some],
                plan=self.decode[0],
                program=latent_program(cache, dims, num_heads=self._spec.num_heads, max_queries=1),
                scale=scale,
            )
        if self.expanded is None and self.num_decodes < len(step.seq_lens):
            assert isinstance(self._tile_shape, LatentProgram)
            latent_chunks(
                absorbed,
                out,
                cache,
                layer,
                tiles=step.tiles,
                query_start=step.query_start,
                seq_lens=step.seq_lens,
                block_tables=step.block_tables[0],
                program=self._tile_shape,
                scale=scale,
            )

    def _attend_chunks(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        step, cache, spec, (group, place) = self._step, self._cache, self._spec, self._places[layer]
        inputs: dict[str, Any] = {
            "num_heads": spec.num_heads,
            "tiles": step.tiles,
            "query_start": step.query_start,
            "seq_lens": step.seq_lens,
            "block_tables": step.block_tables[group],
            "window": spec.windows[layer],
            "scale": spec.scale,
            "softcap": spec.softcap,
            "sinks": spec.sinks[layer] if spec.sinks else None,
        }
        if self._tile_shape is not None:
            assert isinstance(self._tile_shape, triton_prefill.TileShape)
            triton_prefill.prefill_attention(qkv, out, cache, place, shape=self._tile_shape, **inputs)
            return
        # Gluon is there, and needed, on Hopper only.
        if cache.quantized is not None:
            from twostep.model.kernels.hopper_prefill_quantized import hopper_quantized_attention  # noqa: PLC0415

            hopper_quantized_attention(qkv, out, cache, place, num_programs=num_sms_of(qkv.device), **inputs)
            return
        from twostep.model.kernels.hopper_prefill import hopper_attention, pool_blocks  # noqa: PLC0415

        if self._pool_blocks is None:
            self._pool_blocks = pool_blocks(cache)
        hopper_attention(qkv, out, cache, place, num_programs=num_sms_of(qkv.device), blocks=self._pool_blocks, **inputs)
