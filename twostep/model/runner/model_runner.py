"""Runs batches of one model on one device.

1. Engine.step plans a Batch                       twostep/engine/batch.py
2. ModelRunner.launch → model.forward              twostep/model/families/decoder.py
3. Ops and the step's AttentionPlan read and write KvCache   twostep/model/kernels/
4. the rows' logits become tokens                  twostep/model/runner/sampler.py, on a GPU device_sampler.py

On a CPU a step is done when it is launched; on a GPU (device_steps.py) the host goes on.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from twostep.checkpoint.kv_scheme import kv_format
from twostep.checkpoint.quantization import check_unquantized, quantization_at_load
from twostep.engine.batch import Batch, CapturedSteps, FinishedStep, InFlight, KvShape, LayerRange, Sampled
from twostep.errors import SetupError
from twostep.model.families.config import ModelConfig
from twostep.model.families.decoder import Decoder
from twostep.model.families.layer_states import LayerStates
from twostep.model.families.registry import build_model, parse_config
from twostep.model.families.sharding import ModelPart, with_whole_experts
from twostep.model.heads.head import DraftHead
from twostep.model.heads.source import HeadSource
from twostep.model.heads.tap import HeadTap
from twostep.model.kernels.ops import KEYS_TOGETHER, Ops
from twostep.model.loading.kv_scales import read_kv_scales
from twostep.model.loading.weights import as_stored, fill_random, load_weights
from twostep.model.parallel.member import Member, ops_of
from twostep.model.runner.device import device_of
from twostep.model.runner.head_rounds import MOST_ROWS, CpuRounds, HeadRounds, num_scratch_blocks
from twostep.model.runner.sampler import sample
from twostep.model.step.expert_load import ExpertLoadMeter
from twostep.model.step.graph_ladder import graph_bytes, ladder, mixed_ladder
from twostep.model.step.kv_cache import DTYPES, KvCache
from twostep.model.step.kv_sums import KvSums, bytes_beside_block, can_keep
from twostep.model.step.layer_groups import LayerGroups, layer_groups
from twostep.model.step.pool_sizing import PoolSizing, free_memory, measured_blocks
from twostep.model.step.prompt_readout import PromptReadout
from twostep.process.startup import NoProgress, Progress
from twostep.settings.worker import QUANTIZATIONS

if TYPE_CHECKING:
    from twostep.model.runner.head_graphs import DeviceRounds

LOAD_FORMATS = ("auto", "dummy")
# Bytes of the largest number in a state.
_STATE_NUMBER = 4

log = logging.getLogger(__name__)


class Steps(Protocol):
    """How steps of a model run on its device: CpuSteps, or DeviceSteps (device_steps.py)."""

    overlaps: bool

    @property
    def reads_shared_once(self) -> bool:
        """See Runner."""
        ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """Returns the logits of the batch's sample rows, [R, vocab_size], valid until the next step."""
        ...

    def launch(self, batch: Batch) -> InFlight:
        """See Runner.launch."""
        ...

    def sampled(self, num_rows: int) -> torch.Tensor:
        """Returns what the first rows of the last step sampled, on the device, for ranks that did not sample."""
        ...

    def close(self) -> None: ...


class CpuSteps:
    """A step is done when it is launched."""

    overlaps = False
    reads_shared_once = False

    def __init__(self, model: Decoder, cache: KvCache) -> None:
        self._model = model
        self._cache = cache
        self._last_token_ids: Sequence[int] = ()
        self._experts = ExpertLoadMeter(model.expert_loads)

    def forward(self, batch: Batch, reader: PromptReadout | None = None) -> torch.Tensor:
        return self._model.forward(batch, self._cache, reader)

    def launch(self, batch: Batch) -> InFlight:
        batch = batch.with_carried(self._last_token_ids)
        # Rank 0 of several picks the tokens; the others' batches have nothing to sample.
        reader = PromptReadout.of(batch, self._cache.tensor.device)
        sampled = sample(self.forward(batch, reader), batch.sampling, batch.masks)
        if reader is not None:
            scores, pooled = (None if each is None else each.numpy() for each in (reader.scores, reader.pooled))
            sampled = replace(sampled, scores=scores, pooled=pooled)
        self._last_token_ids = sampled.token_ids
        if (counts := self._experts.due()) is not None:
            sampled = replace(sampled, expert_imbalance=self._experts.imbalance(counts))
        return FinishedStep(sampled)

    def sampled(self, num_rows: int) -> torch.Tensor:
        return torch.tensor(self._last_token_ids[:num_rows])

    def close(self) -> None: ...


