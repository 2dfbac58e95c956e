"""Rotary position embedding (Su et al., RoFormer, 2021): the frequencies of a head, and the ways of stretching them to longer contexts.

linear   all frequencies divided by `factor` (Chen et al., Extending Context Window via Positional Interpolation, 2023)
yarn     slow ones divided, fast ones kept, a ramp between, logits sharpened (Peng et al., YaRN, 2023, arXiv 2309.00071)
llama3   the same idea with bounds on wavelengths (Llama 3.1)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    factor: float

    def scale(self, frequency: torch.Tensor, theta: float) -> torch.Tensor:
        return frequency / self.factor

    @property
    def magnitude(self) -> float:
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scale(self, frequency: torch.Tensor, theta: float) -> torch.Tensor:
        wavelength = 2 * math.pi / frequency
        ratio = self.original_max_position_embeddings / wavelength
        smooth = ((ratio - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0)
        return (1 - smooth) * frequency / self.factor + smooth * frequency

    @property
    def magnitude(self) -> float:
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """A pair that turns at least `beta_fast` times within the original context keeps its frequency, one that turns at most `beta_slow`
    times is slowed by `factor`; between these bounds, as places in the head (whole ones if `truncate`), a linear ramp.

    attention_factor   multiplies cos and sin; None: from factor and the two mscales, 0.1 ln(factor) + 1 without them (section 3.4)
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def scale(self, frequency: torch.Tensor, theta: float) -> torch.Tensor:
        low, high = self._bounds(2 * len(frequency), theta)
        slowed = ((torch.arange(len(frequency), dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
        return frequency / self.factor * slowed + frequency * (1 - slowed)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._sharpening(self.mscale) / self._sharpening(self.mscale_all_dim)
        return self._sharpening(1.0)

    def _bounds(self, head_dim: int, theta: float) -> tuple[float, float]:
        def place(turns: float) -> float:
            """Where in the head a pair turns so often: theta ** (-2 * place / head_dim) * context = 2 pi * turns."""
            return head_dim * math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, head_dim - 1.0)
        return low, high if high != low else low + 0.001

    def _sharpening(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


Scaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    theta: float
    scaling: Scaling | None = None


def rope_tables(rope: Rope | None, head_dim: int, num_positions: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * frequency, times the scaling's magnitude, float32 [num_positions, head_dim / 2] each. Without RoPE
    [num_positions, 0]: nothing turns."""
    if rope is None:
        nothing = torch.empty(num_positions, 0, dtype=torch.float32, device=device)
        return nothing, nothing
    frequency = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    magnitude = 1.0
    if rope.scaling is not None:
        frequency, magnitude = rope.scaling.scale(frequency, rope.theta), rope.scaling.magnitude
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency)
    return (angle.cos() * magnitude).to(device), (angle.sin() * magnitude).to(device)
