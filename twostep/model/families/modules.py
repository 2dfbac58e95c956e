"""The parts of a decoder that own weights: linear layers and norms, and the places in them that a checkpoint's tensors go to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from typing import Protocol

import torch

from twostep.checkpoint.linear_format import LinearFormat
from twostep.checkpoint.quantization import Quantization, fitting
from twostep.model.families.fused import Fused, alone
from twostep.model.families.quantized_part import LoadedWeight, QuantizedPart, joined
from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.ops import Linear, Ops
from twostep.model.kernels.quantized_weight import QuantizedWeight
from twostep.model.kernels.weight_quantizer import quantize


class Cut(Enum):
    """Which part of a checkpoint's tensor each rank of several holds (sharding.py). Rows cut need no exchange; of what is cut by columns
    a rank's result is one term of a sum, and the bias is rank 0's."""

    WHOLE = "whole"
    HEADS = "rows: query heads"
    KV_HEADS = "rows: KV heads"
    FEATURES = "rows: of what lies between two products, such as the MLP's"
    VOCABULARY = "rows: of the output layer"
    FROM_HEADS = "columns: query heads"
    FROM_FEATURES = "columns: of what lies between two products, such as the MLP's"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor of a checkpoint goes. `tensor`, dense, is a view of its final (fused) buffer; it takes the part of the
    checkpoint's tensor of that `shape` that begins at `start` and is as large as `tensor`. With a `part`, that is filled instead, and
    `tensor` has no memory (it is on the meta device). `fused`: the checkpoint holds it inside a larger one. `middle`: around which
    made-up numbers lie."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    cut: Cut = Cut.WHOLE
    part: QuantizedPart | None = None
    fused: Fused | None = None
    middle: float = 0.0

    @staticmethod
    def whole(tensor: torch.Tensor, cut: Cut = Cut.WHOLE, *, fused: Fused | None = None, middle: float = 0.0) -> Place:
        return Place(tensor, tuple(tensor.shape), (0,) * tensor.dim(), cut, fused=fused, middle=middle)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape if self.fused is None else self.fused.shape(self.shape)

    def runs(self) -> list[Place]:
        """Returns the same as places in the tensor that the checkpoint has: one for each of its rectangles."""
        if self.fused is None:
            return [self]
        fused, shape, first = self.fused, self.stored_shape, self.start[0]
        found, row, stop = list[Place](), first, first + len(self.tensor)
        while row < stop:
            end = min(stop, (row // fused.count + 1) * fused.count)
            tensor, start = self.tensor[row - first : end - first], (fused.row(row), *self.start[1:])
            if fused.turned and tensor.dim() == 2:
                tensor, start = tensor.t(), start[::-1]
            found.append(replace(self, tensor=tensor, shape=shape, start=start, fused=None))
            row = end
        return found


INPUT_SCALE = "input_scale"  # what a layer's static scale of its input is called
Places = dict[str, Place]  # by the checkpoint's (Hugging Face) names


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes modules of one dtype on one device. Weights are uninitialized until they are loaded."""

    ops: Ops
    dtype: torch.dtype
    device: str
    norm_eps: float
    quantization: Quantization | None = None
    # By how their names end.
    fused: Mapping[str, Fused] = field(default_factory=dict)

    def fused_at(self, name: str) -> Fused | None:
        """Returns where the checkpoint holds the layer of this name; None: it has it by itself."""
        for end, fused in self.fused.items():
            if name.endswith(f".{end}"):
                return replace(fused, layer=name.removesuffix(end) + fused.layer)
        return None

    def empty(self, *sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=self.dtype, device=self.device)

    def linear(self, rows: int, cols: int, *, bias: bool, gated: bool = False) -> LinearLayer:
        """`gated`: silu(gate) * up of a product whose first half of rows are the gates'."""
        return LinearLayer(self, rows, cols, bias=bias, gated=gated)

    def rms_norm(self, size: int) -> RmsNorm:
        return RmsNorm(self.ops, self.empty(size), self.norm_eps)

    def rms_norm_from_one(self, size: int) -> RmsNorm:
        """Multiplies by 1 + weight, in float32 (Gemma)."""
        weight = torch.empty(size, dtype=torch.float32, device=self.device)
        return RmsNorm(self.ops, weight, self.norm_eps, offset=1.0)

    def layer_norm(self, size: int) -> LayerNorm:
        return LayerNorm(self.ops, self.empty(size), self.empty(size), self.norm_eps)


