"""Attention over the block pool in plain torch and float64: what the kernels of a device are held against, and how near they must come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from twostep.model.step.kv_cache import KvCache


def unit(dtype: torch.dtype | None) -> float:
    """Returns the largest relative error of rounding a number to the format; 0 for None, which rounds nothing."""
    return 0.0 if dtype is None else torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Rounding:
    """The formats that an attention kernel rounds its operands to. None: the operand stays as it is, or in float32."""

    queries: torch.dtype | None = None
    keys_and_values: torch.dtype | None = None
    weights: torch.dtype | None = None


@dataclass(frozen=True)
class _Attention:
    """Operands and results in float64, of T queries and K keys."""

    rows: torch.Tensor  # [T, num_kv_heads, G, D]
    keys: torch.Tensor  # [num_kv_heads, K, D]
    values: torch.Tensor  # likewise; zeros where no query sees the key
    hidden: torch.Tensor  # bool [T, K]
    score: torch.Tensor  # [T, num_kv_heads, G, K]: scaled, before the softcap
    capped: torch.Tensor  # likewise, behind the softcap
    weight: torch.Tensor  # likewise
    sinks: torch.Tensor | None  # [1, num_kv_heads, G]
    result: torch.Tensor  # [T, num_kv_heads, G, D]


def paged_attention(
    query: torch.Tensor, cache: KvCache, layer: int, block_table: torch.Tensor, length: int, **options: Any
) -> torch.Tensor:
    """Causal attention of one sequence's last T tokens.

    query        [T, num_heads, D] of the tokens at positions length - T .. length - 1, whose keys and values are in the pool
    block_table  integer [at least ceil(length / block_size)]
    options      those of _attend
    Returns float64 [T, num_heads, D]; zeros where `length` is 0.
    """
    if not length:
        return query.double() * 0
    return _attend(query, cache, layer, block_table, length, **options).result.reshape(query.shape)


def assert_attends(
    got: torch.Tensor,
    query: torch.Tensor,
    cache: KvCache,
    layer: int,
    block_table: torch.Tensor,
    length: int,
    *,
    rounding: Rounding,
    **options: Any,
) -> None:
    """Holds a kernel's result [T, num_heads, D] to paged_attention of the other arguments: it may be as far from float64 as the kernel's
    roundings take it. See _expected_error."""
    if not length:
        assert not got.any()
        return
    exact = _attend(query, cache, layer, block_table, length, **options)
    scale = query.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    limit = _expected_error(exact, scale, options.get("softcap", 0.0), rounding, got.dtype)
    error = float((got.double() - exact.result.reshape(got.shape)).norm())
    assert error <= limit, f"off by {error:.3g}, roundings explain {limit:.3g}, of {float(exact.result.norm()):.3g}"


def _attend(
    query: torch.Tensor,
    cache: KvCache,
    layer: int,
    block_table: torch.Tensor,
    length: int,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> _Attention:
    """
    scale        of the scores; D ** -0.5 where it is None
    window       keys that a query sees, its own included; 0: all
    softcap      c: a score x counts as c * tanh(x / c); 0: as it is
    sinks        [num_heads]: a score more in each head's softmax
    """
    num_tokens, _, head_dim = query.shape
    shape = cache.shape
    blocks = cache.numbers(layer, block_table[: -(-length // shape.block_size)].long())
    kv = blocks.permute(1, 2, 0, 3, 4).reshape(2, shape.num_kv_heads, -1, head_dim)[:, :, :length].double()
    # A token's rows in order: [kv_head, head of its group].
    rows = query.double().view(num_tokens, shape.num_kv_heads, -1, head_dim)
    position = torch.arange(length - num_tokens, length, device=query.device)[:, None]
    key = torch.arange(length, device=query.device)
    hidden = key > position
    if window:
        hidden |= key <= position - window
    # Outside the window a slot may hold anything.
    keys, values = kv.masked_fill(hidden.all(0)[:, None], 0.0)
    score = torch.einsum("thgd,hkd->thgk", rows, keys) * (head_dim**-0.5 if scale is None else scale)
    capped = softcap * torch.tanh(score / softcap) if softcap else score
    all_scores = capped.masked_fill(hidden[:, None, None, :], -torch.inf)
    if sinks is not None:
        sinks = sinks.double().view(1, shape.num_kv_heads, -1)
        all_scores = torch.cat((all_scores, sinks[..., None].expand(num_tokens, -1, -1, -1)), -1)
    weight = all_scores.softmax(-1)[..., :length]
    return _Attention(rows, keys, values, hidden, score, capped, weight, sinks, result=torch.einsum("thgk,hkd->thgd", weight, values))


def _expected_error(exact: _Attention, scale: float, softcap: float, rounding: Rounding, out: torch.dtype) -> float:
    """Returns how far from float64 the roundings of a kernel take its result, as a norm.

    Each rounding is taken at its largest, `unit` of the number that is rounded, and carried to the result by the derivative of what
    follows. Roundings are independent, so their squares add. Most are smaller than the largest, by 2.4 in the mean: that is the margin.

    A float32 sum of N terms rounds N times, numbers that are about as large as the root of the sum of the terms' squares.
    """
    u = unit(torch.float32)
    num_keys, head_dim = exact.keys.shape[1:]
    # Products of a score, squared and summed. The score is summed, scaled, and compared with the largest one.
    products = torch.einsum("thgd,hkd->thgk", exact.rows**2, exact.keys**2) * scale**2
    of_scores = (unit(rounding.queries) ** 2 + unit(rounding.keys_and_values) ** 2 + head_dim * u**2) * products + 3 * (
        u * exact.score
    ) ** 2
    if softcap:
        of_scores = of_scores * (1 - (exact.capped / softcap) ** 2) ** 2 + 4 * (u * softcap) ** 2
    # A weight w moves the result by w * (value - result) for each 1 that its score is off.
    moved = exact.weight**2 * of_scores.masked_fill(exact.hidden[:, None, None, :], 0.0)
    sizes = (exact.values**2).sum(-1)
    of_result = (exact.result**2).sum(-1)
    error = (moved * sizes[:, None, :]).sum(-1) + of_result * moved.sum(-1)
    error -= 2 * (moved * torch.einsum("thgd,hkd->thgk", exact.result, exact.values)).sum(-1)
    if exact.sinks is not None:
        error += 3 * (u * exact.sinks * (1 - exact.weight.sum(-1))) ** 2 * of_result
    # Weights and values themselves. exp2 is off by two units in the last place.
    of_terms = unit(rounding.weights) ** 2 + unit(rounding.keys_and_values) ** 2 + (num_keys + 16) * u**2
    error += of_terms * (exact.weight**2 * sizes[:, None, :]).sum(-1)
    # The division by the weights' sum, and the result's own format.
    error += (unit(out) ** 2 + (num_keys + 1) * u**2) * of_result
    return float(error.sum().sqrt())
