"""Keys and values in a byte or half a byte each, with a scale for every token and head: how a block of a quantized pool lies, in torch.

A block stays one contiguous region, so that copies, hand-overs and checksums move scales with what they scale, bit for bit:

    block    layer 0 │ layer 1 │ …
    layer    K of all heads │ V of all heads │ scales of all heads      2 · H · S · N bytes, then H · S · 4 · (1 + groups)
    K        [head, slot, N]             N bytes of numbers: D, or D / 2 of int4
    V        [head, slot / 4, N, 4]      four slots of one dimension beside each other: a tensor core takes its second product's
                                         left operand in runs of keys, and bytes cannot be turned on their way to it
    scales   [head, slot, 1 + groups, 2] of K and of V, one aligned word: a bfloat16 each; then two bytes each for every group of int4

Of latent attention, whose one plane is keys and values both, a layer is K and then its scales, [head, slot]; never int4.

    fp8      float8_e4m3fn               number = byte as such · scale       scale from largest magnitude / 448 on
    int8     128 + integer (uint8)       number = (byte - 128) · scale       scale = largest magnitude / 127
    int4     0 to 15                     number = (integer · step / 8 + offset) · scale, with a step and an offset for 16 numbers

A scale per token and head needs no calibration and is never changed after it was written. It is rounded up to a bfloat16 before it
is divided by, so that its rounding costs no accuracy: two bytes in 130 where float32 would take four. e4m3 rounds to one of eight steps
to a factor of two, coarse enough that it matters where a vector's largest numbers come to lie among them: the scale with the least
error is taken, of eight from the least one to twice that (SmolLM2-135M: 11 % less error of the logits). A vector with a NaN or an
infinity has it in its scale; bytes are always finite, whatever they are multiplied with.

Sixteen levels are too few for a whole vector: keys have dimensions that are large, and of one sign, for every token. int4's groups are
numbers of int8 on a grid of their own, from the group's least one to its largest, which float16 has exactly; a scale and a least number
in 16 bits each would take twice the bytes and gain nothing. (Per-token groups: Zhao et al., "Atom", 2024; why keys are the harder half: Liu
et al., "KIVI", 2024, which takes keys by channel instead, over many tokens at once: here a token's KV is never touched again.)

    byte j of bytes 16 u to 16 u + 15       low half: dimension 32 u + j, of group 2 u      high half: 32 u + 16 + j, of group 2 u + 1
    two bytes of a group                    step in eighths, 1 to 135 │ 128 + offset

A checkpoint may bring scales, for a layer's keys and its values or for each head of them: then these stand at every token, and numbers
beyond 448 times them are cut. Who reads does not know the difference.
"""

from __future__ import annotations

import torch

from twostep import quantized_vector
from twostep.engine.batch import KvShape
from twostep.errors import SetupError
from twostep.quantized_vector import GROUP, SLOTS_TOGETHER

LIMITS = {"fp8": 448.0, "int8": 127.0, "int4": 127.0}
# Vectors smaller than this times a limit become zeros: a decode kernel's sums of weights divided by scales stay finite.
LEAST_SCALE = 2.0**-60
# Scales that an fp8 vector is tried with, from the least up to a factor of two.
FP8_SCALES = 8


def check_shape(shape: KvShape) -> None:
    """Raises SetupError for a shape that cannot be stored quantized."""
    reasons = quantized_vector.reasons_against(
        shape.quantization, head_dim=shape.head_dim, block_size=shape.block_size, num_planes=shape.num_planes
    )
    if reasons:
        raise SetupError(
            f"the KV cache cannot be stored as {shape.quantization!r}: {'; '.join(reasons)}. Give --kv-cache-dtype auto, fp8 or int8, and "
            "--block-size 16, 32 or 64"
        )


