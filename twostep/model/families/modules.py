"""The parts of a decoder that own weights: linear layers and norms, and the places in them that a checkpoint's tensors go to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import torch

from twostep.checkpoint.linear_format import LinearFormat
from twostep.checkpoint.quantization import Quantization
from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.ops import Linear, Ops


class Cut(Enum):
    """Which part of a checkpoint's tensor each rank of several holds (sharding.py). Rows cut need no exchange; of what is cut by columns
    a rank's result is one term of a sum, and the bias is rank 0's."""

    WHOLE = "whole"
    HEADS = "rows: query heads"
    KV_HEADS = "rows: KV heads"
    FEATURES = "rows: of the MLP, between its products"
    VOCABULARY = "rows: of the output layer"
    FROM_HEADS = "columns: query heads"
    FROM_FEATURES = "columns: of the MLP, between its products"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor of a checkpoint goes. `tensor`, dense, is a view of its final (fused) buffer; it takes the part of the
    checkpoint's tensor of that `shape` that begins at `start` and is as large as `tensor`. `format`: how the checkpoint holds it; None: as
    it is."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    cut: Cut = Cut.WHOLE
    format: LinearFormat | None = None

    @staticmethod
    def whole(tensor: torch.Tensor, cut: Cut = Cut.WHOLE) -> Place:
        return Place(tensor, tuple(tensor.shape), (0,) * tensor.dim(), cut)


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

    def empty(self, *sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=self.dtype, device=self.device)

    def linear(self, rows: int, cols: int, *, bias: bool, gated: bool = False) -> LinearLayer:
        """`gated`: silu(gate) * up of a product whose first half of rows are the gates'."""
        return LinearLayer(self.empty(rows, cols), self.empty(rows) if bias else None, gated=gated, quantization=self.quantization)

    def rms_norm(self, size: int) -> RmsNorm:
        return RmsNorm(self.ops, self.empty(size), self.norm_eps)

    def layer_norm(self, size: int) -> LayerNorm:
        return LayerNorm(self.ops, self.empty(size), self.empty(size), self.norm_eps)


class LinearLayer:
    """x @ weight.T + bias: dense while it is being loaded, whatever the device likes best after that. Its rows may be those of
    several layers of the checkpoint, one after the other, each of which the checkpoint may hold in a format of its own."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False, quantization: Quantization | None = None
    ) -> None:
        """weight [rows, cols], bias [rows]"""
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self.run: Linear  # there when loading has finished
        self._gated = gated
        self._quantization = quantization
        # Rows whose input is quantized in one way, in order.
        self._inputs: list[tuple[slice, InputQuantizer | None]] = []

    def place(self, places: Places, *layers: tuple[str, int, Cut]) -> None:
        """Registers the checkpoint's layers (name, rows, cut) that this one consists of, in order."""
        assert self.weight is not None
        start, self._inputs = 0, []
        for name, rows, cut in layers:
            part = slice(start, start + rows)
            format = None if self._quantization is None else self._quantization.format_of(name)
            places[f"{name}.weight"] = replace(Place.whole(self.weight[part], cut), format=format)
            activations = None if format is None else format.activations
            quantizer = None if activations is None else InputQuantizer(activations, self.weight.device)
            if quantizer is not None and quantizer.scale is not None:
                places[f"{name}.{INPUT_SCALE}"] = Place.whole(quantizer.scale)
            self._inputs.append((part, quantizer))
            if self.bias is not None:
                places[f"{name}.bias"] = Place.whole(self.bias[part], cut)
            start += rows
        assert start == len(self.weight)

    def finish_loading(self, ops: Ops) -> None:
        """Hands the weight to the device; places given out are dead after it."""
        assert self.weight is not None
        weight, self.weight = self.weight, None
        prepare = ops.prepare_gated if self._gated else ops.prepare_linear
        inputs = _joined(self._inputs)
        if len(inputs) <= 1:
            quantizer = inputs[0][1] if inputs else None
            self.run = _after(quantizer, prepare(weight, self.bias))
            return
        # Layers of the checkpoint that are one product here, but see unequal inputs.
        parts = [_after(each, ops.prepare_linear(weight[rows], None if self.bias is None else self.bias[rows])) for rows, each in inputs]
        product: Linear = lambda x: torch.cat([part(x) for part in parts], -1)  # noqa: E731
        self.run = (lambda x: ops.silu_mul(product(x))) if self._gated else product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def _after(quantizer: InputQuantizer | None, linear: Linear) -> Linear:
    return linear if quantizer is None else lambda x: linear(quantizer(x))


def _joined(inputs: Sequence[tuple[slice, InputQuantizer | None]]) -> list[tuple[slice, InputQuantizer | None]]:
    """Neighbouring rows with the same input as one."""
    joined: list[tuple[slice, InputQuantizer | None]] = []
    for rows, quantizer in inputs:
        last = joined[-1][1] if joined else None
        if joined and (last is None if quantizer is None else quantizer.is_same_as(last)):
            joined[-1] = slice(joined[-1][0].start, rows.stop), last
        else:
            joined.append((rows, quantizer))
    return joined


class Norm(Protocol):
    def place(self, places: Places, name: str) -> None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norms over the last dimension."""
        ...

    def join(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, then: Linear) -> torch.Tensor:
        """Adds linear(x) to `residual` in place, and returns then(norm(residual)), in whatever pieces are fastest here."""
        ...


class RmsNorm:
    def __init__(self, ops: Ops, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self._ops = ops
        self._eps = eps

    def place(self, places: Places, name: str) -> None:
        places[f"{name}.weight"] = Place.whole(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)

    def join(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, then: Linear) -> torch.Tensor:
        return self._ops.join_rms_norm(linear, x, residual, self.weight, self._eps, then)


class LayerNorm:
    def __init__(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self._ops = ops
        self._eps = eps

    def place(self, places: Places, name: str) -> None:
        places[f"{name}.weight"] = Place.whole(self.weight)
        places[f"{name}.bias"] = Place.whole(self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.layer_norm(x, self.weight, self.bias, self._eps)

    def join(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, then: Linear) -> torch.Tensor:
        return then(self._ops.add_layer_norm(linear(x), residual, self.weight, self.bias, self._eps))
