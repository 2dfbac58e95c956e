"""Describes what a worker serves: a runner, and what others need to know of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostep.checkpoint.agreement import check_formats
from twostep.checkpoint.fingerprint import dummy_fingerprint, model_fingerprint, quantized_fingerprint, turned_fingerprint
from twostep.cluster.records import STATE_LAYOUT, LayoutRecord
from twostep.engine.batch import CapturedSteps, KvShape, Runner
from twostep.engine.config import check_pool
from twostep.engine.fake import FakeRunner
from twostep.engine.grammar import GrammarCompiler
from twostep.engine.self_test import gives_tokens
from twostep.errors import InvalidRequest, SetupError
from twostep.lab.plan.model import dtype_on_cpu, weight_bytes
from twostep.model.loading.store import resolve
from twostep.process.free_memory import check_memory
from twostep.process.startup import NoProgress, Progress
from twostep.settings.worker import CPU_NUM_SEQS, CPU_STEP_TOKENS, GPU_MAX_STEP_MS, GPU_NUM_SEQS, GPU_STEP_TOKENS
from twostep.step_curve import StepCurve, knee_of
from twostep.text.model_card import ModelCard
from twostep.worker.calibration import calibrate
from twostep.worker.config import WorkerConfig
from twostep.worker.draft import Draft, find_draft
from twostep.worker.head import Head

if TYPE_CHECKING:
    from twostep.model.runner.model_runner import ModelRunner
    from twostep.model.runner.parallel_runner import ParallelRunner
    from twostep.model.step.pool_sizing import PoolSizing

log = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 512 << 20
_FAKE_BLOCKS = 4096
_FAKE_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    runner: Runner
    layout: LayoutRecord
    eos_token_ids: frozenset[int]
    ranks: ParallelRunner | None = None  # the runner, where it has processes besides this one
    # How long its steps take, as measured at the start; None: not measured.
    curve: StepCurve | None = None
    # Its tokenizer.json, for answers held to a grammar; None: there is none.
    tokenizer_dir: Path | None = None
    gpu_ids: tuple[str, ...] = ()  # UUIDs of the GPUs that it is computed on, by rank
    captured: CapturedSteps = field(default_factory=CapturedSteps)
    draft: Runner | None = None  # a smaller model that drafts its tokens
    has_head: bool = False  # the runner has a head that does

    def grammar_compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.tokenizer_dir, vocab_size=self.runner.vocab_size, eos_token_ids=self.eos_token_ids)


def load_model(config: WorkerConfig, progress: Progress | None = None) -> ServedModel:
    """Blocks until the weights are there and a GPU is warm. Raises SetupError with what to change."""
    config, progress = resolve_config(config), progress or NoProgress()
    model_dir = None
    if config.model:
        weights = not config.dummy_weights
        revision, cache_dir = config.model_revision, config.cache_dir
        model_dir = resolve(config.model, revision=revision, weights=weights, cache_dir=cache_dir, progress=log.info, bar=progress)
        if config.device == "cpu":
            config = replace(config, dtype=dtype_on_cpu(model_dir, config.dtype, config.quantization, config.architecture))
    ranks: ParallelRunner | None = None
    captured = CapturedSteps()
    draft = find_draft(config, model_dir)
    if config.runner == "fake" or model_dir is None:
        runner = _fake_runner(config, model_dir)
    else:
        check_formats(model_dir, config)
        _check_memory(config, model_dir, draft)
        if config.tensor_parallel_size > 1:
            runner = ranks = _parallel_runner(config, model_dir, progress)
            captured = ranks.captured
        else:
            alone = _model_runner(config, model_dir, progress, draft)
            runner, captured = alone, alone.captured
    if not gives_tokens(runner):
        if ranks is not None:
            ranks.close()
        raise SetupError(
            f"{config.model_name} gives no token for any prompt in {runner.kv_shape.dtype}: its logits are not finite. Another "
            "--dtype (bfloat16, float32) may hold its values; else its files are damaged, or the device is"
        )
    card = None if model_dir is None else ModelCard.load(model_dir, config.architecture)
    curve = None
    shape = runner.kv_shape
    log.info(
        "%s loaded: %s, %s%s%d KV blocks of %d tokens (%.0f MiB), context %d",
        config.model_name,
        shape.dtype,
        _weights_as(config, model_dir),
        "" if shape.quantization == "none" else f"KV as {shape.quantization}, ",
        shape.num_blocks,
        shape.block_size,
        shape.num_blocks * shape.block_bytes / (1 << 20),
        runner.max_model_len,
    )
    if card is not None:
        log.info("answers end with %s", card.described_ends)
    draft_runner = draft.load(shape.num_blocks) if isinstance(draft, Draft) else None
    if config.calibrate:
        progress.phase("curve")
        curve = calibrate(
            runner,
            step_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            captured_rows=captured.most_prompt_rows,
        )
    return ServedModel(
        name=config.model_name,
        runner=runner,
        layout=layout_of(shape, _fingerprint(config, model_dir, runner.max_model_len)),
        eos_token_ids=frozenset() if card is None else card.eos_token_ids,
        ranks=ranks,
        curve=curve,
        tokenizer_dir=model_dir,
        gpu_ids=_gpu_ids(config),
        captured=captured,
        draft=draft_runner,
        has_head=isinstance(draft, Head),
    )


def resolve_config(config: WorkerConfig) -> WorkerConfig:
    """Returns the configuration with everything decided that depends on the machine: the device, and how much a step of it takes.
    Idempotent. Raises SetupError."""
    on_gpu = False
    if config.runner == "model" and config.model:
        # Importing torch takes seconds and hundreds of megabytes, which a fake runner does without.
        from twostep.model.runner.device import choose_device, cpu_computes_bfloat16  # noqa: PLC0415

        device, why = choose_device(config.device)
        if device != config.device:
            log.info("device %s: %s", device, why)
            config = replace(config, device=device)
        on_gpu = device != "cpu"
        if config.dtype == "auto" and not on_gpu and not cpu_computes_bfloat16():
            log.info("dtype float32: this CPU computes bfloat16 slower and less exactly")
            config = replace(config, dtype="float32")
    config = replace(config, step_tokens_at_knee=config.step_tokens_at_knee or not config.max_num_batched_tokens)
    if not config.max_num_batched_tokens and on_gpu:
        other = next(role for role in GPU_STEP_TOKENS if role != config.role)
        config = replace(config, max_num_batched_tokens=GPU_STEP_TOKENS[config.role], other_step_tokens=GPU_STEP_TOKENS[other])
    return replace(
        config,
        max_num_batched_tokens=config.max_num_batched_tokens or CPU_STEP_TOKENS,
        max_num_seqs=config.max_num_seqs or (GPU_NUM_SEQS if on_gpu else CPU_NUM_SEQS),
        max_step_ms=(GPU_MAX_STEP_MS if on_gpu else 0.0) if config.max_step_ms is None else config.max_step_ms,
    )


def at_knee(config: WorkerConfig, curve: StepCurve | None, *, whole_prompts: bool = False) -> WorkerConfig:
    """Returns the configuration with token budgets by the measured curve, where they were left to the machine: the decode role's, whose
    steps compute prompts beside others' tokens, is that at the knee (step_curve.py), with room for as many prompt tokens as sequences.
    Never more than `resolve_config` chose: so much memory is kept for a step. A prefill worker's steps are nobody's gaps, and stay as they
    are; so do all where a step has `whole_prompts`, which could not be longer than it."""
    if curve is None or whole_prompts or not config.step_tokens_at_knee:
        return config
    own, other = config.max_num_batched_tokens, config.other_step_tokens or config.max_num_batched_tokens
    largest = own if config.role == "decode" else other
    knee = min(largest, max(2 * config.max_num_seqs, knee_of(curve, largest)))
    log.info("token budget of a decode worker's step: %d, at the knee of the measured curve (%d at most)", knee, largest)
    own, other = (knee, other) if config.role == "decode" else (own, knee)
    return replace(config, max_num_batched_tokens=own, other_step_tokens=other)


def _gpu_ids(config: WorkerConfig) -> tuple[str, ...]:
    if config.runner == "fake" or not config.device.startswith("cuda"):
        return ()
    from twostep.model.runner.device import gpu_ids  # noqa: PLC0415

    return gpu_ids(config.device, config.tensor_parallel_size)


def _fingerprint(config: WorkerConfig, model_dir: Path | None, max_model_len: int) -> str:
    if model_dir is None:
        return "fake"
    if config.dummy_weights:
        kind = f"{config.device.partition(':')[0]}-{config.tensor_parallel_size}" + ("-ep" if config.enable_expert_parallel else "")
        found = dummy_fingerprint(model_dir, kind, config.architecture)
    else:
        found = model_fingerprint(model_dir, config.architecture)
    found = quantized_fingerprint(found, config.quantization)
    if config.runner == "fake":
        return found
    from twostep.model.families.registry import parse_config  # noqa: PLC0415

    rope = parse_config(model_dir, config.architecture).rope
    return found if rope is None else turned_fingerprint(found, rope.factors(max_model_len))


def layout_of(shape: KvShape, fingerprint: str) -> LayoutRecord:
    return LayoutRecord(
        model_fingerprint=fingerprint,
        dtype=shape.dtype,
        block_size=shape.block_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        quantization=shape.quantization,
        num_planes=shape.num_planes,
        num_state_blocks=shape.num_state_blocks,
        state_layout=STATE_LAYOUT if shape.num_state_blocks else 0,
        num_groups=shape.num_groups,
        num_windowed=shape.num_windowed,
        reach=shape.reach if shape.num_windowed else 0,
    )


def _model_runner(config: WorkerConfig, model_dir: Path, progress: Progress, draft: Draft | Head | None) -> ModelRunner:
    from twostep.model.runner.model_runner import ModelRunner  # noqa: PLC0415

    # What others read out of this worker's memory is summed as it is written; what they are sent is summed on its way.
    one_sided = not {"cuda_ipc", "nixl", "auto"}.isdisjoint(config.kv_transfer.split(","))
    options = _runner_options(config, model_dir, draft)
    head = draft.source if isinstance(draft, Head) else None
    return ModelRunner(model_dir, progress=progress, keep_kv_sums=config.hands_over and one_sided, head=head, **options)


def _parallel_runner(config: WorkerConfig, model_dir: Path, progress: Progress) -> ParallelRunner:
    from twostep.model.runner.parallel_runner import ParallelRunner  # noqa: PLC0415

    return ParallelRunner(
        model_dir,
        size=config.tensor_parallel_size,
        step_timeout_s=config.stall_timeout,
        log_json=config.log_json,
        progress=progress,
        **_runner_options(config, model_dir),
    )


def _weights_as(config: WorkerConfig, model_dir: Path | None) -> str:
    """Returns what the log says of quantized weights."""
    from twostep.model.families.registry import parse_config  # noqa: PLC0415

    if config.runner == "fake" or model_dir is None:
        return ""
    stored = parse_config(model_dir, config.architecture).quantization
    method = config.quantization if config.quantization != "none" else stored.method if stored is not None else ""
    return f"weights as {method}, " if method else ""


def _check_memory(config: WorkerConfig, model_dir: Path, draft: Draft | Head | None) -> None:
    """Checks a CPU's memory before any of it is taken: the kernel would kill this process, or another one, without a word. Raises
    SetupError."""
    from twostep.model.families.registry import parse_config  # noqa: PLC0415
    from twostep.model.runner.model_runner import kv_shape  # noqa: PLC0415

    if config.device != "cpu":
        return
    model = parse_config(model_dir, config.architecture)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    num_blocks = _pool(config, model_dir, draft)
    assert isinstance(num_blocks, int), "only a GPU's pool is measured"
    shape = kv_shape(model, dtype, 1, config.block_size, config.kv_cache_dtype, num_head_layers=_head_layers(draft))
    what = {
        "weights": weight_bytes(model_dir, dtype, config.quantization),
        "KV cache": num_blocks * shape.block_bytes,
        "--prefix-cache-space": int(config.prefix_cache_space * (1 << 30)),
        "draft model or head": 0 if draft is None else draft.fixed_bytes + num_blocks * draft.block_bytes,
    }
    flag = "--num-blocks" if config.num_blocks else "--kv-cache-memory-bytes"
    check_memory(what, f"lower {flag}, take a smaller model or another --dtype, or end other processes")


def _runner_options(config: WorkerConfig, model_dir: Path, draft: Draft | Head | None = None) -> dict[str, Any]:
    return {
        "num_blocks": _pool(config, model_dir, draft),
        "block_size": config.block_size,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "device": config.device,
        "max_model_len": config.max_model_len or None,
        "num_threads": config.cpu_threads or None,
        "load_format": config.load_format,
        "quantization": config.quantization,
        "enable_expert_parallel": config.enable_expert_parallel,
        "architecture": config.architecture,
        "max_num_seqs": config.max_num_seqs,
        "max_graph_tokens": config.max_cudagraph_capture_size,
    }


def _head_layers(draft: Draft | Head | None) -> int:
    """Returns how many layers of the pool are a head's."""
    return draft.num_layers if isinstance(draft, Head) else 0


