"""Mixtures of experts in torch: which experts a token goes to, and the weighted sum of what they make of it.

    logits [T, E] ─ route ─ the best k experts of each token, and their weights ─ experts ─ [T, H]

What the CPU runs, and the oracle of the GPU's kernels (triton_experts.py). A pair is a token and one of its k experts; pair p belongs to
token p // k. An expert is a gated MLP: down(silu(gate) · up), or with a ClampedGate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
import torch.nn.functional as F

from twostep.model.kernels.quantized_weight import QuantizedWeight, multiply_dense


class Scores(Enum):
    """What a router makes of its logits."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"  # of each
    CHOSEN = "softmax of the chosen"  # the logits choose; over the chosen alone


class GroupScore(Enum):
    """By what groups of experts are compared."""

    LARGEST = "largest"
    BEST_TWO = "sum of the best two"


# Odd, of 32 bits: products keep all bits, and mix them.
HASH_FACTORS = (-1640531527, -2048144777, -1028477379)
# Nothing but zeros is that small: a sum of scores is no zero then.
_TINY = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouter:
    """How a token's experts are chosen from its logits.

    renormalize   the weights of the chosen add up to 1, before `scale` multiplies them
    scattered     made-up weights: choices as good as random, by a hash of a token's logits, since these would be much the same for all
    num_groups    experts lie in so many groups of one size, of which the best `top_groups` are looked at; 1: all experts are
    num_shared    experts behind these to which every token goes as well, with weight 1, or as far as a gate lets it
    """

    num_experts: int
    top_k: int
    scores: Scores = Scores.SOFTMAX
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = GroupScore.LARGEST
    scattered: bool = False
    num_shared: int = 0

    def __post_init__(self) -> None:
        assert self.num_experts % self.num_groups == 0
        assert 1 <= self.top_groups <= self.num_groups
        assert 1 <= self.top_k <= self.num_experts // self.num_groups * self.top_groups


@dataclass(frozen=True, slots=True)
class Routing:
    """experts  int32 [T, k], of all ranks'
    weights  float32 [T, k]
    """

    experts: torch.Tensor
    weights: torch.Tensor