class LinearLayer:
    """x @ weight.T + bias. Its rows may be those of several layers of the checkpoint, one after the other, each dense or in a quantized
    format of its own. Quantized ones stay so, whatever layout the device likes best; those who use the layer do not see it."""

    def __init__(self, make: Maker, rows: int, cols: int, *, bias: bool, gated: bool = False) -> None:
        self.bias = make.empty(rows) if bias else None
        self.run: Linear  # there when loading has finished
        self._make = make
        self._shape = (rows, cols)
        self._gated = gated
        # What `run` is made of, in order: dense rows, or those of quantized layers.
        self._parts: list[torch.Tensor | QuantizedPart] = []

    def place(self, places: Places, *layers: tuple[str, int, Cut]) -> None:
        """Registers the checkpoint's layers (name, rows, cut) that this one consists of, in order, and takes memory for dense ones."""
        self._parts, start = [], 0
        quantization, cols = self._make.quantization, self._shape[1]
        held = {name: self._make.fused_at(name) for name, _, _ in layers}
        stored = {name: name if fused is None else fused.layer for name, fused in held.items()}
        formats = {name: None if quantization is None else quantization.format_of(stored[name]) for name, _, _ in layers}
        # Dense neighbours are one product.
        for is_dense, neighbours in groupby(layers, lambda layer: formats[layer[0]] is None):
            run = list(neighbours)
            dense = self._make.empty(sum(rows for _, rows, _ in run), cols) if is_dense else None
            self._parts += [] if dense is None else [dense]
            for name, rows, cut in run:
                if dense is not None:
                    places[f"{name}.weight"] = Place.whole(dense[:rows], cut, fused=held[name])
                    dense = dense[rows:]
                elif (format := formats[name]) is not None:
                    self._parts.append(place_quantized(self._make, places, name, format, (rows, cols), cut, fused=held[name]))
                if self.bias is not None:
                    places[f"{name}.bias"] = Place.whole(self.bias[start : start + rows], cut, fused=held[name])
                start += rows
        assert start == self._shape[0]

    def finish_loading(self, ops: Ops) -> None:
        """Hands the weights to the device; places given out are dead after it."""
        parts, self._parts = self._parts, []
        weights = joined([LoadedWeight(part, None) if isinstance(part, torch.Tensor) else part.take() for part in parts])
        products: list[Linear] = []
        start, gated = 0, self._gated
        for loaded in weights:
            weight = loaded.weight
            bias = None if self.bias is None else self.bias[start : start + weight.shape[0]]
            start += weight.shape[0]
            if isinstance(weight, QuantizedWeight):
                alone = gated and len(weights) == 1
                products.append(ops.prepare_quantized(weight, bias, self._make.dtype, gated=alone))
                gated = gated and not alone
            elif gated and len(weights) == 1 and loaded.activations is None:
                products.append(ops.prepare_gated(weight, bias))
                gated = False
            else:
                products.append(_after(loaded.activations, ops.prepare_linear(weight, bias)))
        product = products[0] if len(products) == 1 else _side_by_side(products)
        self.run = (lambda x: ops.silu_mul(product(x))) if gated else product

    def take_dense(self) -> torch.Tensor:
        """Returns the whole weight [rows, cols], unpacked where it is quantized, for those who do not use it as a layer; in place of
        finish_loading."""
        parts, self._parts = self._parts, []
        weights = [part if isinstance(part, torch.Tensor) else part.take().weight for part in parts]
        dense = [weight.dequantize(self._make.dtype) if isinstance(weight, QuantizedWeight) else weight for weight in weights]
        return dense[0] if len(dense) == 1 else torch.cat(dense)

    def use(self, name: str, weight: torch.Tensor) -> None:
        """Takes dense memory that something else has filled, [rows, cols], for the whole weight, of the checkpoint's layer `name`."""
        assert weight.shape == self._shape
        self._parts = [weight]
        format = None if self._make.quantization is None else self._make.quantization.format_of(name)
        if format is not None and len(weight):
            part = QuantizedPart(fitting(format, weight.shape[1]), stored=False, dtype=weight.dtype, device=weight.device)
            part.fill(quantize(weight, part.format))
            self._parts = [part]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def place_quantized(
    make: Maker,
    places: Places,
    name: str,
    format: LinearFormat,
    shape: tuple[int, int],
    cut: Cut,
    *,
    taken: bool = True,
    fused: Fused | None = None,
) -> QuantizedPart:
    """Registers a layer of the checkpoint that is quantized, or becomes so, and returns what is filled with it. `taken` False: another
    rank's, of which nothing is read but its input's scale."""
    assert make.quantization is not None
    if not make.quantization.stored:
        format = fitting(format, shape[1])
    part = QuantizedPart(format, stored=make.quantization.stored, dtype=make.dtype, device=torch.device(make.device))
    nowhere = torch.empty(shape if taken else (0, shape[1]), dtype=make.dtype, device="meta")
    places[f"{name}.weight"] = Place(nowhere, shape, (0, 0), cut, part, fused)
    if part.activations is not None and part.activations.scale is not None:
        of_all = None if fused is None else alone(fused.layer)
        places[f"{name}.{INPUT_SCALE}"] = Place.whole(part.activations.scale, fused=of_all)
    return part


