"""The machines that a plan is for: what each worker's engine is, its memory, and how KV travels. They come from a preset, or from the
workers that are registered in Redis."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostep.errors import SetupError
from twostep.extras import install
from twostep.lab.plan.model import DEFAULT_RUNTIME_BYTES, PlannedModel, WorkerMemory, quantized_model, worker_memory
from twostep.lab.simulator.cluster import HandOverCost, SimulatedDeployment
from twostep.lab.simulator.engine import EngineSpec
from twostep.step_curve import StepCurve, StepWorkload, chunk_pairs

if TYPE_CHECKING:
    # What reads records needs more than the base install.
    from twostep.cluster.records import WorkerRecord

_FOLDER = Path(__file__).parent / "presets"
_REDIS_TIMEOUT_S = 5.0
# A step by which curves are put in order: a chunk of a prompt beside some decodes.
_USUAL = StepWorkload(prompt_tokens=512, pairs=chunk_pairs(512, 0), decodes=32, context=32 * 2048)
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Describes a machine and perhaps a model. `base` has the workers' specs without their blocks, and the hand-over without the
    bytes of a token; its numbers of workers do not matter."""

    name: str
    base: SimulatedDeployment
    model: PlannedModel | None = None
    gpu_memory_bytes: int = 0
    runtime_bytes: int = DEFAULT_RUNTIME_BYTES

    def with_specs(self, *, prefill: dict[str, Any], decode: dict[str, Any]) -> Preset:
        """The same with these fields of its workers' specs."""
        assert self.base.prefill is not None
        base = replace(self.base, prefill=replace(self.base.prefill, **prefill), decode=replace(self.base.decode, **decode))
        return replace(self, base=base)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`base` has all of the workers' specs. `memory` is None where workers publish their blocks themselves; `gpus` is how many each worker
    takes. `fixed_roles`: workers that are there do nothing but their role's work. `curves_of`: the model whose steps were measured, where
    that is another one than `model`; empty: it is this one, or nobody said which."""

    name: str
    base: SimulatedDeployment
    model: PlannedModel
    memory: WorkerMemory | None
    gpus: int = 1
    fixed_roles: bool = False
    curves_of: str = ""


def machine_of(preset: Preset, model: PlannedModel, memory: WorkerMemory, *, gpus: int = 1) -> Machine:
    """Workers of a preset's curves and bounds, with what the memory holds."""
    states = model.num_state_blocks(memory.block_size)
    blocks = {"num_blocks": memory.num_blocks, "block_size": memory.block_size, "num_state_blocks": states}
    measured = preset.model
    curves_of = "" if measured is None or model.resembles(measured) else measured.name
    return replace(_machine(preset.with_specs(prefill=blocks, decode=blocks), model, memory, gpus), curves_of=curves_of)


def machine_of_preset(name: str) -> Machine:
    """Workers of a preset on the GPU that it was measured on. Raises SetupError for one that does not say its model and memory."""
    preset = load_preset(name)
    if preset.model is None or not preset.gpu_memory_bytes:
        raise SetupError(f"the preset {name} names no model and no memory; give one like h200-llama-3.1-8b")
    return machine_of(preset, preset.model, worker_memory(preset.model, preset.gpu_memory_bytes, runtime_bytes=preset.runtime_bytes))


def machine_of_workers(records: Iterable[WorkerRecord], preset: Preset) -> Machine:
    """Workers like those that run: of the ready ones of each role, the one whose steps take the middle of all times, so that one curve
    gone wrong does not decide. `preset` says how KV travels and what the edge adds. Raises SetupError where no decode worker is ready."""
    there = [r for r in records if r.ready and not r.draining and r.curve is not None]
    decodes = [r for r in there if r.role == "decode"]
    if not decodes:
        raise SetupError("no ready decode worker there has published a step curve yet; wait for its warm-up, or give --preset")
    decode, prefill = _typical(decodes), _typical([r for r in there if r.role == "prefill"] or decodes)
    layout = decode.layout
    model = PlannedModel(
        name=decode.model,
        num_layers=layout.num_layers * layout.num_groups,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        num_planes=layout.num_planes,
        weight_bytes=0,
        item_bytes=_ITEM_BYTES.get(layout.dtype, 2),
    )
    if layout.quantization != "none":
        model = quantized_model(model, layout.quantization)
    known = preset.with_specs(prefill=_published(prefill), decode=_published(decode))
    known = replace(known, name=f"workers like {prefill.worker_id} and {decode.worker_id}")
    return replace(_machine(known, model, None, layout.tp_size), fixed_roles=not all(record.both_roles for record in there))


def _machine(preset: Preset, model: PlannedModel, memory: WorkerMemory | None, gpus: int) -> Machine:
    decode = preset.base.decode
    state_bytes = decode.num_state_blocks * decode.block_size * model.kv_token_bytes
    hand_over = replace(preset.base.hand_over, kv_token_bytes=model.kv_token_bytes, state_bytes=state_bytes)
    base = replace(preset.base, hand_over=hand_over)
    return Machine(name=preset.name, base=base, model=model, memory=memory, gpus=gpus)


