"""Pools whose unwritten slots are NaN, and how near a kernel must come to its oracle."""

from __future__ import annotations

from typing import Any

import torch
from attention_oracle import Rounding, unit

from twostep.engine.batch import KvShape
from twostep.model.step.kv_cache import KvCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(dtype: torch.dtype, *, roundings: int = 1) -> dict[str, Any]:
    """Returns the tolerance for numbers of about 1 that were summed in float32 and rounded to the format `roundings` times."""
    step = roundings * unit(dtype) + 32 * unit(torch.float32)
    return {"rtol": step, "atol": step}


def relative_limit(dtype: torch.dtype, roundings: int, *, step: float = 0.0) -> float:
    """Returns how far, of its norm, a vector may be from float64 after so many roundings of vectors on its way: independent errors, whose
    squares add. `step`: that of an 8-bit format, of a number, to which the vector is rounded in between. A number that is off by e lands
    on the neighbour of the right one in e / step of the cases, which makes a mean square of e * step."""
    once = unit(dtype) + 32 * unit(torch.float32)
    return float((roundings * once**2 + step * once * roundings**0.5) ** 0.5)


def assert_products(
    got: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
    operands: torch.dtype | None = None,
    between: torch.dtype | None = None,
) -> None:
    """Holds a layer's result to the product in float64.

    x, weight  [T, K], [N, K], the numbers that the layer multiplies
    operands   the format that it rounds both to; None: as they are
    between    the format that a product is rounded to ahead of its gate
    """
    u, width = unit(torch.float32), x.shape[1]
    x, weight = x.double(), weight.double()
    want = x @ weight.T if bias is None else x @ weight.T + bias.double()
    # Squares of each number's error, had every rounding its largest.
    squares = (2 * unit(operands) ** 2 + width * u**2) * (x**2 @ weight.T**2) + unit(between) ** 2 * want**2
    if gated:
        (gate, up), (of_gate, of_up) = want.chunk(2, -1), squares.chunk(2, -1)
        sigmoid = gate.sigmoid()
        want = gate * sigmoid * up
        squares = of_gate * (sigmoid * (1 + gate * (1 - sigmoid)) * up) ** 2 + of_up * (gate * sigmoid) ** 2 + 16 * u**2 * want**2
    limit = (squares + (unit(got.dtype) * want) ** 2).sqrt() + 1e-30
    # A sum of many roundings is near normal, and its standard deviation is 0.4 of this: three of them are seven deviations.
    worst = float(((got.double() - want).abs() / limit).max())
    assert worst <= 3, f"{worst:.3g} times as far from float64 as its roundings explain"


def decode_rounding(cache: KvCache, query: torch.dtype) -> Rounding:
    """Returns what decode attention rounds: over quantized blocks, queries and weights to float16, which holds a bfloat16's digits. Through
    the interpreter all but queries stays in float32."""
    products = torch.float16 if cache.quantized is not None else cache.dtype
    queries = torch.float16 if cache.quantized is not None and query == torch.float32 else None
    return Rounding(queries=queries, weights=products if DEVICE == "cuda" else None)


def poisoned_pool(dtype: torch.dtype, *, quantization: str = "none", **sizes: int) -> KvCache:
    """A pool of a KvShape of these sizes. Slots never written are NaN; quantized ones have any bytes but NaN's, and NaN scales."""
    cache = KvCache(KvShape(dtype=str(dtype).removeprefix("torch."), quantization=quantization, **sizes), DEVICE)
    poison(cache)
    return cache


def some_sinks(num_heads: int) -> torch.Tensor:
    """From some that hardly count to some that take most of a softmax."""
    return torch.linspace(-3.0, 6.0, num_heads, device=DEVICE)


def poison(cache: KvCache) -> None:
    if cache.quantized is None:
        cache.tensor.fill_(torch.nan)
    else:
        cache.tensor.copy_(torch.randint(0, 0x7F, cache.tensor.shape, dtype=torch.uint8))
        cache.quantized.scales.fill_(torch.nan)
