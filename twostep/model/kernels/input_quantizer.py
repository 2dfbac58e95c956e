"""A linear layer's input, rounded as the checkpoint's format asks: what a product of quantized numbers would see of it.

In torch, and the same on every device: the oracle of kernels that multiply the quantized numbers themselves. It looks at no value, so that
a step can be captured. Scales are as vLLM computes them, in float32. compressed-tensors differs in one: it takes the largest number of
symmetric int8 for 127.5, which then rounds either way by the last bit of whatever computed it; here it is 127.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twostep.checkpoint.linear_format import Activations

_FLOAT8 = torch.float8_e4m3fn


class InputQuantizer:
    """A callable x -> x', of x's shape and dtype [..., in_features]."""

    def __init__(self, how: Activations, device: torch.device) -> None:
        self.how = how
        self.device = device
        # Of a static format: float32 [1], the checkpoint's; it is loaded to here.
        self.scale = None if how.dynamic else torch.ones(1, dtype=torch.float32, device=device)
        self._low, self._high = (torch.finfo(_FLOAT8).min, torch.finfo(_FLOAT8).max) if how.is_float else (-128.0, 127.0)

    def is_same_as(self, other: InputQuantizer | None) -> bool:
        """Returns whether both do the same to all inputs. Waits for the device."""
        if other is None or self.how != other.how:
            return False
        return self.scale is None or (other.scale is not None and torch.equal(self.scale, other.scale))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, width, group = x.float(), x.shape[-1], self.how.group
        if group:
            values = F.pad(values, (0, -width % group)).unflatten(-1, (-1, group))
        low, high, zero = self._low, self._high, None
        if self.scale is not None:
            scale = self.scale
        elif self.how.symmetric:
            # (By a number that is no tensor a GPU would divide less exactly.)
            scale = values.abs().amax(-1, keepdim=True) / torch.full((), high, device=x.device)
        else:
            least, most = values.amin(-1, keepdim=True).clamp_max(0), values.amax(-1, keepdim=True).clamp_min(0)
            scale = (most - least) / (high - low)
        # A token of zeros stays one.
        scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
        if not self.how.symmetric:
            zero = (low - least / scale).clamp(low, high).round()
        quantized = values / scale
        quantized = (quantized if zero is None else quantized + zero).clamp(low, high)
        quantized = quantized.to(_FLOAT8).float() if self.how.is_float else quantized.round()
        rounded = (quantized if zero is None else quantized - zero) * scale
        if group:
            rounded = rounded.flatten(-2)[..., :width]
        return rounded.to(x.dtype)
