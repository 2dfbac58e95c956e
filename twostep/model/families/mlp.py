"""The MLPs of decoders: what stands between a layer's second norm and its second addition to the residual."""

from __future__ import annotations

from typing import Protocol

import torch

from twostep.model.families.config import ModelConfig
from twostep.model.families.modules import Cut, Maker, Places
from twostep.model.kernels.ops import Linear, Ops


class Mlp(Protocol):
    """In two pieces, so that a device may join each with what stands beside it."""

    def place(self, places: Places, name: str) -> None:
        """Registers all weights under the checkpoint's names, which begin with `name`."""
        ...

    def finish_loading(self, ops: Ops) -> None: ...

    @property
    def enter(self) -> Linear:
        """[T, anything] from what the norm gave, [T, hidden_size]."""
        ...

    @property
    def leave(self) -> Linear:
        """[T, hidden_size] from that; of one of several ranks, its term of their sum."""
        ...


class GatedMlp:
    """down(activation(gate) · up); gate and up are one product, their weights in that order of rows."""

    def __init__(
        self,
        config: ModelConfig,
        make: Maker,
        *,
        features: int | None = None,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """`features`: numbers between the products; None: the config's."""
        self._config = config
        self._features = config.intermediate_size if features is None else features
        self._names = names
        self._ops = make.ops
        self._activation = config.activation
        # silu is in the product itself where the device has a kernel for both.
        silu = config.activation == "silu"
        self._gate_up = make.linear(2 * self._features, config.hidden_size, bias=config.mlp_bias, gated=silu)
        self._down = make.linear(config.hidden_size, self._features, bias=config.mlp_bias)

    def place(self, places: Places, name: str) -> None:
        gate, up, down = self._names
        self._gate_up.place(places, (f"{name}.{gate}", self._features, Cut.FEATURES), (f"{name}.{up}", self._features, Cut.FEATURES))
        self._down.place(places, (f"{name}.{down}", self._config.hidden_size, Cut.FROM_FEATURES))

    def finish_loading(self, ops: Ops) -> None:
        self._gate_up.finish_loading(ops)
        self._down.finish_loading(ops)

    def take_dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights of gates and up, and of down, for those who do not use it as an MLP; in place of finish_loading."""
        return self._gate_up.take_dense(), self._down.take_dense()

    @property
    def enter(self) -> Linear:
        return self._gate_up.run if self._activation == "silu" else self._enter

    @property
    def leave(self) -> Linear:
        return self._down.run

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.gate(self._gate_up(x), self._activation)


class PlainMlp:
    """out(activation(into(x)))."""

    def __init__(self, config: ModelConfig, make: Maker, *, names: tuple[str, str]) -> None:
        self._config = config
        self._names = names
        self._activation = config.activation
        self._ops = make.ops
        self._into = make.linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self._out = make.linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def place(self, places: Places, name: str) -> None:
        into, out = self._names
        self._into.place(places, (f"{name}.{into}", self._config.intermediate_size, Cut.FEATURES))
        self._out.place(places, (f"{name}.{out}", self._config.hidden_size, Cut.FROM_FEATURES))

    def finish_loading(self, ops: Ops) -> None:
        self._into.finish_loading(ops)
        self._out.finish_loading(ops)

    @property
    def enter(self) -> Linear:
        return self._enter

    @property
    def leave(self) -> Linear:
        return self._out.run

    def _enter(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.activate(self._into(x), self._activation)
