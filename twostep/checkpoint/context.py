"""How long a model's context is, by its config.json. Torch-free: routers, workers and /v1/models say the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from twostep.checkpoint.directory import MAX_MODEL_LEN
from twostep.checkpoint.usual_keys import own_name, usual_keys
from twostep.errors import SetupError

_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnStretch:
    """A context of `original` tokens, made `factor` times as long."""

    factor: float
    original: int

    @classmethod
    def of(cls, rope: Mapping[str, Any], name: str, max_position_embeddings: int, path: Path) -> YarnStretch:
        """`rope`: the parameters, called `name` in the file `path`. Raises SetupError, naming the key."""
        key = "original_max_position_embeddings"
        original = _length(rope[key], f"{name}.{key}", path) if key in rope else max_position_embeddings
        if "factor" not in rope:
            raise SetupError(f"{path} has no {name}.factor; download the file again, or add the key")
        factor = rope["factor"]
        if factor is None:
            factor = max_position_embeddings / original
        # Of any number of digits: a whole one may be too large to be compared as a float.
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not (isinstance(factor, int) or math.isfinite(factor)):
            _refuse(f"{name}.factor", factor, "it must be a number", path)
        if factor < 1:
            _refuse(f"{name}.factor", factor, "yarn stretches a context: it must be at least 1", path)
        if factor > MAX_MODEL_LEN or factor * original > MAX_MODEL_LEN:
            _refuse(f"{name}.factor", factor, f"it makes a context of more than {MAX_MODEL_LEN} tokens", path)
        return cls(factor=float(factor), original=original)

    @property
    def context(self) -> int:
        return int(self.factor * self.original)


def context_of(config: Mapping[str, Any], path: Path) -> int:
    """Tokens of a prompt and its answer: `max_position_embeddings`, or what yarn makes of the original context if that is more, since
    makers often leave max_position_embeddings at the original one. `path`: where `config` was read. Raises SetupError, naming the key."""
    key = "max_position_embeddings"
    usual = usual_keys(config)
    longest = _length(usual.get(key), own_name(config, key), path)
    name, rope = rope_of(usual)
    if not isinstance(rope, Mapping) or rope_kind(rope) != "yarn":
        return longest
    return max(longest, YarnStretch.of(rope, name, longest, path).context)


def rope_of(config: Mapping[str, Any]) -> tuple[str, Any]:
    """RoPE's parameters, unchecked, after the name of their key: `rope_parameters` (transformers 5) or `rope_scaling`."""
    name = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    return name, config.get(name) or (None if name == "rope_scaling" else {})


def rope_kind(rope: Mapping[str, Any]) -> Any:
    """How they stretch the context, unchecked; `type` is the old name of it."""
    legacy = rope.get("type")
    return rope.get("rope_type", "default" if legacy is None else legacy)


def _length(value: Any, name: str, path: Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_MODEL_LEN:
        _refuse(name, value, f"it must be a positive whole number, {MAX_MODEL_LEN} at most", path)
    return value


def _refuse(name: str, value: object, why: str, path: Path) -> NoReturn:
    raise SetupError(f"{path}: {name} is {repr(value)[:_SHOWN_CHARS]}; {why}")
