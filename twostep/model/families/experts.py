"""The MLP of a mixture of experts: a router sends each token to the best few of many gated MLPs, and their weighted sum is what it gives.

    x ─┬─ gate ─ route ─┐
       ├────────────── experts ─ + ─→
       └─ shared expert (× sigmoid of its gate) ─┘

A family says how many there are and how they are chosen (ExpertsConfig, of config.json), which of its layers have them, and what its
checkpoint calls them (ExpertNames). DeepSeek-V3's, for example:

    ExpertsConfig(
        router=Router(num_experts=256, top_k=8, scores=Scores.SIGMOID, renormalize=True, scale=2.5, num_groups=8, top_groups=4,
                      group_score=GroupScore.BEST_TWO),
        intermediate_size=2048, shared_size=2048, corrected=True, in_float32=True, layers=(False,) * 3 + (True,) * 58)
    ExpertsMlp(make, config.hidden_size, config.experts, ExpertNames(shared="shared_experts"))

V2: Scores.SOFTMAX, GroupScore.LARGEST, neither renormalized nor corrected.

Ranks of a tensor-parallel model hold a part of every expert, or whole experts each (`held`); either way a rank's result is one term of
the sum that a dense MLP's is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from twostep.checkpoint.linear_format import LinearFormat
from twostep.errors import SetupError
from twostep.model.families.config import ExpertsConfig
from twostep.model.families.modules import Cut, LinearLayer, Maker, Place, Places
from twostep.model.families.quantized_part import joined
from twostep.model.kernels.experts import Beside, Experts, ExpertWeights, Routing
from twostep.model.kernels.ops import Linear, Ops
from twostep.model.kernels.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls the parts of such an MLP, behind the MLP's own name."""

    router: str = "gate"
    experts: str = "experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"


class ExpertsMlp:
    """One layer's. `enter` leaves the tokens as they are; `leave` does everything."""

    def __init__(self, make: Maker, hidden_size: int, config: ExpertsConfig, names: ExpertNames) -> None:
        self.config = config
        self.leave: Linear = self._run
        self._make = make
        self._names = names
        held, size = len(config.held), config.intermediate_size
        self._router = _Router(make, hidden_size, config)
        self._gate_up = _ExpertLinear(make, held, 2 * size, hidden_size)
        self._down = _ExpertLinear(make, held, hidden_size, size)
        self._shared = _SharedExpert(make, hidden_size, config) if config.shared_size else None
        self._experts: Experts

    @property
    def enter(self) -> Linear:
        return _as_it_is

    def place(self, places: Places, prefix: str) -> None:
        """`prefix`: the MLP's own name."""
        config, names = self.config, self._names
        size, hidden_size = config.intermediate_size, self._down.rows
        self._router.place(places, f"{prefix}.{names.router}")
        for number in range(config.router.num_experts):
            expert = f"{prefix}.{names.experts}.{number}"
            # Whole experts of other ranks are known, and take nothing.
            held = number - config.held.start if number in config.held else None
            cut, from_cut = (Cut.WHOLE, Cut.WHOLE) if config.whole else (Cut.FEATURES, Cut.FROM_FEATURES)
            self._gate_up.place(places, held, (f"{expert}.{names.gate}", size, cut), (f"{expert}.{names.up}", size, cut))
            self._down.place(places, held, (f"{expert}.{names.down}", hidden_size, from_cut))
        if self._shared is not None:
            self._shared.place(places, f"{prefix}.{names.shared}", names)

    def finish_loading(self, ops: Ops) -> None:
        self._router.finish_loading(ops)
        if self._shared is not None:
            self._shared.finish_loading(ops)
        weights = ExpertWeights(gate_up=self._gate_up.take(), down=self._down.take(), held=self.config.held, num_experts=self.config.router.num_experts)
        self._experts = ops.prepare_experts(weights, self._make.dtype)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        routing = self._router(x)
        return self._experts(x, routing, None if self._shared is None else self._shared(x))


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class _Router:
    def __init__(self, make: Maker, hidden_size: int, config: ExpertsConfig) -> None:
        self._ops = make.ops
        self._router = config.router
        self._linear = None if config.in_float32 else make.linear(config.router.num_experts, hidden_size, bias=False)
        self._weight = None
        if self._linear is None:
            self._weight = torch.empty(config.router.num_experts, hidden_size, dtype=torch.float32, device=make.device)
        self._correction = None
        if config.corrected:
            self._correction = torch.empty(config.router.num_experts, dtype=torch.float32, device=make.device)

    def place(self, places: Places, name: str) -> None:
        if self._linear is not None:
            self._linear.place(places, (name, self._router.num_experts, Cut.WHOLE))
        if self._weight is not None:
            places[f"{name}.weight"] = Place.whole(self._weight)
        if self._correction is not None:
            places[f"{name}.e_score_correction_bias"] = Place.whole(self._correction)

    def finish_loading(self, ops: Ops) -> None:
        if self._linear is not None:
            self._linear.finish_loading(ops)

    def __call__(self, x: torch.Tensor) -> Routing:
        if self._weight is not None:
            logits = F.linear(x.float(), self._weight)
        else:
            assert self._linear is not None
            logits = self._linear(x)
        return self._ops.route(logits, self._router, self._correction)


