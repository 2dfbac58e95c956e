"""Quantized weights of a checkpoint become dense ones: which parts of which tensors a layer's place takes, and the arithmetic.

    w = (q - z) · s      in float32, rounded once to the place's dtype

A place may be any rows and columns of the whole weight (tensor parallelism): of each tensor the elements that these depend on are read,
so that groups and words may begin before the place does and end behind it. Formats: twostep/checkpoint/linear_format.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from twostep.checkpoint.linear_format import Axis, Role, StoredPart
from twostep.errors import SetupError
from twostep.model.families.modules import Place
from twostep.model.loading.weight_files import StoredTensor, bytes_to_read

# Of a weight that are made dense at a time, in float32.
_ELEMENTS_AT_ONCE = 1 << 22


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


class QuantizedWeight:
    """One layer's tensors on the way to its place. Use: fill what `reads` returns, then `unpack`."""

    def __init__(self, place: Place, stored: Mapping[Role, StoredTensor]) -> None:
        """`stored` has passed check_part."""
        assert place.format is not None
        self._place = place
        self._format = place.format
        self._parts = {part.role: part for part in place.format.parts if part.role in stored}
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
            buffer = torch.empty(size, dtype=stored.dtype, device=self._place.tensor.device)
            work.append((stored, Place(buffer, stored.shape, start)))
            self._buffers[role] = buffer
        return work

    def unpack(self) -> None:
        """Fills the place, and lets go of the tensors. Raises SetupError, naming the tensor, for what is no number or contradicts the
        config."""
        if not self._buffers:
            return
        place, out = self._place, self._place.tensor
        for role, part in self._parts.items():
            if part.turned:
                # Still packed: to go through it in order is worth a copy.
                self._buffers[role] = self._buffers[role].t().contiguous()
        self._check_shape()
        scales = self._buffers[Role.SCALE].float()
        if not bool((scales.isfinite() & (scales != 0)).all()):
            raise self._wrong(Role.SCALE, "has scales that are zero, infinite or no numbers")
        columns = self._column_groups()
        first, unit = place.start[0], self._format.block[0]
        at_once = max(1, _ELEMENTS_AT_ONCE // out.shape[1])
        finite = torch.ones((), dtype=torch.bool, device=out.device)
        for start in range(0, len(out), at_once):
            chunk = out[start : start + at_once]
            begin = first + start
            at = torch.arange(begin, begin + len(chunk), device=out.device)
            rows = at // unit - first // unit if unit else torch.zeros_like(at)
            numbers = self._numbers(begin, len(chunk))
            zeros = self._zeros(begin, len(chunk), rows)
            if zeros is not None:
                numbers.sub_(_spread(zeros, None, columns))
            chunk.copy_(numbers.mul_(_spread(scales, rows, columns)))
            finite &= chunk.isfinite().all()
        if not bool(finite):
            raise self._wrong(Role.WEIGHT, f"has weights that are infinite or no numbers in {str(out.dtype).removeprefix('torch.')}")
        self._buffers.clear()

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

    def _column_groups(self) -> torch.Tensor:
        """Returns to which of the scales' columns that were read each of the place's belongs, int64."""
        start, count, unit = self._place.start[1], self._place.tensor.shape[1], self._format.block[1]
        if (index := self._buffers.get(Role.INDEX)) is not None:
            groups = index.flatten().long()
            if bool(((groups < 0) | (groups >= self._buffers[Role.SCALE].shape[1])).any()):
                raise self._wrong(Role.INDEX, "names groups that are not there")
            return groups
        at = torch.arange(start, start + count, device=self._place.tensor.device)
        return at // unit - start // unit if unit else torch.zeros_like(at)

    def _numbers(self, begin: int, count: int) -> torch.Tensor:
        """Returns q of rows [begin, begin + count) of the whole weight and the place's columns, float32."""
        words, per_word = self._buffers[Role.WEIGHT], self._format.per_word
        if per_word == 1:
            first = self._place.start[0]
            return words[begin - first : begin - first + count].float()
        axis = self._format.storage.packed
        if axis is Axis.OUT:
            return self._unpacked(words, Axis.OUT, self._place.start[0], begin, count).float()
        rows = slice(begin - self._place.start[0], begin - self._place.start[0] + count)
        start, size = self._place.start[1], self._place.tensor.shape[1]
        return self._unpacked(words[rows], Axis.IN, start, start, size).float()

    def _zeros(self, begin: int, count: int, rows: torch.Tensor) -> torch.Tensor | None:
        """Returns z of these rows, float32 [count or 1, as many columns as scales]."""
        format, words = self._format, self._buffers.get(Role.ZERO)
        middle = 1 << (format.bits - 1)
        if words is None:
            return torch.full((1, 1), float(middle), device=rows.device) if format.per_word > 1 else None
        if format.per_word == 1:
            return _spread(words.float(), rows, None)
        zeros = self._unpacked(words, Axis.OUT, self._place.start[0], begin, count)
        zeros = (zeros + format.storage.zero_less) & ((1 << format.bits) - 1)
        if format.symmetric and not bool((zeros == middle).all()):
            raise self._wrong(Role.ZERO, f"has zero points other than {middle}, but the config says symmetric")
        return zeros.float()

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


def _cut(start: int, count: int, unit: int) -> tuple[int, int]:
    """Returns the first element that stands for [start, start + count), and how many do, each for `unit` (0: for all)."""
    if not unit:
        return 0, 1
    first = start // unit
    return first, -(-(start + count) // unit) - first


def _lying(part: StoredPart, pair: tuple[int, int]) -> tuple[int, int]:
    return (pair[1], pair[0]) if part.turned else pair


def _spread(groups: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None) -> torch.Tensor:
    """Returns a group's value for each of its rows and columns; a single one is left to broadcast."""
    if rows is not None and len(groups) > 1:
        groups = groups.index_select(0, rows)
    return groups.index_select(1, columns) if columns is not None and groups.shape[1] > 1 else groups
