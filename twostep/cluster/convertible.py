"""Which pairs of KV layouts can be joined by converting on the way. Pure; free of numpy, so that the router can refuse a pair by it.

    may differ      block_size, tp_rank and tp_size (parts of the heads), dtype, quantization
    must be equal   model_fingerprint, num_layers, head_dim, num_planes, groups of layers and their reach, and the number of KV heads over
                    all parts; where sequences have a state besides their KV, all of it

A record's blocks hold `num_kv_heads` heads: those of rank r are [r * num_kv_heads, (r + 1) * num_kv_heads) of num_kv_heads * tp_size.
"""

from __future__ import annotations

from twostep import quantized_vector
from twostep.cluster.records import KEYS_AND_VALUES, LayoutRecord
from twostep.errors import Incompatible

# Transports that pass through the reader's host memory, where blocks can be cut anew.
HOST_TRANSPORTS = ("ray", "local")
DTYPES = ("float32", "bfloat16", "float16")


def reasons_against(source: LayoutRecord, target: LayoutRecord) -> list[str]:
    """Returns all that stands against turning KV of `source` into KV of `target`; empty: nothing does."""
    reasons = []
    for name in ("model_fingerprint", "num_layers", "head_dim", "num_planes", "num_groups", "num_windowed", "reach"):
        if getattr(source, name) != getattr(target, name):
            reasons.append(f"{name} is {getattr(source, name)!r:.40} there and {getattr(target, name)!r:.40} here")
    if (there := source.num_kv_heads * source.tp_size) != (here := target.num_kv_heads * target.tp_size):
        reasons.append(f"{there} KV heads in {source.tp_size} parts there are not the {here} in {target.tp_size} parts here")
    if (source.num_state_blocks or target.num_state_blocks) and source != target:
        reasons.append("the model's state is handed over as it is: block size, dtype, format and version's state_layout must be equal")
    for side, layout in (("there", source), ("here", target)):
        reasons += [f"{reason} {side}" for reason in _faults(layout)]
    return reasons


def check_convertible(source: LayoutRecord, target: LayoutRecord) -> None:
    """Raises Incompatible with all reasons_against it."""
    reasons = reasons_against(source, target)
    if reasons:
        raise Incompatible(f"KV cannot be converted: {'; '.join(reasons)}. Pair workers of the same model")


def _faults(layout: LayoutRecord) -> list[str]:
    faults = []
    if min(layout.block_size, layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.tp_size) < 1:
        faults.append("a size is not positive")
    if layout.num_planes not in (1, KEYS_AND_VALUES):
        faults.append(f"num_planes {layout.num_planes}")
    if not 0 <= layout.tp_rank < max(1, layout.tp_size):
        faults.append(f"tp_rank {layout.tp_rank} of {layout.tp_size}")
    if layout.dtype not in DTYPES:
        faults.append(f"dtype {layout.dtype!r}")
    if layout.quantization != "none":
        sizes = {"head_dim": layout.head_dim, "block_size": layout.block_size, "num_planes": layout.num_planes}
        faults += quantized_vector.reasons_against(layout.quantization, **sizes)
    return faults


def same_numbers(source: LayoutRecord, target: LayoutRecord) -> bool:
    """Returns whether converted KV is, bit for bit, what the target would hold had it copied: only blocks and heads are dealt out anew."""
    if source.quantization != target.quantization:
        return False
    return source.quantization != "none" or source.dtype == target.dtype


def check_joinable(source: LayoutRecord, target: LayoutRecord) -> None:
    """Raises Incompatible where there are no hand-overs between the two, also not by converting on the way. (What leaves a runner is
    whole, whatever number of devices it is cut over.)"""
    check_convertible(source, target)
    if source.tp_size > 1 or target.tp_size > 1:
        raise Incompatible(f"KV is handed over in whole blocks, not in {source.tp_size} parts there and {target.tp_size} here")


def joinable(source: LayoutRecord, target: LayoutRecord) -> bool:
    """Returns whether check_joinable lets the two pass."""
    return source.tp_size == target.tp_size == 1 and not reasons_against(source, target)


def keeps_keys(source: LayoutRecord, target: LayoutRecord) -> bool:
    """Returns whether KV of `source` in a pool of `target` is what the target would have computed: only then it may stand under the
    target's prefix hashes (see cache_key_fields)."""
    return cache_key_fields(source, target) == (target.dtype, target.quantization)


def cache_key_fields(source: LayoutRecord, target: LayoutRecord) -> tuple[str, str]:
    """`dtype` and `quantization` for twostep.prefix.derive_key, of KV that came from `source` into a pool of `target`.

    A prefix hash stands for exact numbers. KV that was rounded on its way, and also bfloat16 KV in a float32 pool, which is exact
    but not what float32 would have computed, differs from what the target computes itself; under the target's own key the two would be
    shared as if they were the same, and a prompt's answer would depend on who had asked before. So converted blocks get a key of
    their own, which names both ends, or are not registered at all (decode workers do the latter).
    """
    if (source.dtype, source.quantization) == (target.dtype, target.quantization):
        return target.dtype, target.quantization
    return f"{target.dtype} of {source.dtype}", f"{target.quantization} of {source.quantization}"
