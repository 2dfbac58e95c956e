"""Rotary position embedding (Su et al., RoFormer, 2021): the frequencies of a head, and the ways of stretching them to longer contexts.

linear   all frequencies divided by `factor` (Chen et al., Extending Context Window via Positional Interpolation, 2023)
yarn     slow ones divided, fast ones kept, a ramp between, logits sharpened (Peng et al., YaRN, 2023, arXiv 2309.00071)
llama3   the same idea with bounds on wavelengths (Llama 3.1)
longrope each frequency divided by a number of its own, of two lists: one for contexts up to the original length, one for longer ones
         (Ding et al., LongRoPE, 2024). Which one counts is chosen by the longest context that is served, once: keys in the cache turn by it

config.json has them as `rope_parameters` (transformers 5), or as `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from twostep.checkpoint.context import YarnStretch, rope_kind, rope_of
from twostep.checkpoint.directory import MAX_MODEL_LEN
from twostep.checkpoint.fields import Fields
from twostep.model.kernels.torch_attention import RopeTables

_DEFAULT_THETA = 10000.0
_PARAMETERS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor",
    "mscale", "mscale_all_dim", "truncate",
)  # fmt: skip


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

    @property
    def score_factor(self) -> float:
        """What DeepSeek's models multiply products of queries and keys by, beside cos and sin: 1 without mscale_all_dim."""
        return self._sharpening(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """`is_long`: contexts beyond the original length are served, so that all of them turn by the long factors."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    magnitude: float
    is_long: bool = True

    def scale(self, frequency: torch.Tensor, theta: float) -> torch.Tensor:
        return frequency / torch.tensor(self.long_factor if self.is_long else self.short_factor, dtype=torch.float32)


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """`dim`: how many of a head's numbers turn, from the first on; None: all."""

    theta: float
    scaling: Scaling | None = None
    dim: int | None = None

    def factors(self, num_positions: int) -> str:
        """Returns which list of several is for a context so long; empty: there is but one way to turn."""
        if not isinstance(self.scaling, LongRopeScaling):
            return ""
        return "long-factors" if num_positions > self.scaling.original_max_position_embeddings else "short-factors"


def rope_tables(rope: Rope | None, head_dim: int, num_positions: int, device: str) -> RopeTables:
    """cos and sin of position * frequency, times the scaling's magnitude. Without RoPE nothing turns."""
    if rope is None:
        nothing = torch.empty(num_positions, 0, dtype=torch.float32, device=device)
        return RopeTables(cos=nothing, sin=nothing)
    dim = head_dim if rope.dim is None else rope.dim
    frequency = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    magnitude = 1.0
    scaling = rope.scaling
    if isinstance(scaling, LongRopeScaling):
        scaling = replace(scaling, is_long=rope.factors(num_positions) == "long-factors")
    if scaling is not None:
        frequency, magnitude = scaling.scale(frequency, rope.theta), scaling.magnitude
    angle = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequency)
    return RopeTables(cos=(angle.cos() * magnitude).to(device), sin=(angle.sin() * magnitude).to(device))


def parse_rope(
    fields: Fields,
    max_position_embeddings: int,
    *,
    head_dim: int,
    turned: float | None = None,
    theta: float | None = _DEFAULT_THETA,
    original: int | None = None,
    default: Mapping[str, Any] | None = None,
) -> Rope:
    """Takes RoPE out of config.json. `turned`: the part of a head's numbers that turns if the file does not say; None: all of them turn,
    whatever it says. `theta`, `default`: the base and the other parameters where the file has none (`theta` None: it has to);
    `original`: max_position_embeddings before longrope. Raises SetupError, naming the key, for a type or a parameter that is not
    supported."""
    # Null only where the parameters have one of their own.
    theta = fields.optional_float("rope_theta") if fields.has("rope_theta") else theta
    if fields.peek("partial_rotary_factor") is not None:
        if turned is None:
            fields.expect("partial_rotary_factor", 1.0, default=1.0)
        else:
            turned = fields.positive_float("partial_rotary_factor")
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None) or None
    name, raw = rope_of({"rope_parameters": new, "rope_scaling": old})
    if new is not None and old is not None and new != old:
        fields.refuse("rope_scaling", old, "it contradicts rope_parameters; keep one of them")
    raw = (default or {}) if raw is None else raw
    return parse_parameters(fields, name, raw, max_position_embeddings, head_dim=head_dim, turned=turned, theta=theta, original=original)