class _SharedExpert:
    """What every token goes to: a gated MLP, as much of it as a gate of its own lets through."""

    def __init__(self, make: Maker, hidden_size: int, config: ExpertsConfig) -> None:
        size = config.shared_size
        self._size, self._hidden_size = size, hidden_size
        self._gate_up = make.linear(2 * size, hidden_size, bias=False, gated=True)
        self._down = make.linear(hidden_size, size, bias=False)
        self._gate = make.linear(1, hidden_size, bias=False) if config.shared_gated else None

    def place(self, places: Places, name: str, names: ExpertNames) -> None:
        size = self._size
        self._gate_up.place(places, (f"{name}.{names.gate}", size, Cut.FEATURES), (f"{name}.{names.up}", size, Cut.FEATURES))
        self._down.place(places, (f"{name}.{names.down}", self._hidden_size, Cut.FROM_FEATURES))
        if self._gate is not None:
            self._gate.place(places, (f"{name}_gate", 1, Cut.WHOLE))

    def finish_loading(self, ops: Ops) -> None:
        for linear in self._linears:
            linear.finish_loading(ops)

    def __call__(self, x: torch.Tensor) -> Beside:
        return Beside(self._down(self._gate_up(x)), None if self._gate is None else self._gate(x))

    @property
    def _linears(self) -> Sequence[LinearLayer]:
        return (self._gate_up, self._down) if self._gate is None else (self._gate_up, self._down, self._gate)


class _ExpertLinear:
    """A product of every expert held here: dense in one tensor, or quantized, each by itself."""

    def __init__(self, make: Maker, num_held: int, rows: int, cols: int) -> None:
        self.rows = rows
        self._make = make
        self._shape = (num_held, rows, cols)
        self._dense: torch.Tensor | None = None

    def place(self, places: Places, held: int | None, *layers: tuple[str, int, Cut]) -> None:
        """Registers the checkpoint's layers (name, rows, cut) that expert `held` consists of, in order; None: another rank's."""
        if self._dense is None:
            self._dense = self._make.empty(*self._shape)
        start = 0
        for name, rows, cut in layers:
            place = Place.whole(self._dense.new_empty(0, self._shape[2]) if held is None else self._dense[held, start : start + rows], cut)
            places[f"{name}.weight"] = place if held is not None else Place(place.tensor, (rows, self._shape[2]), (0, 0))
            start += rows
        assert start == self.rows

    def take(self) -> torch.Tensor | Sequence[QuantizedWeight]:
        """Returns the weights, and lets go of them."""
        dense, self._dense = self._dense, None
        assert dense is not None
        return dense