def _after(quantizer: InputQuantizer | None, linear: Linear) -> Linear:
    return linear if quantizer is None else lambda x: linear(quantizer(x))


def _side_by_side(products: list[Linear]) -> Linear:
    return lambda x: torch.cat([product(x) for product in products], -1)


class Norm(Protocol):
    def place(self, places: Places, name: str) -> None: ...

    def finish_loading(self, ops: Ops) -> None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norms over the last dimension."""
        ...

    def join(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, then: Linear) -> torch.Tensor:
        """Adds linear(x) to `residual` in place, and returns then(norm(residual)), in whatever pieces are fastest here."""
        ...


class RmsNorm:
    def __init__(self, ops: Ops, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> None:
        """`offset`: what is added to the checkpoint's weight."""
        self.weight = weight
        self._ops = ops
        self._eps = eps
        self._offset = offset

    def place(self, places: Places, name: str) -> None:
        places[f"{name}.weight"] = Place.whole(self.weight, middle=1.0 - self._offset)

    def finish_loading(self, ops: Ops) -> None:
        if self._offset:
            self.weight.add_(self._offset)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)

    def join(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, then: Linear) -> torch.Tensor:
        return self._ops.join_rms_norm(linear, x, residual, self.weight, self._eps, then)

    def join_normed(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, norm: Norm, then: Linear) -> torch.Tensor:
        """Adds what this norm makes of linear(x) to `residual` in place, and returns then(norm(residual)), in whatever pieces are
        fastest."""
        if isinstance(norm, RmsNorm):
            return self._ops.join_normed(linear, x, residual, self.weight, norm.weight, self._eps, then)
        residual.add_(self(self._ops.whole(linear(x))))
        return then(norm(residual))


class LayerNorm:
    def __init__(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self._ops = ops
        self._eps = eps

    def place(self, places: Places, name: str) -> None:
        places[f"{name}.weight"] = Place.whole(self.weight, middle=1.0)
        places[f"{name}.bias"] = Place.whole(self.bias)

    def finish_loading(self, ops: Ops) -> None:
        """Nothing is prepared."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.layer_norm(x, self.weight, self.bias, self._eps)

    def join(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, then: Linear) -> torch.Tensor:
        return then(self._ops.add_layer_norm(linear(x), residual, self.weight, self.bias, self._eps))


class NoNorm:
    """Stands where a family has no norm."""

    def place(self, places: Places, name: str) -> None:
        """There is nothing to register."""

    def finish_loading(self, ops: Ops) -> None:
        """Nothing is prepared."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def join(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, then: Linear) -> torch.Tensor:
        raise AssertionError("only layers that add to the residual themselves have no norm there")
