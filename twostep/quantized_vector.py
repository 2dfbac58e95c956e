"""What a quantized vector of KV takes, by its format: what the processes without torch know of it. Pure; how the bytes lie is in
twostep/model/step/kv_quantization.py."""

from __future__ import annotations

QUANTIZED = ("fp8", "int8", "int4")
# Quantized tokens that lie together.
SLOTS_TOGETHER = 4
# Numbers of a vector that have a step and an offset of their own, in int4. Two groups lie in the same bytes.
GROUP = 16


def number_bytes(head_dim: int, quantization: str) -> int:
    """Returns the bytes of a quantized vector's numbers, without what scales them."""
    return head_dim // 2 if quantization == "int4" else head_dim


def scale_bytes(head_dim: int, quantization: str) -> int:
    """Returns the bytes of what scales a quantized vector's numbers: a bfloat16, and two bytes for each group that there is."""
    return 2 + 2 * num_groups(head_dim, quantization)


def num_groups(head_dim: int, quantization: str) -> int:
    """Returns how many groups a quantized vector has; 0: it has one scale and no more."""
    return head_dim // GROUP if quantization == "int4" else 0


def vector_bytes(head_dim: int, quantization: str) -> int:
    """Returns the bytes of a quantized vector."""
    return number_bytes(head_dim, quantization) + scale_bytes(head_dim, quantization)


def reasons_against(quantization: str, *, head_dim: int, block_size: int, num_planes: int) -> list[str]:
    """Returns all that stands against storing such KV quantized; empty: nothing does."""
    if quantization not in QUANTIZED:
        return [f"quantization {quantization!r}"]
    reasons = []
    if block_size % SLOTS_TOGETHER:
        reasons.append(f"block size {block_size} of quantized KV is no multiple of {SLOTS_TOGETHER}")
    if quantization == "int4" and num_planes == 1:
        reasons.append("int4 of latent attention")
    elif quantization == "int4" and head_dim % (2 * GROUP):
        reasons.append(f"head size {head_dim} of int4 KV is no multiple of {2 * GROUP}")
    return reasons
