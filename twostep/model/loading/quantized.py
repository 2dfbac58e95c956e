"""Quantized tensors of a checkpoint become the one form that products know: which parts of which tensors a layer's place takes, and how.

    w = (q - z) · s

A place may be any rows and columns of the whole weight (tensor parallelism): of each tensor the elements that these depend on are read,
so that groups and words may begin before the place does and end behind it. The numbers stay in their bits; what formats differ in goes:
words of 32 bits and their order, which way round tensors lie, scales of a whole tensor. Formats: twostep/checkpoint/linear_format.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from twostep.checkpoint.linear_format import Axis, Role, StoredPart
from twostep.errors import SetupError
from twostep.model.families.modules import Place
from twostep.model.kernels.quantized_weight import QuantizedWeight
from twostep.model.kernels.weight_quantizer import quantize
from twostep.model.loading.weight_files import StoredTensor, bytes_to_read

# Numbers that are taken out of their words at a time.
_ELEMENTS_AT_ONCE = 1 << 22
# A part that begins within a group has smaller ones; with still smaller ones the scales take as much as a dense weight.
_LEAST_GROUP = 8
_LOW_HALVES = 0x0F0F0F0F
_NOT_A_NUMBER = 0x7F  # of 8-bit floats, but for the sign


def check_part(tensor: StoredTensor, part: StoredPart, place: Place) -> None:
    """Raises SetupError if `tensor` cannot be this part of the layer at `place`."""
    if tensor.stored_as not in part.dtypes:
        raise SetupError(
            f"tensor {tensor.name} is stored as {tensor.stored_as}, but the quantization config asks for {' or '.join(part.dtypes)}; "
            "fix the config, or download the model again"
        )
    asked = _lying(part, part.shape(*place.shape))
    # A side of 1 may be left out.
    if [n for n in tensor.shape if n != 1] != [n for n in asked if n != 1]:
        raise SetupError(
            f"tensor {tensor.name} has shape {list(tensor.shape)}, but config.json and the quantization config ask for {list(asked)}; "
            "fix one of them, or download the model again"
        )


class QuantizedTensors:
    """One layer's tensors on the way to its place. Use: fill what `reads` returns, then `take`."""

    def __init__(self, place: Place, stored: Mapping[Role, StoredTensor]) -> None:
        """`stored` has passed check_part."""
        assert place.part is not None
        self._place = place
        self._device = place.part.device
        self._format = place.part.format
        self._parts = {part.role: part for part in self._format.parts if part.role in stored}
        # Sides of 1 that the file leaves out are there again.
        self._stored = {role: replace(stored[role], shape=_lying(part, part.shape(*place.shape))) for role, part in self._parts.items()}
        self._buffers: dict[Role, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(bytes_to_read(self._stored[role], _lying(part, self._region(part)[1])[0]) for role, part in self._parts.items())

    def reads(self) -> list[tuple[StoredTensor, Place]]:
        """Takes memory for the tensors' parts."""
        if not self._place.tensor.numel():
            return []
        work = []
        for role, part in self._parts.items():
            start, size = (_lying(part, pair) for pair in self._region(part))
            stored = self._stored[role]
            buffer = torch.empty(size, dtype=stored.dtype, device=self._device)
            work.append((stored, Place(buffer, stored.shape, start)))
            self._buffers[role] = buffer
        return work

    def take(self) -> QuantizedWeight | torch.Tensor:
        """Returns the place's weight, and lets go of the tensors: dense, in the place's dtype, where columns belong to groups in an order
        of their own, or a rank's part cuts groups too small. Raises SetupError, naming the tensor, for what is no number or
        contradicts the config."""
        rows, columns = self._place.tensor.shape
        if not rows or not columns:
            return torch.empty(rows, columns, dtype=self._place.tensor.dtype, device=self._device)
        for role, part in self._parts.items():
            if part.turned:
                # Still packed: to go through it in order is worth a copy.
                self._buffers[role] = self._buffers[role].t().contiguous()
        self._check_shape()
        scales = self._buffers[Role.SCALE].float()
        if self._format.storage.exponents:
            # 255 stands for no number.
            scales = torch.where(scales == 255, torch.nan, torch.exp2(scales - 127))
        if not bool((scales.isfinite() & (scales != 0)).all()):
            raise self._wrong(Role.SCALE, "has scales that are zero, infinite or no numbers")
        scales, zeros, height = self._by_rows(scales), self._zeros(), self._height
        groups, width = self._columns()
        if groups is not None:
            # Of each group of the part, or of each column, the scales that are its.
            scales = scales.index_select(1, groups)
            zeros = None if zeros is None else zeros.index_select(1, groups)
        values = self._values()
        zeros = None if zeros is None else zeros.to(values.dtype) if self._halves else (zeros - self._middle).to(torch.int8)
        float4 = self._format.is_float and self._format.bits == 4
        weight = QuantizedWeight(values=values, scales=scales.contiguous(), group=width, block_rows=height, zeros=zeros, float4=float4)
        self._check_values(weight)
        self._buffers.clear()
        return weight if width >= min(_LEAST_GROUP, columns) else weight.dequantize(self._place.tensor.dtype)

    @property
    def _middle(self) -> int:
        """What the numbers of words are more than those that they stand for."""
        return 1 << (self._format.bits - 1) if self._format.per_word > 1 else 0

    @property
    def _halves(self) -> bool:
        return self._format.halves and self._place.tensor.shape[1] % 2 == 0

    @property
    def _height(self) -> int:
        """Rows that share a scale. 1 where the place begins within such a block."""
        unit = self._format.block[0]
        return unit if unit and self._place.start[0] % unit == 0 else 1

    def _by_rows(self, grid: torch.Tensor) -> torch.Tensor:
        """Returns scales, or zero points, as rows of the place that `_height` counts."""
        rows, first, unit = len(self._place.tensor), self._place.start[0], self._format.block[0]
        if not unit:
            return grid.expand(rows, -1)
        if self._height == unit:
            return grid
        return grid.index_select(0, torch.arange(first, first + rows, device=grid.device) // unit - first // unit)

    def _columns(self) -> tuple[torch.Tensor | None, int]:
        """Returns which columns of scales, as they were read, belong to the place's groups (None: all, in order), and how many columns each
        of those has: the format's, or less where the place begins within a group; 1 where they are in no order."""
        first, count, unit = self._place.start[1], self._place.tensor.shape[1], self._format.block[1] or self._place.shape[1]
        at = torch.arange(first, first + count, device=self._device) // unit
        groups = at - first // unit
        index = self._buffers.get(Role.INDEX)
        if index is not None:
            groups = index.flatten().long()
            if bool(((groups < 0) | (groups >= self._buffers[Role.SCALE].shape[1])).any()):
                raise self._wrong(Role.INDEX, "names groups that are not there")
            if not torch.equal(groups, at):
                return groups, 1
        width = count if first // unit == (first + count - 1) // unit else math.gcd(unit, first)
        return (None, width) if width == unit and index is None else (groups[::width].contiguous(), width)

    def _values(self) -> torch.Tensor:
        """Returns q as QuantizedWeight has them."""
        words, format = self._buffers[Role.WEIGHT], self._format
        if format.per_word == 1:
            return words
        (rows, columns), (first, left) = self._place.tensor.shape, self._place.start
        width = columns // 2 if self._halves else columns
        if (
            format.storage.packed is Axis.IN
            and not format.storage.order
            and left % format.per_word == 0
            and (format.bits == 8 or self._halves)
        ):
            # The bytes of a word are in order.
            values = words.flatten().view(torch.uint8).view(rows, -1)[:, :width].contiguous()
            return values if self._halves else values.bitwise_xor_(self._middle).view(torch.int8)
        if self._halves and format.storage.packed is Axis.OUT:
            return _two_to_a_byte(words, format.storage.order)[first % format.per_word :][:rows]
        values = torch.empty(rows, width, dtype=torch.uint8 if self._halves else torch.int8, device=self._device)
        at_once = max(1, _ELEMENTS_AT_ONCE // columns)
        for start in range(0, rows, at_once):
            chunk = values[start : start + at_once]
            if format.storage.packed is Axis.OUT:
                numbers = self._unpacked(words, Axis.OUT, first, first + start, len(chunk))
            else:
                numbers = self._unpacked(words[start : start + at_once], Axis.IN, left, left, columns)
            chunk.copy_(numbers[:, ::2] | numbers[:, 1::2] << 4 if self._halves else numbers - self._middle)
        return values

    def _zeros(self) -> torch.Tensor | None:
        """Returns z of the rows that `_height` counts, as many columns as scales, less than their numbers are by nothing; None: those that
        go without saying."""
        format, words = self._format, self._buffers.get(Role.ZERO)
        if words is None:
            return None
        if format.per_word == 1:
            return self._by_rows(words)
        zeros = self._unpacked(words, Axis.OUT, self._place.start[0], self._place.start[0], len(self._place.tensor))
        zeros = (zeros + format.storage.zero_less) & ((1 << format.bits) - 1)
        if not format.symmetric:
            return zeros
        if not bool((zeros == self._middle).all()):
            raise self._wrong(Role.ZERO, f"has zero points other than {self._middle}, but the config says symmetric")
        return None

    def _check_values(self, weight: QuantizedWeight) -> None:
        dtype = self._place.tensor.dtype
        what = f"has weights that are infinite or no numbers in {str(dtype).removeprefix('torch.')}"
        eight = self._format.is_float and self._format.bits == 8
        if eight and int((weight.values.view(torch.uint8) & _NOT_A_NUMBER).max()) == _NOT_A_NUMBER:
            raise self._wrong(Role.WEIGHT, what)
        largest = torch.finfo(weight.values.dtype).max if eight else float(1 << self._format.bits)
        if float(weight.scales.abs().max()) * largest > torch.finfo(dtype).max and not bool(weight.dequantize(dtype).isfinite().all()):
            raise self._wrong(Role.WEIGHT, what)

    def _region(self, part: StoredPart) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns where in a tensor, as [out, in], what the place depends on begins, and how large it is."""
        whole = part.shape(*self._place.shape)
        if part.role is Role.SHAPE:
            return (0, 0), whole
        place = self._place
        rows, columns = (_cut(*cut) for cut in zip(place.start, place.tensor.shape, part.units, strict=True))
        if part.role in (Role.SCALE, Role.ZERO) and Role.INDEX in self._stored:
            columns = (0, whole[1])
        return (rows[0], columns[0]), (rows[1], columns[1])

    def _check_shape(self) -> None:
        if (shape := self._buffers.get(Role.SHAPE)) is not None and tuple(shape.flatten().tolist()) != self._place.shape:
            raise self._wrong(Role.SHAPE, f"is {shape.flatten().tolist()}, but config.json asks for {list(self._place.shape)}")

    def _unpacked(self, words: torch.Tensor, axis: Axis, first: int, begin: int, count: int) -> torch.Tensor:
        """Returns numbers [begin, begin + count) along `axis` of words of which the first holds number `first` of the whole."""
        per_word, bits, along = self._format.per_word, self._format.bits, axis.value
        word = begin // per_word - first // per_word
        end = _cut(begin, count, per_word)[1] + word
        chosen = words.narrow(along, word, end - word)
        order = self._format.storage.order or range(per_word)
        shifts = torch.tensor([bits * place for place in order], dtype=torch.int32, device=words.device)
        shifts = shifts.view(1, -1, 1) if axis is Axis.OUT else shifts
        numbers = ((chosen.unsqueeze(along + 1) >> shifts) & ((1 << bits) - 1)).flatten(along, along + 1)
        return numbers.narrow(along, begin % per_word, count)

    def _wrong(self, role: Role, what: str) -> SetupError:
        return SetupError(f"tensor {self._stored[role].name} {what}; download the model again, or take another quantization of it")


def _two_to_a_byte(words: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """int32 [N / 8, K] of eight rows' numbers each, at these places; K is even. Returns uint8 [N, K / 2], the even column's number in the
    low half. Four numbers are moved at a time, and none has more than its half of a byte on the way."""
    count, columns = words.shape
    values = torch.empty(count, len(order), columns // 2, dtype=torch.uint8, device=words.device)
    at_once = max(1, _ELEMENTS_AT_ONCE // (columns * len(order)))
    for start in range(0, count, at_once):
        even, odd = (words[start : start + at_once, column::2] for column in (0, 1))
        # Of each byte of a word both numbers, the even column's and the odd one's beside each other.
        halves = (even & _LOW_HALVES) | (odd & _LOW_HALVES) << 4, (even >> 4 & _LOW_HALVES) | (odd & ~_LOW_HALVES)
        for row, place in enumerate(order):
            values[start : start + at_once, row] = halves[place % 2].view(torch.uint8).unflatten(1, (-1, 4))[..., place // 2]
    return values.flatten(0, 1)


class DenseTensor:
    """A layer that is put into its place's format as it is read. Use: as QuantizedTensors."""

    def __init__(self, place: Place, stored: StoredTensor) -> None:
        assert place.part is not None
        self._place = place
        self._part = place.part
        self._stored = stored
        self._buffer: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(bytes_to_read(self._stored, len(run.tensor)) for run in self._place.runs())

    def reads(self) -> list[tuple[StoredTensor, Place]]:
        """Takes memory for the place's part of it, in the file's dtype: it is rounded once."""
        self._buffer = torch.empty(self._place.tensor.shape, dtype=self._stored.dtype, device=self._part.device)
        runs = replace(self._place, tensor=self._buffer, part=None).runs()
        return [(replace(self._stored, shape=run.shape), run) for run in runs]

    def take(self) -> QuantizedWeight:
        """Returns the place's weight, and lets go of the dense one. Raises SetupError, naming the tensor, for what is no number."""
        assert self._buffer is not None
        weight = quantize(self._buffer, self._part.format)
        self._buffer = None
        if not bool(weight.scales.isfinite().all()):
            raise SetupError(f"tensor {self._stored.name} has weights that are infinite or no numbers; download the model again")
        return weight


def _cut(start: int, count: int, unit: int) -> tuple[int, int]:
    """Returns the first element that stands for [start, start + count), and how many do, each for `unit` (0: for all)."""
    if not unit:
        return 0, 1
    first = start // unit
    return first, -(-(start + count) // unit) - first


def _lying(part: StoredPart, pair: tuple[int, int]) -> tuple[int, int]:
    return (pair[1], pair[0]) if part.turned else pair