class ModelRunner:
    """The Runner of a real model (see twostep/engine/batch.py for the contract)."""

    def __init__(
        self,
        model_dir: Path | str,
        *,
        num_blocks: int | PoolSizing,
        block_size: int = 16,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        device: str = "cpu",
        max_model_len: int | None = None,
        num_threads: int | None = None,
        load_format: str = "auto",
        quantization: str = "none",
        enable_expert_parallel: bool = False,
        architecture: str = "",
        max_num_seqs: int = 0,
        max_graph_tokens: int = 0,
        keep_kv_sums: bool = False,
        head: HeadSource | None = None,
        one_group: bool = False,
        progress: Progress | None = None,
        member: Member | None = None,
    ) -> None:
        """Loads a model directory. `num_blocks` may be a PoolSizing on a GPU: what fits beside a profiled step. `dtype` auto: that of the
        weights. `kv_cache_dtype` auto: what the checkpoint asks for; exact: the model's; others: quantized. `device` is cpu, cuda or
        cuda:N. `load_format` dummy: random weights, only config.json is read. `quantization` fp8, int8 or int4: weights are put into that
        as they are read. `enable_expert_parallel`: of several ranks each holds whole experts. `architecture`: in place of config.json's.
        `max_num_seqs`: decode steps of up to so many sequences are captured as CUDA graphs (0: none), and steps with prompts of up to
        `max_graph_tokens` tokens. `keep_kv_sums`: steps keep checksums of the pool's blocks as they write them, where the device and the
        model's shape allow it. `head`: what drafts from what steps leave for it. `one_group`: sequences keep all blocks of all layers, also
        of those with windows. `num_threads` sets torch's, for the whole process. `member`: this is one of several ranks (ParallelRunner
        makes them), and holds its part of the model and of every block. Raises SetupError with what to change."""
        self._device = device_of(device)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        model_dir = Path(model_dir)
        config, chosen = _resolved(
            model_dir,
            architecture=architecture,
            max_model_len=max_model_len,
            dtype=dtype,
            load_format=load_format,
            quantization=quantization,
            whole_experts=enable_expert_parallel,
        )
        if head is not None:
            assert member is None, "no head drafts for a model on several devices"
            head.state_size(config)
            config = replace(config, uses_mtp=head.uses_mtp)
        self._config = config
        self._member = member
        # What drafts, once it is loaded, and what steps leave for it.
        self._head: DraftHead | None = None
        self._tap: HeadTap | None = None
        self.head: HeadRounds | None = None
        self._device_rounds: DeviceRounds | None = None
        head_layers = 0 if head is None else head.num_layers
        most_drafted = 0 if head is None else head.most_tokens
        self._keep_sums = keep_kv_sums
        self._max_graph_tokens = max_graph_tokens
        part = None if member is None else member.part(config)
        local = config if part is None else part.shard.local
        self._steps: Steps
        self.captured = CapturedSteps()
        progress = progress or NoProgress()
        progress.phase("device")
        with self._on_device():
            sizing = num_blocks if isinstance(num_blocks, PoolSizing) else None
            free_at_start = 0 if sizing is None else free_memory(self._device, sizing)
            ops = ops_of(self._device) if member is None else member.ops(local, DTYPES[chosen], self._device)
            progress.phase("weights")
            self._model = self._loaded(model_dir, local, chosen, ops, part, load_format=load_format, progress=progress)
            if member is not None:
                member.meeting.exchange(b"loaded")
            if head is not None:
                self._head = head.load(self._model, config, ops, str(self._device))
                self._model.attention = replace(self._model.attention, placed=True)
            scales = _kv_scales(config, model_dir, kv_cache_dtype, load_format)
            if scales is not None and part is not None:
                scales = scales[..., part.shard.kv_heads.slice]
            if scales is not None and head_layers:
                # Nobody has measured the head's: the largest of the model's.
                scales = torch.cat((scales, scales.amax(0, keepdim=True)))
            new_cache = partial(KvCache, device=str(self._device), scales=scales)
            new_shape = partial(
                kv_shape,
                local,
                chosen,
                block_size=block_size,
                kv_cache_dtype=kv_cache_dtype,
                num_head_layers=head_layers,
                one_group=one_group,
            )
            if isinstance(num_blocks, PoolSizing):
                self._set_cache(new_cache(new_shape(1)))
                self._steps = self._device_steps(ops, 0, progress)
                num_blocks = self._measured_blocks(num_blocks, local, free_at_start, max_num_seqs, progress)
            if member is not None:
                num_blocks = member.meeting.least(num_blocks)
            progress.phase("pool")
            scratch = num_scratch_blocks(block_size, max_num_seqs or MOST_ROWS, most_drafted) if head_layers else 0
            tap = self._set_cache(new_cache(new_shape(num_blocks), num_scratch=scratch))
            self._cache.sums = self._make_sums(local)
            if self._device.type == "cuda":
                progress.phase("graphs")
                self._steps = self._device_steps(ops, max_num_seqs, progress)
            else:
                self._steps = CpuSteps(self._model, self._cache)
            if tap is not None:
                self.head = self._head_rounds(tap, ops, max_num_seqs, most_drafted)

    def _loaded(
        self, model_dir: Path, local: ModelConfig, dtype: str, ops: Ops, part: ModelPart | None, *, load_format: str, progress: Progress
    ) -> Decoder:
        """Returns the model with its weights on the device; of several ranks its `part`. Raises SetupError."""
        try:
            model = build_model(local, DTYPES[dtype], ops, str(self._device), part)
            if load_format == "dummy":
                fill_random(model)
            else:
                load_weights(model, model_dir, lambda done, total: progress.advance(done, total, "B"))
        except torch.OutOfMemoryError as error:
            raise SetupError(f"the weights do not fit the memory of {self._device}: {error}") from error
        return model

    def _set_cache(self, cache: KvCache) -> HeadTap | None:
        self._cache = cache
        if self._head is not None:
            self._model.tap = self._tap = HeadTap(self._head, cache)
        return self._tap

    def _head_rounds(self, tap: HeadTap, ops: Ops, max_num_seqs: int, most_tokens: int) -> HeadRounds:
        head, bounds = tap.head, {"max_num_seqs": max_num_seqs or MOST_ROWS, "most_tokens": most_tokens}
        if self._device.type == "cpu":
            return HeadRounds(head, self._cache, CpuRounds(tap, self._cache, ops), **bounds)
        from twostep.model.kernels.triton_ops import TritonOps  # noqa: PLC0415
        from twostep.model.runner.head_graphs import DeviceRounds  # noqa: PLC0415 - as in _device_steps

        assert isinstance(ops, TritonOps)
        self._device_rounds = rounds = DeviceRounds(
            tap,
            self._cache,
            ops,
            max_rows=min(MOST_ROWS, max_num_seqs),
            most_tokens=min(most_tokens, head.most_tokens),
            max_model_len=self.max_model_len,
        )
        log.info("%d rounds of the head captured as CUDA graphs", rounds.count)
        return HeadRounds(head, self._cache, rounds, **bounds)

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def kv_shape(self) -> KvShape:
        return self._cache.shape

    @property
    def kv_cache(self) -> KvCache:
        """The pool itself, for transports that read it where it lies. Of one rank where there are several."""
        return self._cache

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._config.max_model_len

    @property
    def model(self) -> Decoder:
        """The model itself, for those who look into it. Of one rank where there are several."""
        return self._model

    def forward(self, batch: Batch, states: LayerStates | None = None) -> torch.Tensor:
        """Writes the KV of all T tokens; returns the logits of the sample rows, [R, vocab_size] in the model's dtype, valid until the
        next step. `states`: takes what the tokens look like half-way; captured steps, which do not tell, are not used then."""
        with torch.inference_mode(), self._on_device():
            return self._steps.forward(batch) if states is None else self._model.forward(batch, self._cache, tap=states)

    @property
    def head_failed(self) -> bool:
        """Returns whether steps leave nothing for the head any more."""
        return self._tap is not None and self._tap.failed

    @property
    def generates(self) -> bool:
        return self._config.generates

    @property
    def reads_shared_once(self) -> bool:
        return self._steps.reads_shared_once

    @property
    def overlaps(self) -> bool:
        # An encoder's steps take their tokens from the host.
        return self._steps.overlaps and not self.kv_shape.has_encoder

    @property
    def marks_layers(self) -> bool:
        # A state is there when a step has ended, and not layer by layer; and a block of several groups is not of the first layers.
        return self.overlaps and self._member is None and not self.kv_shape.num_state_blocks and self.kv_shape.num_groups == 1

    def launch(self, batch: Batch) -> InFlight:
        with torch.inference_mode(), self._on_device():
            if self._member is not None and self.overlaps and (num_rows := batch.num_before):
                # Only rank 0 has sampled them.
                self._member.group.broadcast(self._steps.sampled(num_rows))
            return self._steps.launch(batch)

    def sampled(self, num_rows: int) -> torch.Tensor:
        """Returns what the first rows of the step launched last sample, int64 [num_rows], on the device: from there the next one takes
        them."""
        return self._steps.sampled(num_rows)

    def close(self) -> None:
        """Frees captured steps; nothing is launched any more. A library that takes part in them cannot end before."""
        self._steps.close()
        if self._device_rounds is not None:
            self._device_rounds.close()
        gc.collect()

    def run(self, batch: Batch) -> Sampled:
        """Launches a step that carries nothing, and waits for it."""
        return self.launch(batch).result()

    def _device_steps(self, ops: Ops, max_num_seqs: int, progress: Progress) -> Steps:
        """Makes those for the pool there is now."""
        # Only a GPU needs triton, and importing it takes a second.
        from twostep.model.kernels.triton_ops import TritonOps  # noqa: PLC0415
        from twostep.model.runner.device_steps import DeviceSteps  # noqa: PLC0415
        from twostep.model.runner.step_graphs import StepGraphs  # noqa: PLC0415

        assert isinstance(ops, TritonOps)
        if self._member is not None and self.kv_shape.num_state_blocks:
            # Ranks capture the same steps, or none of them does.
            ops.has_delta_kernels = bool(self._member.meeting.least(int(ops.has_delta_kernels)))
        with torch.inference_mode():
            if not max_num_seqs or self.kv_shape.has_encoder or (self.kv_shape.num_state_blocks and not ops.has_delta_kernels):
                return DeviceSteps(self._model, self._cache, ops, None)
            free, _ = torch.cuda.mem_get_info(self._device)
            graphs = StepGraphs(
                self._model,
                self._cache,
                ops,
                ladder(max_num_seqs),
                lambda done, total: progress.advance(done, total, "graphs"),
                mixed=mixed_ladder(self._max_graph_tokens, max_num_seqs, has_experts=self.config.experts is not None)
                if self._max_graph_tokens
                else (),
                meet=None if self._member is None else partial(self._member.meeting.exchange, b"warm"),
            )
            if self._member is not None and not self._member.meeting.least(graphs.num_mixed):
                graphs.without_mixed()
            trouble = graphs.try_sharing()
            if trouble:
                log.warning("prefixes that sequences share are read by each for itself: %s", trouble)
            num_bytes = max(0, free - torch.cuda.mem_get_info(self._device)[0])
            self.captured = CapturedSteps(count=graphs.count, most_prompt_rows=graphs.most_prompt_rows, num_bytes=num_bytes)
            # What else took memory of the device meanwhile is part of it.
            log.info("%d steps captured as CUDA graphs, in %.0f MiB", graphs.count, num_bytes / (1 << 20))
        return DeviceSteps(self._model, self._cache, ops, graphs)

    def _make_sums(self, config: ModelConfig) -> KvSums | None:
        """Before steps are captured: they hold the sums' address."""
        if self._sums_beside(config) == 0:
            return None
        from twostep.model.kernels.triton_pull import slot_sums  # noqa: PLC0415

        return KvSums(self._cache.tensor, self._cache.shape, config.num_heads, self._model.attention.rotated, slot_sums)

    def _sums_beside(self, config: ModelConfig) -> int:
        """Bytes that checksums take for each block of the pool; 0 where steps cannot keep them."""
        if not self._keep_sums or self._device.type == "cpu":
            return 0
        head = None if self._head is None else self._head.attention
        if head is not None and (head.num_heads, head.rotated) != (config.num_heads, self._model.attention.rotated):
            # What writes a token's KV sums it, program by program: of another number of heads they are others.
            return 0
        shape, rotated = self._cache.shape, self._model.attention.rotated
        return bytes_beside_block(shape, config.num_heads) if can_keep(shape, rotated, self._cache.tensor.element_size()) else 0

    def _measured_blocks(self, sizing: PoolSizing, config: ModelConfig, free_at_start: int, max_num_seqs: int, progress: Progress) -> int:
        return measured_blocks(
            self.run,
            self.kv_shape,
            sizing,
            beside_block=self._sums_beside(config) + sizing.draft_block_bytes,
            device=self._device,
            free_at_start=free_at_start,
            graphs=captured_bytes(
                config,
                self.kv_shape.dtype,
                max_num_seqs,
                self._max_graph_tokens,
                # A rank has its own part of a step's logits, those of all ranks side by side, and the whole.
                logits=self.vocab_size * (1 if self._member is None else 3),
            ),
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            progress=progress,
        )

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels are launched on the thread's current device."""
        return nullcontext() if self._device.type == "cpu" else torch.cuda.device(self._device)

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        self._cache.read_blocks(block_ids, out, layers)

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        self._cache.write_blocks(block_ids, data, layers)

    def new_host_blocks(self, count: int) -> npt.NDArray[np.uint8]:
        return self._cache.new_host_blocks(count)

    def pin_host(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        return self._cache.pin_host(memory)


def with_quantization(config: ModelConfig, name: str) -> ModelConfig:
    """Returns `config` with what --quantization asks for. Raises SetupError."""
    if name not in QUANTIZATIONS:
        raise SetupError(f"quantization is {name!r}; give {', '.join(QUANTIZATIONS)}")
    if name == "none":
        return config
    check_unquantized(config.quantization, name)
    return replace(config, quantization=quantization_at_load(name))


def kv_shape(
    config: ModelConfig,
    dtype: str,
    num_blocks: int,
    block_size: int,
    kv_cache_dtype: str = "auto",
    *,
    num_head_layers: int = 0,
    one_group: bool = False,
) -> KvShape:
    """The pool's shape for a model, and for the layers of a head, which lie in the blocks of all layers; `dtype` is a name, not auto.
    `one_group`: see ModelRunner. Raises SetupError."""
    if num_blocks < 1 or block_size < 1:
        raise SetupError(f"the KV cache has {num_blocks} blocks of {block_size} tokens; give at least 1 of each")
    groups, reach = LayerGroups(config.num_kv_layers, 1, 0), max(config.windows, default=0) + KEYS_TOGETHER
    # A model whose layers all have windows has one group. Scales of the checkpoint are of each layer, not of each place in a block.
    one_group = one_group or num_head_layers > 0 or (config.kv_scheme is not None and config.kv_scheme.static)
    if any(config.windows) and reach < config.max_model_len and not (one_group and 0 in config.windows):
        groups = layer_groups(config.windows)
    shape = KvShape(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=groups.num_layers + num_head_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        quantization=kv_format(kv_cache_dtype, config.kv_scheme),
        num_planes=2 if config.latent is None else 1,
        has_encoder=config.encoder is not None,
        num_groups=groups.num_full + groups.num_windowed,
        num_windowed=groups.num_windowed,
        reach=reach if groups.num_windowed else 0,
    )
    if (delta := config.gated_delta) is None:
        return shape
    if shape.plane_bytes % (delta.columns.count * _STATE_NUMBER):
        raise SetupError(
            f"a block's keys take {shape.plane_bytes} bytes a layer, which are not cut into {delta.columns.count} columns of states; "
            f"give a --block-size that is a multiple of {delta.columns.count}"
        )
    # Each layer's in whole blocks.
    blocks_each = shape.state_blocks_each(delta.column_bytes(DTYPES[dtype].itemsize), delta.columns.count)
    return replace(shape, num_state_blocks=blocks_each * delta.layers.count(True))


def _kv_scales(config: ModelConfig, model_dir: Path, kv_cache_dtype: str, load_format: str) -> torch.Tensor | None:
    """The checkpoint's scales, if it has any for the format in which its KV is held."""
    scheme = config.kv_scheme
    if scheme is None or not scheme.static or kv_format(kv_cache_dtype, scheme) != scheme.format or load_format == "dummy":
        return None
    return read_kv_scales(model_dir, config)


def captured_bytes(config: ModelConfig, dtype: str, max_num_seqs: int, max_graph_tokens: int, *, logits: int = 0) -> int:
    """About what the captured steps of a model, or of one rank's part of it, keep. `logits` that a row has; 0: the vocabulary's."""
    item_bytes = DTYPES[dtype].itemsize
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    row = 3 * config.hidden_size + heads * config.head_dim + 3 * config.intermediate_size
    if (experts := config.experts) is not None:
        # Shared experts are an MLP, or some of the others.
        of_one, shared = config.hidden_size + experts.intermediate_size, experts.shared_size
        row += experts.router.top_k * of_one + max(3 * shared, shared // max(1, experts.intermediate_size) * of_one)
    states = 0 if config.gated_delta is None else config.gated_delta.row_bytes(item_bytes)
    logits_bytes = (logits or config.vocab_size) * item_bytes
    row_bytes = row * item_bytes + states
    return graph_bytes(max_num_seqs, max_graph_tokens, has_experts=experts is not None, logits_bytes=logits_bytes, row_bytes=row_bytes)


def num_blocks_for(
    config: ModelConfig,
    dtype: str,
    block_size: int,
    memory_bytes: int,
    kv_cache_dtype: str = "auto",
    *,
    beside_block: int = 0,
    num_head_layers: int = 0,
) -> int:
    """How many blocks fit a budget, each with `beside_block` bytes more. Raises SetupError if none does."""
    chosen = config.dtype if dtype == "auto" else dtype
    shape = kv_shape(config, chosen, 1, block_size, kv_cache_dtype, num_head_layers=num_head_layers)
    per_block = shape.block_bytes + beside_block
    if memory_bytes < per_block:
        raise SetupError(f"a KV cache of {memory_bytes} bytes holds no block; one takes {per_block}")
    return memory_bytes // per_block


def _resolved(
    model_dir: Path, *, architecture: str, max_model_len: int | None, dtype: str, load_format: str, quantization: str, whole_experts: bool
) -> tuple[ModelConfig, str]:
    """Returns the model's configuration as it is to be loaded, and the dtype that it is computed in. Raises SetupError."""
    config = _limited(parse_config(model_dir, architecture), max_model_len)
    chosen = config.dtype if dtype == "auto" else dtype
    if chosen not in DTYPES:
        raise SetupError(f"dtype is {dtype!r}; give auto, {', '.join(DTYPES)}")
    if load_format not in LOAD_FORMATS:
        raise SetupError(f"load_format is {load_format!r}; give {' or '.join(LOAD_FORMATS)}")
    config = with_quantization(config, quantization)
    if whole_experts:
        config = with_whole_experts(config)
    if load_format == "dummy" and (experts := config.experts) is not None:
        config = replace(config, experts=replace(experts, router=replace(experts.router, scattered=True)))
    return config if load_format == "dummy" else as_stored(config, model_dir, DTYPES[chosen]), chosen


def _limited(config: ModelConfig, max_model_len: int | None) -> ModelConfig:
    if max_model_len is None:
        return config
    if not 1 <= max_model_len <= config.max_model_len:
        raise SetupError(f"max_model_len is {max_model_len}; the model takes 1 to {config.max_model_len}")
    return replace(config, max_model_len=max_model_len)