def parse_parameters(
    fields: Fields,
    name: str,
    raw: Any,
    max_position_embeddings: int,
    *,
    head_dim: int,
    turned: float | None = None,
    theta: float | None = _DEFAULT_THETA,
    original: int | None = None,
) -> Rope:
    """The same of an object of parameters, `raw`, called `name`."""
    if not isinstance(raw, Mapping):
        fields.refuse(name, raw, "it must be an object or null")
    rope = fields.inner(name, dict(raw))
    kind = rope_kind(raw)
    for key in ("type", "rope_type"):
        rope.take(key, None)
    if theta is None and not rope.has("rope_theta"):
        fields.refuse("rope_theta", None, "it must be a positive number")
    theta = rope.positive_float("rope_theta", theta)
    dim = None
    if turned is None:
        rope.expect("partial_rotary_factor", 1.0, default=1.0)
    else:
        dim = _turning(rope, "partial_rotary_factor", rope.positive_float("partial_rotary_factor", turned), head_dim)
    scaling: Scaling | None = None
    if kind == "linear":
        scaling = LinearScaling(factor=rope.positive_float("factor"))
    elif kind == "llama3":
        scaling = _llama3(rope, max_position_embeddings)
    elif kind == "yarn":
        scaling = _yarn(rope, theta, YarnStretch.of(raw, name, max_position_embeddings, fields.path))
    elif kind in ("longrope", "su"):
        scaling = _longrope(rope, max_position_embeddings, original, dim or head_dim)
    elif kind == "default":
        # Parameters of a scaling that is not applied change nothing.
        for key in _PARAMETERS:
            rope.take(key, None)
    else:
        rope.refuse("rope_type", kind, "supported are default, linear, yarn, llama3 and longrope")
    rope.refuse_rest()
    return Rope(theta=theta, scaling=scaling, dim=dim)


def _turning(fields: Fields, key: str, part: float, head_dim: int) -> int | None:
    """How many of a head's numbers turn; None: all."""
    if part == 1.0:
        return None
    dim = int(head_dim * part)
    if part > 1 or dim < 2 or dim % 2:
        fields.refuse(key, part, f"of heads of {head_dim} numbers an even number must turn, at least 2")
    return dim


def _longrope(rope: Fields, max_position_embeddings: int, original: int | None, dim: int) -> LongRopeScaling:
    """Takes longrope's parameters, of `dim` numbers that turn. What stands beside them goes before what they say of the original length, as
    in transformers."""
    key = "original_max_position_embeddings"
    given = max_position_embeddings
    if original is None and rope.has(key):
        given = rope.positive_int(key, MAX_MODEL_LEN)
    rope.take(key, None)
    original = original or given
    factor, magnitude = rope.optional_float("factor"), rope.optional_float("attention_factor")
    factor = factor or max_position_embeddings / original
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    lists = []
    for key in ("short_factor", "long_factor"):
        value = rope.take(key, None)
        numbers = isinstance(value, list) and all(
            isinstance(n, (int, float)) and not isinstance(n, bool) and 0 < n < math.inf for n in value
        )
        if not numbers or len(value) != dim // 2:
            rope.refuse(key, value, f"it must be a list of {dim // 2} positive numbers, one for each pair of a head's numbers that turn")
        lists.append(tuple(map(float, value)))
    return LongRopeScaling(short_factor=lists[0], long_factor=lists[1], original_max_position_embeddings=original, magnitude=magnitude)


def _llama3(rope: Fields, max_position_embeddings: int) -> Llama3Scaling:
    key = "original_max_position_embeddings"
    scaling = Llama3Scaling(
        factor=rope.positive_float("factor"),
        low_freq_factor=rope.positive_float("low_freq_factor"),
        high_freq_factor=rope.positive_float("high_freq_factor"),
        original_max_position_embeddings=rope.positive_int(key, MAX_MODEL_LEN) if rope.has(key) else max_position_embeddings,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        rope.refuse("high_freq_factor", scaling.high_freq_factor, "it must be above low_freq_factor")
    return scaling


def _yarn(rope: Fields, theta: float, stretch: YarnStretch) -> YarnScaling:
    """Takes yarn's parameters. Null counts as absent, but in `truncate` as false."""
    for key in ("factor", "original_max_position_embeddings"):
        rope.take(key, None)
    if theta <= 1:
        rope.refuse("rope_theta", theta, "yarn needs one above 1")
    scaling = YarnScaling(
        factor=stretch.factor,
        original_max_position_embeddings=stretch.original,
        beta_fast=rope.optional_float("beta_fast") or 32.0,
        beta_slow=rope.optional_float("beta_slow") or 1.0,
        attention_factor=rope.optional_float("attention_factor"),
        mscale=rope.optional_float("mscale"),
        mscale_all_dim=rope.optional_float("mscale_all_dim"),
        truncate=rope.boolean("truncate", True, null=False),
    )
    if scaling.beta_fast < scaling.beta_slow:
        rope.refuse("beta_fast", scaling.beta_fast, f"it must be at least beta_slow ({scaling.beta_slow})")
    return scaling