def route(
    logits: torch.Tensor,
    router: ExpertRouter,
    correction: torch.Tensor | None = None,
    load: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> Routing:
    """Chooses experts.

    logits      [T, E], or float32 [parts, T, E], whose sum they are
    correction  float32 [E], added to the scores for the choice, and not for the weights
    load        int64 [E]: how many tokens each expert has had so far, to which these are added
    gate        [T, 1]: its sigmoid is the weight of the shared experts; None: 1 is
    """
    x = logits.float() if logits.dim() == 2 else logits.sum(0)
    scores = x.softmax(-1) if router.scores is Scores.SOFTMAX else x.sigmoid() if router.scores is Scores.SIGMOID else x
    choice = scores if correction is None else scores + correction
    if router.scattered:
        choice = _hashes(x)
    if router.num_groups > 1:
        groups = choice.unflatten(-1, (router.num_groups, -1))
        best = groups.amax(-1) if router.group_score is GroupScore.LARGEST else groups.topk(2, -1).values.sum(-1)
        out = torch.ones_like(best, dtype=torch.bool).scatter_(-1, best.topk(router.top_groups, -1).indices, False)
        choice = groups.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)
    experts = choice.topk(router.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if load is not None:
        load.add_(experts.flatten().bincount(minlength=router.num_experts))
    if router.scores is Scores.CHOSEN:
        weights = weights.softmax(-1)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    weights = weights * router.scale
    if router.num_shared:
        shared = router.num_experts + torch.arange(router.num_shared, device=x.device)
        experts = torch.cat((experts, shared.expand(len(x), -1)), 1)
        shared_weights = x.new_ones(len(x), 1) if gate is None else gate.float().sigmoid()
        weights = torch.cat((weights, shared_weights.expand(-1, router.num_shared)), 1)
    return Routing(experts.int(), weights)


def _hashes(logits: torch.Tensor) -> torch.Tensor:
    """Numbers [T, E] that depend on all of a token's logits, float32 [T, E], and are nothing like them."""
    expert = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    digits = logits.view(torch.int32)
    digits = (digits ^ (digits >> 16)) * (2 * expert + 1)
    bits = digits.sum(-1, keepdim=True).int() ^ (expert * HASH_FACTORS[0])
    for factor in HASH_FACTORS:
        bits = (bits ^ (bits >> 15)) * factor
    return bits.float()


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """(up + 1) · gate · sigmoid(alpha · gate), gate at most `limit` and up within it (gpt-oss)."""

    alpha: float
    limit: float


def apply_gate(gate_up: torch.Tensor, clamped: ClampedGate | None) -> torch.Tensor:
    """[T, F] from [T, 2 * F], gates first. None: silu(gate) · up."""
    gate, up = gate_up.chunk(2, -1)
    if clamped is None:
        return F.silu(gate) * up
    gate = gate.clamp(max=clamped.limit)
    return (up.clamp(-clamped.limit, clamped.limit) + 1) * gate * (gate * clamped.alpha).sigmoid()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """Weights of the experts that are held here: all of a layer, or those of one of several ranks.

    gate_up  dense [E, 2 * F, H], of each expert the gates' rows first; or of each a quantized weight, all of one format
    down     dense [E, H, F], or likewise
    biases   of both products, [E, 2 * F] and [E, H]; None: there are none
    """

    gate_up: torch.Tensor | Sequence[QuantizedWeight]
    down: torch.Tensor | Sequence[QuantizedWeight]
    held: range
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    clamped: ClampedGate | None = None

    def __post_init__(self) -> None:
        assert len(self.held) == len(self.gate_up) == len(self.down)

    @property
    def kind(self) -> tuple[object, ...]:
        """What kernels are chosen by: weights of the same kind are multiplied alike."""
        forms = (form for weights in (self.gate_up, self.down) for form in _form(weights))
        return len(self.held), self.biases is None, self.clamped, *forms


def _form(weights: torch.Tensor | Sequence[QuantizedWeight]) -> tuple[object, ...]:
    if isinstance(weights, torch.Tensor):
        return tuple(weights.shape[1:]), weights.dtype
    if not weights:
        return ()
    one = weights[0]
    how = None if one.activations is None else one.activations.how
    return one.shape, one.values.dtype, one.group, one.block_rows, one.zeros is None, one.float4, how


@dataclass(frozen=True, slots=True)
class Beside:
    """What is added to the experts' sum: a term [T, H], times sigmoid of a gate [T, 1] where there is one."""

    term: torch.Tensor
    gate: torch.Tensor | None

    def __call__(self) -> torch.Tensor:
        return self.term if self.gate is None else self.gate.sigmoid() * self.term


class Experts(Protocol):
    """The experts that are held here, whatever layout the device likes best."""

    @property
    def enter(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Gives x as it is, from what the norm gave: by it a device knows that experts come next."""
        ...

    def __call__(self, x: torch.Tensor, routing: Routing, beside: Beside | None = None) -> torch.Tensor:
        """[T, H] from x [T, H]: of each token the weighted sum of its experts that are held here, and what stands beside them."""
        ...

    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The same with nothing beside them; or, where that is faster, float32 [parts, T, H], whose sum it is."""
        ...


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class ExpertLoop:
    """Experts one after the other, each with all its tokens at once. Experts without tokens cost nothing."""

    def __init__(self, experts: Sequence[Callable[[torch.Tensor], torch.Tensor]], held: range) -> None:
        self._experts = experts
        self._held = held
        self.enter = as_it_is

    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self(x, routing)

    def __call__(self, x: torch.Tensor, routing: Routing, beside: Beside | None = None) -> torch.Tensor:
        top_k = routing.experts.shape[1]
        chosen = routing.experts.flatten()
        # Pairs by expert, and by token within each: sums are in the same order every time.
        order = chosen.argsort(stable=True)
        tokens, weights = order // top_k, routing.weights.flatten()[order].unsqueeze(1)
        counts = chosen.bincount().tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for number, count in enumerate(counts):
            if count and number in self._held:
                some = slice(start, start + count)
                y = self._experts[number - self._held.start](x[tokens[some]])
                out.index_add_(0, tokens[some], y.float() * weights[some])
            start += count
        return out.to(x.dtype) if beside is None else out.add_(beside()).to(x.dtype)


class EveryExpert:
    """Experts one after the other, each with all tokens: looks at nothing that was chosen, so that a device need not be waited for, and
    costs as much as all experts do."""

    def __init__(self, weights: ExpertWeights) -> None:
        self._weights = weights
        self.enter = as_it_is

    def __call__(self, x: torch.Tensor, routing: Routing, beside: Beside | None = None) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        weights = self._weights
        for held, (gate_up, down) in enumerate(zip(weights.gate_up, weights.down, strict=True)):
            chosen = routing.experts == weights.held[held]
            weight = torch.where(chosen, routing.weights, 0.0).sum(-1, keepdim=True)
            biases = (None, None) if weights.biases is None else (weights.biases[0][held], weights.biases[1][held])
            y = _multiply(down, apply_gate(_multiply(gate_up, x, biases[0]), weights.clamped), biases[1]).float()
            out += torch.where(chosen.any(-1, keepdim=True), y * weight, 0.0)
        return out.to(x.dtype) if beside is None else out.add_(beside()).to(x.dtype)

    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self(x, routing)


def _multiply(weight: torch.Tensor | QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return multiply_dense(weight, x, bias) if isinstance(weight, QuantizedWeight) else F.linear(x, weight, bias)
