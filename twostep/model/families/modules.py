"""The parts of a decoder that own weights: linear layers and norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from twostep.model.kernels.ops import Linear, Ops
from twostep.model.loading.places import Place, Places


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes modules of one dtype on one device. Weights are uninitialized until they are loaded."""

    ops: Ops
    dtype: torch.dtype
    device: str
    norm_eps: float

    def empty(self, *sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=self.dtype, device=self.device)

    def linear(self, rows: int, cols: int, *, bias: bool) -> LinearLayer:
        return LinearLayer(self.empty(rows, cols), self.empty(rows) if bias else None)

    def gated_linear(self, rows: int, cols: int, *, bias: bool) -> LinearLayer:
        """silu(gate) * up of a linear layer whose first half of rows are the gates'."""
        return LinearLayer(self.empty(rows, cols), self.empty(rows) if bias else None, gated=True)

    def rms_norm(self, size: int) -> RmsNorm:
        return RmsNorm(self.ops, self.empty(size), self.norm_eps)

    def layer_norm(self, size: int) -> LayerNorm:
        return LayerNorm(self.ops, self.empty(size), self.empty(size), self.norm_eps)


class LinearLayer:
    """x @ weight.T + bias: dense while it is being loaded, whatever the device likes best after that. Its rows may be those of
    several layers of the checkpoint, one after the other."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False) -> None:
        """weight [rows, cols], bias [rows]"""
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self.run: Linear  # there when loading has finished
        self._gated = gated

    def place(self, places: Places, name: str, start: int, rows: int) -> None:
        """Registers rows [start, start + rows) under a checkpoint name."""
        assert self.weight is not None
        places[f"{name}.weight"] = Place.whole(self.weight[start : start + rows])
        if self.bias is not None:
            places[f"{name}.bias"] = Place.whole(self.bias[start : start + rows])

    def finish_loading(self, ops: Ops) -> None:
        """Places given out are dead after it."""
        assert self.weight is not None
        weight, self.weight = self.weight, None
        self.run = (ops.prepare_gated if self._gated else ops.prepare_linear)(weight, self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class Norm(Protocol):
    def place(self, places: Places, name: str) -> None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norms over the last dimension."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds x to `residual` in place and norms that."""
        ...

    def join(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, then: Linear) -> torch.Tensor:
        """then(add(linear(x), residual)), in whatever pieces are fastest here."""
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

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)

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

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._ops.add_layer_norm(x, residual, self.weight, self.bias, self._eps)

    def join(self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, then: Linear) -> torch.Tensor:
        return then(self.add(linear(x), residual))
