"""Tensors that hold a layer's experts together, gpt-oss's: which layers they are apart. Torch-free.

experts.gate_up_proj          [E, in, out]            experts.3.gate_up_proj.weight   [in, out]
experts.gate_up_proj_blocks   [E, out, in / 32, 16]   experts.3.gate_up_proj.blocks   [out, in / 2]
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_OF_EXPERTS = re.compile(r"(.*\.experts)\.((?:gate_up|down)_proj)(|_bias|_blocks|_scales)")
_MOST_EXPERTS = 1024


def names_apart(name: str, shape: Sequence[int]) -> list[str]:
    """Returns what the tensors are called that this one holds, in the order of its first side; empty: it is one by itself."""
    match = _OF_EXPERTS.fullmatch(name)
    if match is None or len(shape) < 2 or not 0 < shape[0] <= _MOST_EXPERTS:
        return []
    kind = match[3].removeprefix("_") or "weight"
    return [f"{match[1]}.{i}.{match[2]}.{kind}" for i in range(shape[0])]


def shape_apart(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns that of each of them, a row's bytes together."""
    _, *rest = shape
    return tuple(rest) if len(rest) < 3 else (rest[0], rest[1] * rest[2])