def _pool(config: WorkerConfig, model_dir: Path, draft: Draft | Head | None) -> int | PoolSizing:
    """Returns the blocks of the KV pool, or how to find out once the weights are loaded. Of memory that is given, a draft model's pool is a
    part."""
    from twostep.model.families.registry import parse_config  # noqa: PLC0415
    from twostep.model.runner.model_runner import num_blocks_for  # noqa: PLC0415
    from twostep.model.step.pool_sizing import PoolSizing  # noqa: PLC0415

    if config.device != "cpu" and not config.num_blocks and not config.kv_cache_memory_bytes:
        return PoolSizing(
            utilization=config.gpu_memory_utilization,
            # In whichever role: a step of the other one must not run out of memory.
            max_num_batched_tokens=max(config.max_num_batched_tokens, config.other_step_tokens),
            max_num_seqs=config.max_num_seqs,
            draft_bytes=0 if draft is None else draft.later_bytes,
            draft_block_bytes=0 if draft is None else draft.block_bytes,
        )
    num_blocks, num_bytes = config.num_blocks, config.kv_cache_memory_bytes or _CPU_CACHE_BYTES
    if not num_blocks:
        num_blocks = num_blocks_for(
            parse_config(model_dir, config.architecture),
            config.dtype,
            config.block_size,
            num_bytes,
            config.kv_cache_dtype,
            beside_block=0 if draft is None else draft.block_bytes,
            num_head_layers=_head_layers(draft),
        )
    check_pool(num_blocks, config.block_size, config.max_model_len)
    return num_blocks


def _fake_runner(config: WorkerConfig, model_dir: Path | None) -> Runner:
    card = None if model_dir is None else ModelCard.load(model_dir, config.architecture)
    longest = _FAKE_MODEL_LEN if card is None else card.max_model_len
    if config.max_model_len > longest:
        raise SetupError(f"--max-model-len {config.max_model_len} is more than the {longest} of the model; lower it")
    check_pool(config.num_blocks or _FAKE_BLOCKS, config.block_size, config.max_model_len)
    try:
        return FakeRunner(
            num_blocks=config.num_blocks or _FAKE_BLOCKS,
            block_size=config.block_size,
            vocab_size=config.fake_vocab_size if card is None else card.vocab_size,
            max_model_len=config.max_model_len or longest,
            step_s=config.fake_step_ms / 1000,
        )
    except InvalidRequest as error:
        raise SetupError(error.message) from error
