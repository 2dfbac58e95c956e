"""Number formats of KV in numpy, which knows neither bfloat16 nor float8: bit patterns in, bit patterns out.

bfloat16        uint16, the high half of a float32; rounded to the nearest, ties to even
fp8, int8, int4 uint8 and a bfloat16 scale for every vector, as twostep/model/step/kv_quantization.py stores them, to the bit, int4's
                groups behind its numbers; of fp8's scales that are equally good to a float32's last digits, another one may be taken
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.transport import Bytes
from twostep.quantized_vector import GROUP

Halves = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]

LIMITS = {"fp8": 448.0, "int8": 127.0, "int4": 127.0}
LEAST_SCALE = 2.0**-60
FP8_SCALES = 8
_STORED: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.float16)}


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """Returns the numpy dtype that holds a number of a KV dtype."""
    return _STORED[dtype]


def to_bfloat16(x: Floats) -> Halves:
    """Returns the bits of bfloat16. Any NaN becomes the quiet one, 0x7FC0."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    out: Halves = np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
    return out


def from_bfloat16(bits: Halves) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_float32(x: npt.NDArray[np.generic], dtype: str) -> Floats:
    """Returns x in float32, exactly. x: an array of stored_dtype(dtype)."""
    if dtype == "bfloat16":
        return from_bfloat16(x.view(np.uint16))
    out: Floats = x.astype(np.float32, copy=False)
    return out


def from_float32(x: Floats, dtype: str) -> npt.NDArray[np.generic]:
    """Returns x in another dtype, rounded to the nearest, ties to even; float16 has infinities for what is too large."""
    if dtype == "bfloat16":
        return to_bfloat16(x)
    with np.errstate(over="ignore"):
        out: npt.NDArray[np.generic] = x.astype(_STORED[dtype], copy=False)
        return out


def _fp8_table() -> Floats:
    """Returns the number of each of the 256 codes of float8_e4m3fn: 1 sign, 4 exponent, 3 fraction bits, no infinities, 0x7F is a NaN."""
    code = np.arange(128)
    exponent, fraction = code >> 3, code & 7
    numbers = np.where(exponent, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    numbers[127] = np.nan
    return np.concatenate((numbers, -numbers)).astype(np.float32)


_FP8 = _fp8_table()


def to_fp8(x: Floats) -> Bytes:
    """Returns the codes of float8_e4m3fn. x: finite, magnitudes up to 448."""
    magnitude = np.abs(x)
    _, exponent = np.frexp(magnitude)
    # Numbers from 2**power on, in eighths of it; below the least power they are subnormal, and so is zero.
    power = np.where(magnitude > 0, np.maximum(exponent - 1, -6), -6)
    eighths = np.rint(np.ldexp(magnitude, 3 - power)).astype(np.int32)
    code = (power + 7) * 8 + eighths - 8
    out: Bytes = (code | (np.signbit(x) * np.int32(128))).astype(np.uint8)
    return out


def from_fp8(codes: Bytes) -> Floats:
    return _FP8[codes]


def quantize(x: Floats, quantization: str) -> tuple[Bytes, Halves]:
    """Quantizes x, float32 [..., D]. Returns bytes uint8 [..., D] and scales bfloat16 [...]; of int4, bytes [..., D / 2 + 2 · groups]."""
    limit = np.float32(LIMITS[quantization])
    with np.errstate(invalid="ignore", over="ignore"):
        peak = np.abs(x).max(-1)
        x = np.where(np.isfinite(x), x, np.float32(0))
        scale = _least_scale(peak / limit)
        if quantization == "fp8":
            scale = np.where(np.isfinite(peak), _best_scale(x, peak), scale)
        scaled = x / scale[..., None]
        scaled = np.clip(np.where(np.isnan(scaled), np.float32(0), scaled), -limit, limit)
    stored = to_bfloat16(scale)
    if quantization == "fp8":
        return to_fp8(scaled), stored
    if quantization == "int4":
        return _grouped(scaled), stored
    return (np.rint(scaled) + 128).astype(np.uint8), stored


def dequantize(values: Bytes, scales: Halves, quantization: str) -> Floats:
    """Does the inverse of quantize, exactly."""
    if quantization == "int4":
        numbers = _ungrouped(values)
    else:
        numbers = from_fp8(values) if quantization == "fp8" else values.astype(np.float32) - np.float32(128)
    with np.errstate(invalid="ignore"):
        out: Floats = numbers * from_bfloat16(scales)[..., None]
    return out


def _grouped(x: Floats) -> Bytes:
    """x: magnitudes up to 127."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    offset = np.rint(groups.min(-1))
    step = np.maximum(np.rint((groups.max(-1) - offset) * np.float32(8) / np.float32(15)), np.float32(1))
    scaled = (groups - offset[..., None]) * np.float32(8) / step[..., None]
    numbers = np.clip(np.rint(scaled), 0, 15).astype(np.uint8)
    halves = numbers[..., 0::2, :] | numbers[..., 1::2, :] << np.uint8(4)
    behind = np.stack((step, offset + np.float32(128)), -1).astype(np.uint8)
    return np.concatenate([part.reshape(*x.shape[:-1], part.shape[-2] * part.shape[-1]) for part in (halves, behind)], -1)


def _ungrouped(values: Bytes) -> Floats:
    leading, num_groups = values.shape[:-1], values.shape[-1] // (GROUP // 2 + 2)
    halves = values[..., : num_groups * GROUP // 2].reshape(*leading, num_groups // 2, GROUP)
    numbers = np.stack((halves & 15, halves >> 4), -2).reshape(*leading, num_groups, GROUP).astype(np.float32)
    step, offset = np.moveaxis(values[..., num_groups * GROUP // 2 :].reshape(*leading, num_groups, 2).astype(np.float32), -1, 0)[..., None]
    out: Floats = numbers * (step / np.float32(8)) + (offset - np.float32(128))
    return out.reshape(*leading, num_groups * GROUP)


def _least_scale(wanted: npt.NDArray[Any]) -> Floats:
    """Returns the next number that bfloat16 has, upward; NaN stays."""
    bits = np.ascontiguousarray(np.maximum(wanted, np.float32(LEAST_SCALE))).view(np.uint32)
    return np.where(np.isnan(wanted), wanted, ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32))


def _best_scale(x: Floats, peak: Floats) -> Floats:
    """Tries some scales, and returns that of the least squared error of each vector."""
    limit = np.float32(LIMITS["fp8"])
    finite = np.where(np.isfinite(peak), peak, np.float32(0))
    first = best = _least_scale(finite / limit)
    least = np.zeros_like(first)
    for i in range(FP8_SCALES):
        scale = _least_scale(finite * np.float32(2.0 ** (i / FP8_SCALES)) / limit)
        scaled = x * (np.float32(1) / scale)[..., None]
        rounded = from_fp8(to_fp8(np.clip(scaled, -limit, limit)))
        error = np.square(rounded - scaled).sum(-1) * (scale / first) * (scale / first)
        if i:
            best = np.where(error < least, scale, best)
            least = np.minimum(error, least)
        else:
            least = error
    return best