def quantize(x: torch.Tensor, quantization: str, static: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] of any float dtype; `static`: scales to use, as static_scales makes them, float32 [...] or what broadcasts to it. Returns
    bytes uint8 [..., D] and scales bfloat16 [...]; of int4, bytes [..., D / 2 + 2 · groups], numbers and then groups."""
    limit = LIMITS[quantization]
    x = x.float()
    peak = x.abs().amax(-1)
    x = x.masked_fill(~x.isfinite(), 0.0)
    scale = _least_scale(peak, limit)
    if static is not None:
        scale = torch.where(peak.isfinite(), static, scale)
    elif quantization == "fp8":
        scale = torch.where(peak.isfinite(), _best_scale(x, peak), scale)
    scaled = x / scale.unsqueeze(-1)
    scaled = scaled.masked_fill(scaled.isnan(), 0.0).clamp(-limit, limit)
    # One NaN, whatever its bits were.
    stored = scale.to(torch.bfloat16).masked_fill(scale.isnan(), torch.nan)
    if quantization == "fp8":
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), stored
    if quantization == "int4":
        return _grouped(scaled), stored
    return (scaled.round() + 128.0).to(torch.uint8), stored


def static_scales(scales: torch.Tensor) -> torch.Tensor:
    """Returns a checkpoint's scales as numbers that bfloat16 has, in float32: rounded up, as all scales are."""
    return _least_scale(scales.float(), 1.0)


def _least_scale(peak: torch.Tensor, limit: float) -> torch.Tensor:
    """Float32 numbers that are bfloat16's."""
    bits = (peak / limit).clamp_min(LEAST_SCALE).view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32)


