"""How long steps take on known machines, and where else curves come from: a file, or the workers of a running system."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from twostep.errors import SetupError
from twostep.lab.plan.memory import DEFAULT_RUNTIME_BYTES
from twostep.lab.plan.model_shape import PlannedModel
from twostep.lab.simulator.cluster import HandOverCost
from twostep.step_curve import StepCurve

_FOLDER = Path(__file__).parent / "presets"
_ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A machine and a model: curves, step budgets and sizes of its workers. `hand_over` lacks the bytes of a token. `measured` are the
    steps that the curves were fitted to."""

    name: str
    about: str
    prefill: StepCurve
    decode: StepCurve
    # Steps with prompts among decodes; None: as `decode` says.
    mixed: StepCurve | None = None
    model: PlannedModel | None = None
    gpu_memory_bytes: int = 0
    runtime_bytes: int = DEFAULT_RUNTIME_BYTES
    prefill_tokens: int = 8192
    decode_tokens: int = 2048
    max_num_seqs: int = 256
    look_ahead: bool = True
    prefill_ahead_s: float = math.inf
    decode_ahead_s: float = math.inf
    hand_over: HandOverCost = field(default_factory=HandOverCost)
    edge_s: float = 0.0
    measured: tuple[Mapping[str, Any], ...] = ()


def preset_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_preset(name: str) -> Preset:
    """One that comes with this package, or a file of the same form. Raises SetupError."""
    path = _FOLDER / f"{name}.json"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise SetupError(f"there is no preset {name!r}; known are {', '.join(preset_names())}, or give a file like them, or --curve")
    return _preset(read_object(path), path)


def read_curves(path: Path) -> tuple[StepCurve, StepCurve]:
    """Reads the curves of a prefill and of a decode worker: one curve for both, or an object with `prefill` and `decode`, or a preset.
    Raises SetupError."""
    raw = read_object(path)
    raw = raw.get("curves", raw)
    if not isinstance(raw, dict):
        raise SetupError(f"{path}: curves are a JSON object")
    if "fixed_s" in raw:
        curve = parse_curve(raw, path)
        return curve, curve
    missing = [role for role in _ROLES if role not in raw]
    if missing:
        raise SetupError(f"{path} has no curve of {' and '.join(missing)}; give fixed_s and per_row_s, or an object of two such curves")
    return parse_curve(raw["prefill"], path), parse_curve(raw["decode"], path)


def parse_curve(raw: object, path: Path) -> StepCurve:
    """Raises SetupError for anything but non-negative numbers under StepCurve's names."""
    names = [field.name for field in fields(StepCurve)]
    if not isinstance(raw, dict) or not set(raw) <= set(names) or not {"fixed_s", "per_row_s"} <= set(raw):
        raise SetupError(f"{path}: a curve is a JSON object with fixed_s and per_row_s, and perhaps {', '.join(names[2:])}")
    wrong = [k for k, v in raw.items() if isinstance(v, bool) or not isinstance(v, int | float) or not 0 <= v < float("inf")]
    if wrong:
        raise SetupError(f"{path}: {', '.join(wrong)} must be numbers from 0 up")
    curve = StepCurve(**raw)
    if not curve.fixed_s + curve.per_row_s:
        raise SetupError(f"{path}: a curve whose steps take no time says nothing; give fixed_s or per_row_s")
    return curve


def read_object(path: Path) -> dict[str, Any]:
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


def _preset(raw: dict[str, Any], path: Path) -> Preset:
    curves = raw.get("curves", raw)
    try:
        tokens = raw.get("step_tokens", {})
        return Preset(
            name=str(raw.get("name", path.stem)),
            about=str(raw.get("about", "")),
            prefill=parse_curve(curves["prefill"], path),
            decode=parse_curve(curves["decode"], path),
            mixed=parse_curve(curves["mixed"], path) if "mixed" in curves else None,
            model=PlannedModel(**raw["model"]) if "model" in raw else None,
            gpu_memory_bytes=int(raw.get("gpu_memory_bytes", 0)),
            runtime_bytes=int(raw.get("runtime_bytes", DEFAULT_RUNTIME_BYTES)),
            prefill_tokens=int(tokens.get("prefill", 8192)),
            decode_tokens=int(tokens.get("decode", 2048)),
            max_num_seqs=int(raw.get("max_num_seqs", 256)),
            look_ahead=bool(raw.get("look_ahead", True)),
            prefill_ahead_s=float(raw.get("ahead_s", {}).get("prefill", math.inf)),
            decode_ahead_s=float(raw.get("ahead_s", {}).get("decode", math.inf)),
            hand_over=HandOverCost(**raw.get("hand_over", {})),
            edge_s=float(raw.get("edge_s", 0.0)),
            measured=tuple(raw.get("measured", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SetupError(f"{path} is no preset ({error!r}); take one that comes with twostep/lab/plan/presets as a pattern") from error
