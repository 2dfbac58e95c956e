"""How much memory a linear layer takes once it is loaded: in its bits where a product takes them so, else unpacked. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from twostep.checkpoint.linear_format import Activations, LinearFormat
from twostep.checkpoint.quantization import HEAD, Quantization, fitting

_SCALE_BYTES = 4
# What products of CPUs take: int8 by the row, int4 in groups that are multiples of this (twostep/model/kernels/cpu_linear.py).
_CPU_GROUP = 32
# int8 weights up to so many numbers are kept there twice, but where whole tokens are rounded to 8 bits: a second time for single rows.
KEPT_TWICE = 1 << 22
PER_TOKEN = Activations(is_float=False, dynamic=True)


def held_bytes(format: LinearFormat | None, rows: int, columns: int, *, item_bytes: int, on_cpu: bool) -> int:
    """Returns the bytes of a weight [rows, columns] with its scales; `item_bytes` is that of a dense number. Formats: None is dense. A CPU
    whose products are not those that are hoped for unpacks more."""
    if format is None or format.ordered or (on_cpu and not _stays_on_cpu(format, columns)):
        return rows * columns * item_bytes
    height, width = format.block
    # A scale of a whole tensor is written out for each row.
    scales = -(-rows // (height or 1)) * (-(-columns // width) if width else 1)
    zeros = 0 if format.symmetric else scales
    copies = 2 if on_cpu and not format.halves and rows * columns <= KEPT_TWICE and format.activations != PER_TOKEN else 1
    return copies * rows * columns // (2 if format.halves and columns % 2 == 0 else 1) + scales * _SCALE_BYTES + zeros


def held_in_layers(
    quantization: Quantization | None, shapes: Iterable[tuple[int, int]], *, item_bytes: int, on_cpu: bool = False, experts: bool = False
) -> int:
    """Returns the bytes of layers of a decoder, all in the format of its first group. `experts`: they are."""
    is_dense = quantization is None or (quantization.experts_only and not experts)
    format = None if quantization is None or is_dense else quantization.groups[0].format
    return sum(_held(quantization, format, *shape, item_bytes=item_bytes, on_cpu=on_cpu) for shape in shapes)


def held_in_head(quantization: Quantization | None, rows: int, columns: int, *, item_bytes: int, on_cpu: bool = False) -> int:
    """Returns the same of its output layer."""
    format = None if quantization is None else quantization.format_of(HEAD)
    return _held(quantization, format, rows, columns, item_bytes=item_bytes, on_cpu=on_cpu)


def _held(quantization: Quantization | None, format: LinearFormat | None, rows: int, columns: int, *, item_bytes: int, on_cpu: bool) -> int:
    if quantization is not None and format is not None and not quantization.stored:
        format = fitting(format, columns)
    return held_bytes(format, rows, columns, item_bytes=item_bytes, on_cpu=on_cpu)


def _stays_on_cpu(format: LinearFormat, columns: int) -> bool:
    height, width = format.block
    if format.is_float or height > 1:
        return False
    if format.halves:
        return format.activations is None and columns % _CPU_GROUP == 0 and (width or columns) % _CPU_GROUP == 0
    return format.symmetric and width in (0, columns)