def _best_scale(x: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """Returns the scale of the least squared error of each vector, of some."""
    first = best = _least_scale(peak, LIMITS["fp8"])
    least = torch.zeros_like(first)
    for i in range(FP8_SCALES):
        scale = _least_scale(peak * 2.0 ** (i / FP8_SCALES), LIMITS["fp8"])
        scaled = x * (1.0 / scale).unsqueeze(-1)
        rounded = scaled.clamp(-LIMITS["fp8"], LIMITS["fp8"]).to(torch.float8_e4m3fn).float()
        error = (rounded - scaled).square().sum(-1) * (scale / first) * (scale / first)
        if i:
            best = torch.where(error < least, scale, best)
            least = torch.minimum(error, least)
        else:
            least = error
    return best


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """x float32 [..., D], magnitudes up to 127. Returns int4's bytes uint8 [..., D / 2 + 2 · groups]."""
    groups = x.unflatten(-1, (-1, GROUP))
    offset = groups.amin(-1).round()
    step = ((groups.amax(-1) - offset) * 8.0 / 15.0).round().clamp_min(1.0)
    numbers = ((groups - offset.unsqueeze(-1)) * 8.0 / step.unsqueeze(-1)).round().clamp(0.0, 15.0).to(torch.uint8)
    halves = numbers[..., 0::2, :] | numbers[..., 1::2, :] << 4
    return torch.cat((halves.flatten(-2), torch.stack((step, offset + 128.0), -1).to(torch.uint8).flatten(-2)), -1)


def _ungrouped(values: torch.Tensor) -> torch.Tensor:
    """The inverse of _grouped, but for the rounding: float32 [..., D]."""
    num_groups = values.shape[-1] // (GROUP // 2 + 2)
    halves, groups = values.split((num_groups * GROUP // 2, 2 * num_groups), -1)
    halves = halves.unflatten(-1, (-1, GROUP))
    numbers = torch.stack((halves & 15, halves >> 4), -2).flatten(-3, -2).float()
    step, offset = groups.unflatten(-1, (-1, 2)).float().unsqueeze(-1).unbind(-2)
    x: torch.Tensor = numbers * (step / 8.0) + (offset - 128.0)
    return x.flatten(-2)


def dequantize(values: torch.Tensor, scales: torch.Tensor, quantization: str) -> torch.Tensor:
    """The inverse of quantize, float32 [..., D] and exact: bytes and scales as it returns them."""
    if quantization == "int4":
        numbers = _ungrouped(values)
    else:
        numbers = values.view(torch.float8_e4m3fn).float() if quantization == "fp8" else values.float() - 128.0
    return numbers * scales.float().unsqueeze(-1)


class QuantizedRows:
    """Vectors of one pool by layer, block, head and slot, on any device; kernels have ways of their own."""

    def __init__(self, shape: KvShape, tensor: torch.Tensor, static: torch.Tensor | None = None) -> None:
        """
        tensor  uint8 [num_blocks, num_layers, bytes of a layer], the pool's
        static  float32 [num_layers, 2 * num_kv_heads], of static_scales: of each layer's heads, keys' then values'; None: each vector gets
                its own
        """
        check_shape(shape)
        self._shape = shape
        self.static = static
        blocks, layers, heads, slots = shape.num_blocks, shape.num_layers, shape.num_kv_heads, shape.block_size
        self._width = quantized_vector.number_bytes(shape.head_dim, shape.quantization)
        size, planes = heads * slots * self._width, shape.num_planes
        self.k = tensor[:, :, :size].view(blocks, layers, heads, slots, self._width)
        # [block, layer, head, slot, scale and groups, plane]
        behind = tensor[:, :, planes * size :].view(torch.bfloat16).view(blocks, layers, heads, slots, -1, planes)
        # [block, layer, head, slot, plane]
        self.scales = behind[..., 0, :]
        self._groups = behind[..., 1:, :].unsqueeze(-1).view(torch.uint8)
        if planes == 1:
            return
        together = (slots // SLOTS_TOGETHER, self._width, SLOTS_TOGETHER)
        self._v = tensor[:, :, size : 2 * size].view(blocks, layers, heads, *together).transpose(-1, -2)
        # Both of a slot as one int32 [block, layer, head, slot · (1 + groups)], that of K in the low half; those of its groups follow.
        self.words = tensor[:, :, 2 * size :].view(torch.int32).view(blocks, layers, heads, -1)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Bytes from K to V, from head to head, and from slot to slot of K."""
        per_head = self._shape.block_size * self._width
        return self._shape.num_kv_heads * per_head, per_head, self._width

    def write(self, layer: int, block: torch.Tensor, slot: torch.Tensor, vectors: torch.Tensor) -> None:
        """Quantizes vectors [T, shape.vectors, D], keys then values, into slots of blocks, int64 [T] each."""
        heads, planes = self._shape.num_kv_heads, self._shape.num_planes
        values, scales = quantize(vectors, self._shape.quantization, None if self.static is None else self.static[layer, : planes * heads])
        numbers, groups = values[..., : self._width], values[..., self._width :]
        self.k[:, layer][block, :, slot] = numbers[:, :heads]
        if planes == 2:
            self._v[:, layer][block, :, slot // SLOTS_TOGETHER, slot % SLOTS_TOGETHER] = numbers[:, heads:]
        self.scales[:, layer][block, :, slot] = scales.view(-1, planes, heads).transpose(1, 2)
        if groups.shape[-1]:
            self._groups[:, layer][block, :, slot] = groups.unflatten(-1, (-1, 2)).unflatten(1, (planes, heads)).permute(0, 2, 3, 1, 4)

    def read(self, layer: int, block: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """float32 [num_planes, ..., block_size, D], keys and values of heads of blocks, int64 [...] each."""
        k = self.k[:, layer][block, head]
        values = torch.stack([k] if self._shape.num_planes == 1 else [k, self._v[:, layer][block, head].reshape(k.shape)])
        if self._groups.numel():
            values = torch.cat((values, self._groups[:, layer][block, head].movedim(-2, 0).flatten(-2)), -1)
        scales = self.scales[:, layer][block, head]
        return dequantize(values, scales.movedim(-1, 0), self._shape.quantization)
