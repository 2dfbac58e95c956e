"""The machines that a plan is for, put together from a preset, curves, a model and sizes: what each worker's engine is, and its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twostep.errors import SetupError
from twostep.lab.plan.memory import WorkerMemory, worker_memory
from twostep.lab.plan.model_shape import PlannedModel
from twostep.lab.plan.presets import Preset, load_preset
from twostep.lab.simulator.cluster import SimulatedDeployment
from twostep.lab.simulator.engine import EngineSpec
from twostep.step_curve import StepWorkload, chunk_pairs

if TYPE_CHECKING:
    # What reads records needs more than the base install.
    from twostep.cluster.records import WorkerRecord

# A step by which curves are put in order: a chunk of a prompt beside some decodes.
_USUAL = StepWorkload(prompt_tokens=512, pairs=chunk_pairs(512, 0), decodes=32, context=32 * 2048)
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`base` has the workers' specs (its numbers of workers do not matter). `memory` is None where workers publish their blocks themselves;
    `gpus` is how many each worker takes."""

    name: str
    base: SimulatedDeployment
    model: PlannedModel
    memory: WorkerMemory | None
    gpus: int = 1


def machine_of(preset: Preset, model: PlannedModel, memory: WorkerMemory, *, block_size: int = 16, gpus: int = 1) -> Machine:
    """Workers of a preset's curves and bounds, with what the memory holds."""
    common = EngineSpec(
        curve=preset.decode,
        mixed=preset.mixed,
        step_tokens=preset.decode_tokens,
        max_num_seqs=preset.max_num_seqs,
        num_blocks=memory.num_blocks,
        block_size=block_size,
        look_ahead=preset.look_ahead,
        ahead_s=preset.decode_ahead_s,
    )
    return Machine(
        name=preset.name,
        base=SimulatedDeployment(
            num_prefill=1,
            num_decode=1,
            prefill=replace(common, curve=preset.prefill, mixed=None, step_tokens=preset.prefill_tokens, ahead_s=preset.prefill_ahead_s),
            decode=common,
            hand_over=replace(preset.hand_over, kv_token_bytes=model.kv_token_bytes),
            edge_s=preset.edge_s,
        ),
        model=model,
        memory=memory,
        gpus=gpus,
    )


def machine_of_preset(name: str) -> Machine:
    """Workers of a preset on the GPU that it was measured on. Raises SetupError for one that does not say its model and memory."""
    preset = load_preset(name)
    if preset.model is None or not preset.gpu_memory_bytes:
        raise SetupError(f"the preset {name} names no model and no memory; give one like h200-llama-3.1-8b")
    memory = worker_memory(preset.model, preset.gpu_memory_bytes, runtime_bytes=preset.runtime_bytes)
    return machine_of(preset, preset.model, memory)


def machine_of_workers(records: Iterable[WorkerRecord], preset: Preset) -> Machine:
    """Workers like those that run: of the ready ones of each role, the one whose steps take the middle of all times, so that one curve
    gone wrong does not decide. `preset` says how KV travels and what the edge adds. Raises SetupError where a role has none."""
    found: dict[str, list[WorkerRecord]] = {"decode": [], "prefill": []}
    for record in records:
        if record.ready and not record.draining and record.curve is not None:
            found.setdefault(record.role, []).append(record)
    if not found["decode"]:
        raise SetupError("no ready decode worker there has published a step curve yet; wait for its warm-up, or give --preset or --curve")
    decode = _typical(found["decode"])
    prefill = _typical(found["prefill"] or found["decode"])
    layout = decode.layout
    model = PlannedModel(
        name=decode.model,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        weight_bytes=0,
        item_bytes=_ITEM_BYTES.get(layout.dtype, 2) if layout.quantization == "none" else 1,
        scale_bytes=0 if layout.quantization == "none" else 2,
    )
    specs = [
        replace(_spec(record), look_ahead=preset.look_ahead, ahead_s=ahead_s)
        for record, ahead_s in ((prefill, preset.prefill_ahead_s), (decode, preset.decode_ahead_s))
    ]
    return Machine(
        name=f"workers like {prefill.worker_id} and {decode.worker_id}",
        base=SimulatedDeployment(
            num_prefill=1,
            num_decode=1,
            prefill=specs[0],
            decode=specs[1],
            hand_over=replace(preset.hand_over, kv_token_bytes=model.kv_token_bytes),
            edge_s=preset.edge_s,
        ),
        model=model,
        memory=None,
        gpus=layout.tp_size,
    )


def _typical(records: Iterable[WorkerRecord]) -> WorkerRecord:
    """The lower one of the middle two, of an even number."""
    ordered = sorted(records, key=lambda record: (_usual_step_s(record), record.worker_id))
    return ordered[(len(ordered) - 1) // 2]


def _usual_step_s(record: WorkerRecord) -> float:
    assert record.curve is not None
    return record.curve.step_s(_USUAL)


def _spec(record: WorkerRecord) -> EngineSpec:
    assert record.curve is not None
    return EngineSpec(
        curve=record.curve,
        step_tokens=record.step_tokens,
        max_num_seqs=record.max_num_seqs,
        num_blocks=record.num_blocks,
        block_size=record.layout.block_size,
    )
