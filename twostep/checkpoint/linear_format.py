"""How a checkpoint stores a linear layer of quantized weights. Torch-free.

A weight is [out, in], w = (q - z) · s: whole numbers or floats q, of which a block of rows and columns shares a scale s and, where the
format has them, a zero point z. Formats differ in their tensors' names, in which way round they lie, and in how several q share a
word of 32 bits: rows of the table below. Of AWQ, AutoAWQ's own `gemm`; of GPTQ, AutoGPTQ's `gptq` and GPTQModel's `gptq_v2`; the rest
are those of compressed-tensors and of FP8 checkpoints as vLLM and transformers read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache

_WORD_BITS = 32
_FLOATS = ("F16", "BF16", "F32")


class Role(Enum):
    """What a tensor of a layer is for. All but SHAPE and INDEX are matrices, scales of a whole tensor [1, 1]."""

    WEIGHT = "weight"
    SCALE = "scale"
    ZERO = "zero point"
    INDEX = "index"  # [1, in]: to which block of columns each belongs
    SHAPE = "shape"  # [1, 2]: of the weight


class Axis(Enum):
    OUT = 0
    IN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One row of the table: names of a layer's tensors, and how they hold its numbers."""

    name: str
    weight: str
    scale: str
    zero: str
    index: str = ""
    shape: str = ""
    turned: bool = False  # matrices are stored as [in, out]
    packed: Axis | None = None  # along which the q of a word follow each other; zero points always do along OUT
    order: tuple[int, ...] = ()  # the place in its word of each q, in turn; empty: as they come, the lowest bits first
    zero_less: int = 0  # zero points are stored less this
    always_zero: bool = False  # symmetric ones have zero points, too
    word_bits: int = _WORD_BITS
    exponents: bool = False  # scales are powers of 2, their exponents stored, 127 for 1


PLAIN = Storage(name="plain", weight="weight", scale="weight_scale", zero="weight_zero_point")
PLAIN_BLOCKS = Storage(name="plain", weight="weight", scale="weight_scale_inv", zero="")
PACKED = Storage(
    name="packed",
    weight="weight_packed",
    scale="weight_scale",
    zero="weight_zero_point",
    index="weight_g_idx",
    shape="weight_shape",
    packed=Axis.IN,
)
AWQ = Storage(name="awq", weight="qweight", scale="scales", zero="qzeros", turned=True, packed=Axis.OUT, order=(0, 4, 1, 5, 2, 6, 3, 7))
_GPTQ = {"weight": "qweight", "scale": "scales", "zero": "qzeros", "index": "g_idx"}
GPTQ = Storage(name="gptq", turned=True, packed=Axis.IN, zero_less=1, always_zero=True, **_GPTQ)  # type: ignore[arg-type]
MXFP4 = Storage(name="mxfp4", weight="blocks", scale="scales", zero="", packed=Axis.IN, word_bits=8, exponents=True)
GPTQ_V2 = Storage(name="gptq_v2", turned=True, packed=Axis.IN, always_zero=True, **_GPTQ)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """How a layer's input is quantized before the product."""

    is_float: bool  # to 8-bit floats (e4m3), else to whole numbers of 8 bits
    dynamic: bool  # by the largest of each token, or of its every `group` columns; else by the checkpoint's one scale
    group: int = 0
    symmetric: bool = True

    def __str__(self) -> str:
        scope = f"per token and {self.group} columns" if self.group else "per token" if self.dynamic else "static"
        return f"{'fp8' if self.is_float else 'int8'} {scope}{'' if self.symmetric else ', with zero points'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """One tensor of a layer. `units`: how many rows and columns of the weight share one of its elements; 0: all."""

    role: Role
    suffix: str
    units: tuple[int, int]
    dtypes: tuple[str, ...]  # safetensors' names of those it may have
    turned: bool = False
    required: bool = True

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns its shape as [out, in], whichever way round it lies."""
        if self.role is Role.SHAPE:
            return (1, 2)
        return _quotient(rows, self.units[0]), _quotient(columns, self.units[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFormat:
    """One linear layer's format: all that a loader, and later a kernel, needs to know of it."""

    storage: Storage
    is_float: bool  # q are floats (of 8 bits e4m3, of 4 e2m1), else whole numbers
    bits: int
    block: tuple[int, int]  # rows and columns that share a scale; 0: all
    symmetric: bool = True
    ordered: bool = False  # columns belong to groups as the index says, in no order
    activations: Activations | None = None

    @property
    def per_word(self) -> int:
        """Numbers q of a word; 1: they have an element each."""
        return self.storage.word_bits // self.bits if self.storage.packed is not None else 1

    @property
    def halves(self) -> bool:
        """Returns whether two numbers share a byte, in a weight of an even number of columns."""
        return self.bits == 4 and self.per_word > 1

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        return _parts(self)

    def __str__(self) -> str:
        rows, columns = self.block
        if rows == 1:
            scope = f"groups of {columns}" if columns else "per channel"
        else:
            scope = f"blocks of {rows} × {columns}" if rows else "per tensor"
        words = [f"fp{self.bits}" if self.is_float else f"int{self.bits}", scope]
        words += [] if self.is_float else ["symmetric" if self.symmetric else "with zero points"]
        words += ["in order of activations"] * self.ordered
        return ", ".join(words) + (f"; activations {self.activations}" if self.activations is not None else "")


@cache
def _parts(format: LinearFormat) -> tuple[StoredPart, ...]:
    storage, turned = format.storage, format.storage.turned
    packed = {Axis.OUT: (format.per_word, 1), Axis.IN: (1, format.per_word), None: (1, 1)}[storage.packed]
    words = ("F8_E4M3",) if format.is_float else ("I8",)
    if storage.packed is not None:
        words = ("I32",) if storage.word_bits == _WORD_BITS else ("U8",)
    scales = ("U8",) if storage.exponents else _FLOATS
    parts = [
        StoredPart(role=Role.WEIGHT, suffix=storage.weight, units=packed, dtypes=words, turned=turned),
        StoredPart(role=Role.SCALE, suffix=storage.scale, units=format.block, dtypes=scales, turned=turned),
    ]
    if not format.symmetric or storage.always_zero:
        rows, columns = format.block
        units = (rows * format.per_word, columns)
        parts.append(StoredPart(role=Role.ZERO, suffix=storage.zero, units=units, dtypes=words, turned=turned))
    if storage.index:
        parts.append(StoredPart(role=Role.INDEX, suffix=storage.index, units=(0, 1), dtypes=("I32", "I64"), required=format.ordered))
    if storage.shape:
        parts.append(StoredPart(role=Role.SHAPE, suffix=storage.shape, units=(0, 0), dtypes=("I64", "I32")))
    return tuple(parts)


def _quotient(count: int, unit: int) -> int:
    return -(-count // unit) if unit else 1
