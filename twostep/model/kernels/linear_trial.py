"""Tries the kernels of a linear layer beside a product that is right, before they serve: an untried card or compiler must not show in the
tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from twostep.model.kernels.ops import LinearInParts

# Sums in another order, in 16 bits.
_DIFFERENCE = 2e-2


def try_linear(
    layer: LinearInParts,
    right: Callable[[torch.Tensor], torch.Tensor],
    *,
    num_tokens: Sequence[int],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    most_different: float = _DIFFERENCE,
) -> str:
    """Runs the layer on random inputs [T, width] of each of these lengths, beside `right`. Empty, or what went wrong."""
    generator = torch.Generator(device).manual_seed(0)
    for tokens in num_tokens:
        x = torch.randn(tokens, width, generator=generator, device=device).to(dtype)
        want = right(x).float()
        try:
            parts = layer.parts(x).float()
            results = (layer(x).float(), parts.sum(0) if parts.dim() == 3 else parts)
        except Exception as error:  # noqa: BLE001 - whatever a compiler or driver raises
            return f"the kernel for {tokens} tokens fails: {type(error).__name__}: {str(error)[:200]}"
        for result in results:
            difference = float((result - want).norm() / want.norm().clamp(min=1e-30))
            if not difference < most_different:
                return f"the kernel for {tokens} tokens differs by {difference:.1e}"
    return ""
