"""How much memory a linear layer takes once it is loaded: in its bits where a product takes them so, else unpacked. Torch-free."""

from __future__ import annotations

from twostep.checkpoint.linear_format import LinearFormat

_SCALE_BYTES = 4
# What products of CPUs take: int8 by the row, int4 in groups that are multiples of this (twostep/model/kernels/cpu_linear.py).
_CPU_GROUP = 32


def held_bytes(format: LinearFormat | None, rows: int, columns: int, *, item_bytes: int, on_cpu: bool) -> int:
    """Returns the bytes of a weight [rows, columns] with its scales; `item_bytes` is that of a dense number. Formats: None is dense. A CPU
    whose products are not those that are hoped for unpacks more."""
    if format is None or format.ordered or (on_cpu and not _stays_on_cpu(format, columns)):
        return rows * columns * item_bytes
    height, width = format.block
    # A scale of a whole tensor is written out for each row.
    scales = -(-rows // (height or 1)) * (-(-columns // width) if width else 1)
    zeros = 0 if format.symmetric else scales
    return rows * columns // (2 if format.halves and columns % 2 == 0 else 1) + scales * _SCALE_BYTES + zeros


def _stays_on_cpu(format: LinearFormat, columns: int) -> bool:
    height, width = format.block
    if format.is_float or height > 1:
        return False
    if format.halves:
        return format.activations is None and columns % _CPU_GROUP == 0 and (width or columns) % _CPU_GROUP == 0
    return format.symmetric and width in (0, columns)
