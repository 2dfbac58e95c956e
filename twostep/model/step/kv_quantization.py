"""Keys and values in a byte each, with a scale for every token and head: how a block of a quantized pool is laid out, in torch.

A block stays one contiguous region, so that copies, hand-overs and checksums move scales with what they scale, bit for bit:

    block    layer 0 │ layer 1 │ …
    layer    K of all heads │ V of all heads │ scales of all heads      2 · H · S · D bytes, then H · S · 4
    K        [head, slot, D]
    V        [head, slot / 4, D, 4]      four slots of one dimension beside each other: a tensor core takes its second product's
                                         left operand in runs of keys, and bytes cannot be turned on their way to it
    scales   [head, slot, 2]             bfloat16, of K and of V: one aligned word a token

Of latent attention, whose one plane is keys and values both, a layer is K and then its scales, [head, slot].

    fp8      float8_e4m3fn               number = byte as such · scale       scale from largest magnitude / 448 on
    int8     128 + integer (uint8)       number = (byte - 128) · scale       scale = largest magnitude / 127

A scale per token and head needs no calibration and is never changed after it was written. It is rounded up to a bfloat16 before it
is divided by, so that its rounding costs no accuracy: two bytes in 130 where float32 would take four. e4m3 rounds to one of eight steps
to a factor of two, coarse enough that it matters where a vector's largest numbers come to lie among them: the scale with the least
error is taken, of eight from the least one to twice that (SmolLM2-135M: 11 % less error of the logits). A vector with a NaN or an
infinity has it in its scale; bytes are always finite, whatever they are multiplied with.

A checkpoint may bring scales, for a layer's keys and its values or for each head of them: then these stand at every token, and numbers
beyond 448 times them are cut. Who reads does not know the difference.
"""

from __future__ import annotations

import torch

from twostep.engine.batch import KvShape
from twostep.errors import SetupError

LIMITS = {"fp8": 448.0, "int8": 127.0}
# Vectors smaller than this times a limit become zeros: a decode kernel's sums of weights divided by scales stay finite.
LEAST_SCALE = 2.0**-60
SLOTS_TOGETHER = 4
# Scales that an fp8 vector is tried with, from the least up to a factor of two.
FP8_SCALES = 8


def check_shape(shape: KvShape) -> None:
    """Raises SetupError for a shape that cannot be stored quantized."""
    if shape.quantization not in LIMITS:
        raise SetupError(f"the KV cache cannot be stored as {shape.quantization!r}; give --kv-cache-dtype auto, fp8 or int8")
    if shape.block_size % SLOTS_TOGETHER:
        raise SetupError(
            f"quantized KV is stored {SLOTS_TOGETHER} tokens together, and block size {shape.block_size} is no multiple of that; "
            "give --block-size 16, 32 or 64, or --kv-cache-dtype auto"
        )


def quantize(x: torch.Tensor, quantization: str, static: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] of any float dtype; `static`: scales to use, as static_scales makes them, float32 [...] or what broadcasts to it. Returns
    bytes uint8 [..., D] and scales bfloat16 [...]."""
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


def dequantize(values: torch.Tensor, scales: torch.Tensor, quantization: str) -> torch.Tensor:
    """The inverse of quantize, float32 and exact: bytes uint8 [..., D], scales bfloat16 [...]."""
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
        blocks, layers, heads = shape.num_blocks, shape.num_layers, shape.num_kv_heads
        size, planes = heads * shape.block_size * shape.head_dim, shape.num_planes
        self.k = tensor[:, :, :size].view(blocks, layers, heads, shape.block_size, shape.head_dim)
        # [block, layer, head, slot, plane]
        self.scales = tensor[:, :, planes * size :].view(torch.bfloat16).view(blocks, layers, heads, shape.block_size, planes)
        if planes == 1:
            return
        together = (shape.block_size // SLOTS_TOGETHER, shape.head_dim, SLOTS_TOGETHER)
        self._v = tensor[:, :, size : 2 * size].view(blocks, layers, heads, *together).transpose(-1, -2)
        # Both of a slot as one int32 [block, layer, head, slot], that of K in the low half.
        self.words = tensor[:, :, 2 * size :].view(torch.int32).view(blocks, layers, heads, shape.block_size)

    @property
    def strides(self) -> tuple[int, int, int]:
        """Bytes from K to V, from head to head, and from slot to slot of K."""
        shape = self._shape
        per_head = shape.block_size * shape.head_dim
        return shape.num_kv_heads * per_head, per_head, shape.head_dim

    def write(self, layer: int, block: torch.Tensor, slot: torch.Tensor, vectors: torch.Tensor) -> None:
        """Quantizes vectors [T, shape.vectors, D], keys then values, into slots of blocks, int64 [T] each."""
        heads, planes = self._shape.num_kv_heads, self._shape.num_planes
        values, scales = quantize(vectors, self._shape.quantization, None if self.static is None else self.static[layer, : planes * heads])
        self.k[:, layer][block, :, slot] = values[:, :heads]
        if planes == 2:
            self._v[:, layer][block, :, slot // SLOTS_TOGETHER, slot % SLOTS_TOGETHER] = values[:, heads:]
        self.scales[:, layer][block, :, slot] = scales.view(-1, planes, heads).transpose(1, 2)

    def read(self, layer: int, block: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """float32 [num_planes, ..., block_size, D], keys and values of heads of blocks, int64 [...] each."""
        k = self.k[:, layer][block, head]
        planes = [k] if self._shape.num_planes == 1 else [k, self._v[:, layer][block, head].reshape(k.shape)]
        scales = self.scales[:, layer][block, head]
        return dequantize(torch.stack(planes), scales.movedim(-1, 0), self._shape.quantization)