def _typical(records: Iterable[WorkerRecord]) -> WorkerRecord:
    """The lower one of the middle two, of an even number."""

    def usual_step(record: WorkerRecord) -> tuple[float, str]:
        assert record.curve is not None
        return record.curve.step_s(_USUAL), record.worker_id

    ordered = sorted(records, key=usual_step)
    return ordered[(len(ordered) - 1) // 2]


def _published(record: WorkerRecord) -> dict[str, Any]:
    return {
        "curve": record.curve,
        "mixed": None,
        "step_tokens": record.step_tokens,
        "max_num_seqs": record.max_num_seqs,
        # Of all layers.
        "num_blocks": record.num_blocks // record.layout.num_groups,
        "block_size": record.layout.block_size,
        "num_state_blocks": record.layout.num_state_blocks,
        "max_step_s": record.max_step_s,
    }


def registered_workers(url: str) -> list[WorkerRecord]:
    """Records of the workers that are in Redis now. Raises SetupError if it does not answer or no worker is there; InvalidRequest for
    records of another version."""
    try:
        # Only --redis-url needs what the base install lacks.
        import redis  # noqa: PLC0415

        from twostep.cluster.records import WORKERS_KEY, WorkerRecord, worker_key  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise SetupError(f"--redis-url needs the package {error.name}, which this installation lacks; {install('router')}") from error
    try:
        with redis.Redis.from_url(url, socket_timeout=_REDIS_TIMEOUT_S, socket_connect_timeout=_REDIS_TIMEOUT_S) as client:
            names = sorted(member.decode() for member in client.smembers(WORKERS_KEY))
            raw = client.mget([worker_key(name) for name in names]) if names else []
    except (redis.RedisError, ValueError, OSError) as error:
        raise SetupError(f"no Redis answers at {url}: {error}; give the URL that the workers have") from error
    records = [WorkerRecord.from_json(text) for text in raw if text is not None]
    if not records:
        raise SetupError(f"no worker is registered at {url}; start some, or give --preset")
    return records


# ---- files ------------------------------------------------------------------------------------------------------------------


def preset_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_preset(name: str) -> Preset:
    """One that comes with this package, or a file of the same form. Raises SetupError."""
    path = _FOLDER / f"{name}.json"
    path = path if path.is_file() else Path(name)
    if not path.is_file():
        raise SetupError(f"there is no preset {name!r}; known are {', '.join(preset_names())}, or give a file like them")
    raw = _read_object(path)
    # A file may be the curves of a prefill and of a decode worker alone.
    curves, tokens, ahead = raw.get("curves", raw), raw.get("step_tokens", {}), raw.get("ahead_s", {})
    try:
        prefill = EngineSpec(
            curve=_curve(curves["prefill"], path),
            step_tokens=int(tokens.get("prefill", 8192)),
            max_num_seqs=int(raw.get("max_num_seqs", 256)),
            look_ahead=bool(raw.get("look_ahead", True)),
            ahead_s=float(ahead.get("prefill", math.inf)),
            max_step_s=float(raw.get("max_step_ms", 0.0)) / 1e3,
        )
        decode = replace(
            prefill,
            curve=_curve(curves["decode"], path),
            # Steps with prompts among decodes; None: as `decode` says.
            mixed=_curve(curves["mixed"], path) if "mixed" in curves else None,
            step_tokens=int(tokens.get("decode", 2048)),
            ahead_s=float(ahead.get("decode", math.inf)),
        )
        return Preset(
            name=str(raw.get("name", path.stem)),
            base=SimulatedDeployment(
                num_prefill=1,
                num_decode=1,
                prefill=prefill,
                decode=decode,
                hand_over=HandOverCost(**raw.get("hand_over", {})),
                edge_s=float(raw.get("edge_s", 0.0)),
                edge_tail_s=float(raw.get("edge_tail_s", 0.0)),
            ),
            model=PlannedModel(**raw["model"]) if "model" in raw else None,
            gpu_memory_bytes=int(raw.get("gpu_memory_bytes", 0)),
            runtime_bytes=int(raw.get("runtime_bytes", DEFAULT_RUNTIME_BYTES)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SetupError(f"{path} is no preset ({error!r}); take one that comes with twostep/lab/plan/presets as a pattern") from error


def _curve(raw: object, path: Path) -> StepCurve:
    """Raises SetupError for anything but non-negative numbers under StepCurve's names."""
    names = [field.name for field in fields(StepCurve)]
    if not isinstance(raw, dict) or not set(raw) <= set(names) or not {"fixed_s", "per_row_s"} <= set(raw):
        raise SetupError(f"{path}: a curve is a JSON object with fixed_s and per_row_s, and perhaps {', '.join(names[2:])}")
    wrong = [k for k, v in raw.items() if isinstance(v, bool) or not isinstance(v, int | float) or not 0 <= v < math.inf]
    if wrong or not raw["fixed_s"] + raw["per_row_s"]:
        raise SetupError(f"{path}: {', '.join(wrong) or 'fixed_s or per_row_s'} must be numbers from 0 up, and steps take some time")
    return StepCurve(**raw)


def _read_object(path: Path) -> dict[str, Any]:
    """Raises SetupError unless it is a readable JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise SetupError(f"{path} holds a JSON {type(raw).__name__}, not an object")
    return raw
