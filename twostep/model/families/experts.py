"""The MLP of a mixture of experts: a router sends each token to the best few of many gated MLPs, and their weighted sum is what it gives.

    x ─┬─ gate ─ route ─┐
       ├────────────── experts ─ + ─→
       └─ shared expert (× sigmoid of its gate) ─┘

A shared expert as large as some of the others is as many of them, to which every token goes, where the device multiplies them together.

A family says how many there are and how they are chosen (ExpertsConfig, of config.json), which of its layers have them, and what its
checkpoint calls them (ExpertNames). DeepSeek-V3's, for example:

    ExpertsConfig(
        router=ExpertRouter(num_experts=256, top_k=8, scores=Scores.SIGMOID, renormalize=True, scale=2.5, num_groups=8, top_groups=4,
                      group_score=GroupScore.BEST_TWO),
        intermediate_size=2048, shared_size=2048, corrected=True, in_float32=True, layers=(False,) * 3 + (True,) * 58)
    ExpertsMlp(config, make, ExpertNames(shared="shared_experts"))

V2: Scores.SOFTMAX, GroupScore.LARGEST, neither renormalized nor corrected.

Ranks of a tensor-parallel model hold a part of every expert, or whole experts each (`held`); either way a rank's result is one term of
the sum that a dense MLP's is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from twostep.checkpoint.fields import Fields
from twostep.checkpoint.linear_format import LinearFormat
from twostep.errors import SetupError
from twostep.model.families.config import MAX_EXPERTS, ExpertsConfig, ModelConfig
from twostep.model.families.fused import Fused
from twostep.model.families.mlp import GatedMlp
from twostep.model.families.modules import Cut, Maker, Place, Places, place_quantized
from twostep.model.families.quantized_part import QuantizedPart, by_rows, joined
from twostep.model.kernels.experts import Beside, ExpertRouter, Experts, ExpertWeights, Routing
from twostep.model.kernels.ops import Linear, LinearInParts, Ops
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
    # Where gates and what they gate are one layer, by turns, and weights lie the other way round.
    gate_up: str = ""


class ExpertsMlp(LinearInParts):
    """One layer's Mlp (mlp.py). `enter` leaves the tokens as they are; `leave`, the part itself, does everything."""

    def __init__(self, config: ModelConfig, make: Maker, names: ExpertNames) -> None:
        assert config.experts is not None
        experts = self._config = config.experts
        self._hidden_size = config.hidden_size
        self._names = names
        self._dtype = make.dtype
        # Tokens that each expert has had, for whoever wants to know (expert_load.py).
        self.load = torch.zeros(experts.router.num_experts, dtype=torch.int64, device=make.device)
        held, size = len(experts.held), experts.intermediate_size
        self._router = _Router(make, config.hidden_size, experts)
        how = {"bias": experts.biased, "turned": bool(names.gate_up)}
        self._gate_up = _ExpertLinear(make, held, 2 * size, config.hidden_size, **how)
        self._down = _ExpertLinear(make, held, config.hidden_size, size, **how)
        projections = names.gate, names.up, names.down
        self._shared = GatedMlp(config, make, features=experts.shared_size, names=projections) if experts.shared_size else None
        self._quantization = make.quantization
        # Of the size of one expert, where shared ones may be some more of them: known when they are placed.
        self._num_joined = 0
        same = held == experts.router.num_experts and not experts.biased and not names.gate_up and experts.shared_size % size == 0
        self._may_join = make.ops.joins_shared_experts and same
        self._shared_gate = _dense(make).linear(1, config.hidden_size, bias=False) if experts.shared_gated else None
        self._experts: Experts

    @property
    def enter(self) -> Linear:
        return self._experts.enter

    @property
    def leave(self) -> Linear:
        return self

    def place(self, places: Places, name: str) -> None:
        config, names = self._config, self._names
        size = config.intermediate_size
        cut, from_cut = (Cut.WHOLE, Cut.WHOLE) if config.whole else (Cut.FEATURES, Cut.FROM_FEATURES)
        self._router.place(places, f"{name}.{names.router}")
        if self._joins(name):
            self._num_joined = config.shared_size // size
            self._gate_up.add(self._num_joined)
            self._down.add(self._num_joined)
        for number in range(config.router.num_experts):
            expert = f"{name}.{names.experts}.{number}"
            # Whole experts of other ranks are known, and take nothing.
            held = number - config.held.start if number in config.held else None
            if names.gate_up:
                self._gate_up.place(places, held, (f"{expert}.{names.gate_up}", 2 * size, cut))
            else:
                self._gate_up.place(places, held, (f"{expert}.{names.gate}", size, cut), (f"{expert}.{names.up}", size, cut))
            self._down.place(places, held, (f"{expert}.{names.down}", self._hidden_size, from_cut))
        if self._shared is not None and self._num_joined == 1:
            shared, held = f"{name}.{names.shared}", config.router.num_experts
            self._gate_up.place(places, held, (f"{shared}.{names.gate}", size, cut), (f"{shared}.{names.up}", size, cut))
            self._down.place(places, held, (f"{shared}.{names.down}", self._hidden_size, from_cut))
            self._shared = None
        elif self._shared is not None:
            self._shared.place(places, f"{name}.{names.shared}")
        if self._shared_gate is not None:
            self._shared_gate.place(places, (f"{name}.{names.shared}_gate", 1, Cut.WHOLE))

    def _joins(self, name: str) -> bool:
        """Returns whether the shared expert becomes some of the others: of several that are one in the checkpoint, dense ones do, since a
        row of their input is rounded as a whole."""
        if self._shared is None or not self._may_join:
            return False
        if self._quantization is None:
            return True
        names, formats = self._names, list[set[object]]()
        for of in (f"{names.experts}.0", names.shared):
            formats.append({self._quantization.format_of(f"{name}.{of}.{each}") for each in (names.gate, names.up, names.down)})
        is_one = self._config.shared_size == self._config.intermediate_size
        return formats[0] == formats[1] and len(formats[0]) == 1 and (is_one or formats[0] == {None})

    def finish_loading(self, ops: Ops) -> None:
        gate_up, gate_up_bias, down = self._gate_up.take(), self._gate_up.bias, self._down.take()
        if self._shared is not None and self._num_joined:
            assert isinstance(gate_up, torch.Tensor)
            assert isinstance(down, torch.Tensor)
            _fill_last(gate_up, down, *self._shared.take_dense())
            self._shared = None
        for part in (self._router, self._shared, self._shared_gate):
            if part is not None:
                part.finish_loading(ops)
        if self._names.gate_up:
            gate_up, gate_up_bias = _gates_first(gate_up), None if gate_up_bias is None else _by_turns(gate_up_bias)
        biases = None if gate_up_bias is None or self._down.bias is None else (gate_up_bias, self._down.bias)
        held = self._config.held
        weights = ExpertWeights(
            gate_up=gate_up, down=down, held=range(held.start, held.stop + self._num_joined), biases=biases, clamped=self._config.clamped
        )
        router = self._router.router = replace(self._config.router, num_shared=self._num_joined)
        self._experts = ops.prepare_experts(weights, router, self._dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate = None if self._shared_gate is None else self._shared_gate(x)
        if self._shared is None:
            return self._experts(x, self._router(x, self.load, gate))
        beside = Beside(self._shared.leave(self._shared.enter(x)), gate)
        return self._experts(x, self._router(x, self.load), beside)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        if self._shared is not None:
            return self(x)
        gate = None if self._shared_gate is None else self._shared_gate(x)
        return self._experts.parts(x, self._router(x, self.load, gate))


def _fill_last(gate_up: torch.Tensor, down: torch.Tensor, shared_gate_up: torch.Tensor, shared_down: torch.Tensor) -> None:
    """Makes experts of one MLP that is as large as several: each takes its part of what lies between the two products.

    gate_up, down   [E, 2 * F, H] and [E, H, F], of which the last are filled
    shared_gate_up  [2 * n * F, H], gates first; shared_down [H, n * F]
    """
    features = down.shape[2]
    count = shared_down.shape[1] // features
    parts = shared_gate_up.view(2, count, features, -1).transpose(0, 1)
    gate_up[-count:].view(count, 2, features, -1).copy_(parts)
    down[-count:].copy_(shared_down.view(-1, count, features).transpose(0, 1))


def _by_turns(rows: torch.Tensor) -> torch.Tensor:
    """[E, 2 * F, ...] of gates and what they gate by turns, all gates first."""
    gates, others = rows[:, ::2], rows[:, 1::2]
    return torch.cat((gates, others), 1)


def _gates_first(weights: torch.Tensor | Sequence[QuantizedWeight]) -> torch.Tensor | Sequence[QuantizedWeight]:
    if isinstance(weights, torch.Tensor):
        return _by_turns(weights)

    def of_rows(each: torch.Tensor) -> torch.Tensor:
        # float8 has no gather on some devices.
        return _by_turns(each.view(torch.uint8 if each.itemsize == 1 else each.dtype)[None])[0].view(each.dtype)

    return [
        replace(
            weight,
            values=of_rows(weight.values),
            scales=of_rows(weight.scales),
            zeros=None if weight.zeros is None else of_rows(weight.zeros),
        )
        for weight in map(by_rows, weights)
    ]


def _dense(make: Maker) -> Maker:
    """For what no checkpoint quantizes, whether or not its config says so: it is small, and decides between experts that are close."""
    return replace(make, quantization=None)


class _Router:
    def __init__(self, make: Maker, hidden_size: int, config: ExpertsConfig) -> None:
        self._ops = make.ops
        self._dtype = make.dtype
        self._exact: Linear
        self.router = config.router
        self._linear = None if config.in_float32 else _dense(make).linear(config.router.num_experts, hidden_size, bias=config.biased)
        self._weight = None
        if self._linear is None:
            self._weight = torch.empty(config.router.num_experts, hidden_size, dtype=torch.float32, device=make.device)
        self._correction = None
        if config.corrected:
            self._correction = torch.empty(config.router.num_experts, dtype=torch.float32, device=make.device)

    def place(self, places: Places, name: str) -> None:
        if self._linear is not None:
            self._linear.place(places, (name, self.router.num_experts, Cut.WHOLE))
        if self._weight is not None:
            places[f"{name}.weight"] = Place.whole(self._weight)
        if self._correction is not None:
            places[f"{name}.e_score_correction_bias"] = Place.whole(self._correction)

    def finish_loading(self, ops: Ops) -> None:
        if self._linear is not None:
            self._linear.finish_loading(ops)
        if self._weight is not None:
            self._exact = ops.prepare_exact(self._weight, self._dtype)

    def __call__(self, x: torch.Tensor, load: torch.Tensor, gate: torch.Tensor | None = None) -> Routing:
        """`gate` [T, 1]: of the experts that are shared."""
        if self._weight is not None:
            logits = self._exact(x)
        else:
            assert self._linear is not None
            run = self._linear.run
            logits = run.parts(x) if isinstance(run, LinearInParts) else run(x)
        return self._ops.route(logits, self.router, self._correction, load, gate)


class _ExpertLinear:
    """A product of every expert held here: dense in one tensor, or quantized, each by itself, all in one format."""

    def __init__(self, make: Maker, num_held: int, rows: int, cols: int, *, bias: bool = False, turned: bool = False) -> None:
        """`turned`: dense weights lie as [in, out] in the checkpoint."""
        self.bias = make.empty(num_held, rows) if bias else None
        self._turned = turned
        self._make = make
        self._shape = (num_held, rows, cols)
        self._dense: torch.Tensor | None = None
        # Of each held expert, the checkpoint's layers; and of all experts.
        self._parts: list[list[QuantizedPart]] = []
        self._all_parts: list[QuantizedPart] = []
        self._format: LinearFormat | None = None

    def add(self, count: int) -> None:
        """Makes room for so many experts more, before any is placed."""
        assert self._dense is None
        num_held, *rest = self._shape
        self._shape = (num_held + count, rest[0], rest[1])

    def place(self, places: Places, held: int | None, *layers: tuple[str, int, Cut]) -> None:
        """Registers the checkpoint's layers (name, rows, cut) of the next expert, in order; `held`: which of those here it is; None:
        another rank's. Raises SetupError if its format is not the other experts'."""
        make, cols, start = self._make, self._shape[2], 0
        formats = {None if make.quantization is None else make.quantization.format_of(name) for name, _, _ in layers}
        is_first = self._dense is None and not self._all_parts
        if len(formats) > 1 or not (is_first or formats == {self._format}):
            raise SetupError(f"{layers[0][0]} is not quantized as the other experts of its layer are; quantize all of them alike")
        (self._format,) = formats
        if self._format is None and is_first:
            self._dense = make.empty(*self._shape)
        parts = []
        is_stored = make.quantization is not None and make.quantization.stored and self._format is not None
        for name, rows, cut in layers:
            fused = Fused(name, 0, rows, rows, turned=True) if self._turned and not is_stored else None
            if self._dense is None:
                assert self._format is not None
                taken = held is not None
                parts.append(place_quantized(make, places, name, self._format, (rows, cols), cut, taken=taken, fused=fused))
            elif held is None:
                places[f"{name}.weight"] = Place(self._dense.new_empty(0, cols), (rows, cols), (0, 0), fused=fused)
            else:
                places[f"{name}.weight"] = Place.whole(self._dense[held, start : start + rows], cut, fused=fused)
            if self.bias is not None:
                of_rank = self.bias.new_empty(0) if held is None else self.bias[held, start : start + rows]
                places[f"{name}.bias"] = Place(of_rank, (rows,), (0,), cut if held is not None else Cut.WHOLE)
            start += rows
        assert start == self._shape[1]
        self._all_parts += parts
        if held is not None and parts:
            self._parts.append(parts)

    def take(self) -> torch.Tensor | Sequence[QuantizedWeight]:
        """Returns the weights, and lets go of them. Where each expert has a static scale of its input, the largest is everyone's, as in
        vLLM. Waits for the device."""
        dense, self._dense = self._dense, None
        if dense is not None:
            return dense
        scales = [part.activations.scale for part in self._all_parts if part.activations is not None and part.activations.scale is not None]
        largest = torch.stack(scales).amax(0) if scales else None
        for scale in scales:
            assert largest is not None
            scale.copy_(largest)
        experts, self._parts, self._all_parts = self._parts, [], []
        loaded = [joined([part.take() for part in parts]) for parts in experts]
        whole = [each[0].weight for each in loaded if len(each) == 1]
        weights = [weight for weight in whole if isinstance(weight, QuantizedWeight)]
        forms = {(weight.values.dtype, weight.group, weight.block_rows, weight.float4) for weight in weights}
        if len(weights) == len(loaded) and len(forms) <= 1:
            return weights
        # Columns in no order, or groups that a rank's part cuts too small.
        if any(each.activations is not None for parts in loaded for each in parts):
            raise SetupError("these experts cannot be made dense, since their inputs are quantized; use another quantization of the model")
        return torch.stack([torch.cat([self._as_dense(each.weight) for each in parts]) for parts in loaded])

    def _as_dense(self, weight: QuantizedWeight | torch.Tensor) -> torch.Tensor:
        return weight if isinstance(weight, torch.Tensor) else weight.dequantize(self._make.dtype)


def parse_router(fields: Fields, key: str, *, renormalize: bool) -> ExpertRouter:
    """Takes how many experts there are (`key`) and each token goes to, chosen by softmax, and what only training asks of a router."""
    for of_training in ("output_router_logits", "router_aux_loss_coef"):
        fields.take(of_training, None)
    num_experts = fields.positive_int(key, MAX_EXPERTS)
    top_k = fields.positive_int("num_experts_per_tok", MAX_EXPERTS)
    if top_k > num_experts:
        fields.refuse("num_experts_per_tok", top_k, f"it must not be more than {key} ({num_experts})")
    return ExpertRouter(num_experts=num_experts, top_k=top_k, renormalize=renormalize)
