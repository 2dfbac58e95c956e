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
    ExpertsMlp(config, make, ExpertNames(shared="shared_experts"))

V2: Scores.SOFTMAX, GroupScore.LARGEST, neither renormalized nor corrected.

Ranks of a tensor-parallel model hold a part of every expert, or whole experts each (`held`); either way a rank's result is one term of
the sum that a dense MLP's is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from twostep.checkpoint.fields import Fields
from twostep.model.families.config import MAX_EXPERTS, ExpertsConfig, ModelConfig
from twostep.model.families.mlp import GatedMlp
from twostep.model.families.modules import Cut, Maker, Place, Places
from twostep.model.kernels.experts import Beside, Experts, ExpertWeights, Router, Routing
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
    """One layer's Mlp (mlp.py). `enter` leaves the tokens as they are; `leave` does everything."""

    def __init__(self, config: ModelConfig, make: Maker, names: ExpertNames) -> None:
        assert config.experts is not None
        experts = self._config = config.experts
        self._hidden_size = config.hidden_size
        self._names = names
        self._dtype = make.dtype
        held, size = len(experts.held), experts.intermediate_size
        self._router = _Router(make, config.hidden_size, experts)
        self._gate_up = _ExpertLinear(make, held, 2 * size, config.hidden_size)
        self._down = _ExpertLinear(make, held, config.hidden_size, size)
        projections = names.gate, names.up, names.down
        self._shared = GatedMlp(config, make, features=experts.shared_size, names=projections) if experts.shared_size else None
        self._shared_gate = make.linear(1, config.hidden_size, bias=False) if experts.shared_gated else None
        self._experts: Experts

    @property
    def enter(self) -> Linear:
        return _as_it_is

    @property
    def leave(self) -> Linear:
        return self._run

    def place(self, places: Places, name: str) -> None:
        config, names = self._config, self._names
        size = config.intermediate_size
        cut, from_cut = (Cut.WHOLE, Cut.WHOLE) if config.whole else (Cut.FEATURES, Cut.FROM_FEATURES)
        self._router.place(places, f"{name}.{names.router}")
        for number in range(config.router.num_experts):
            expert = f"{name}.{names.experts}.{number}"
            # Whole experts of other ranks are known, and take nothing.
            held = number - config.held.start if number in config.held else None
            self._gate_up.place(places, held, (f"{expert}.{names.gate}", size, cut), (f"{expert}.{names.up}", size, cut))
            self._down.place(places, held, (f"{expert}.{names.down}", self._hidden_size, from_cut))
        if self._shared is not None:
            self._shared.place(places, f"{name}.{names.shared}")
        if self._shared_gate is not None:
            self._shared_gate.place(places, (f"{name}.{names.shared}_gate", 1, Cut.WHOLE))

    def finish_loading(self, ops: Ops) -> None:
        for part in (self._router, self._shared, self._shared_gate):
            if part is not None:
                part.finish_loading(ops)
        weights = ExpertWeights(
            gate_up=self._gate_up.take(),
            down=self._down.take(),
            held=self._config.held,
            num_experts=self._config.router.num_experts,
        )
        self._experts = ops.prepare_experts(weights, self._dtype)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        beside = None
        if self._shared is not None:
            term = self._shared.leave(self._shared.enter(x))
            beside = Beside(term, None if self._shared_gate is None else self._shared_gate(x))
        return self._experts(x, self._router(x), beside)


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


def parse_router(fields: Fields, key: str, *, renormalize: bool) -> Router:
    """Takes how many experts there are (`key`) and each token goes to, chosen by softmax, and what only training asks of a router."""
    for of_training in ("output_router_logits", "router_aux_loss_coef"):
        fields.take(of_training, None)
    num_experts = fields.positive_int(key, MAX_EXPERTS)
    top_k = fields.positive_int("num_experts_per_tok", MAX_EXPERTS)
    if top_k > num_experts:
        fields.refuse("num_experts_per_tok", top_k, f"it must not be more than {key} ({num_experts})")
    return Router(num_experts=num_experts, top_k=top_k, renormalize=renormalize)
