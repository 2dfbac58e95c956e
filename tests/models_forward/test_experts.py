"""Which experts a token goes to, beside transformers' routers, and what they make of it, beside every expert of every token in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from twostep.model.kernels.experts import Beside, EveryExpert, ExpertRouter, ExpertWeights, GroupScore, Routing, Scores, route
from twostep.model.kernels.ops import Ops
from twostep.model.step.expert_load import ExpertLoadMeter

HIDDEN = 12
DEEPSEEK = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "n_routed_experts": 20,
    "num_experts_per_tok": 5,
    "n_group": 5,
    "topk_group": 2,
}

# (transformers' router, its config, ours)
ROUTERS: dict[str, tuple[Any, Any, ExpertRouter]] = {
    "mixtral": (
        MixtralTopKRouter,
        transformers.MixtralConfig(hidden_size=HIDDEN, num_local_experts=7, num_experts_per_tok=3),
        ExpertRouter(num_experts=7, top_k=3, renormalize=True),
    ),
    "qwen3_moe": (
        Qwen3MoeTopKRouter,
        transformers.Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=9, num_experts_per_tok=4, norm_topk_prob=False),
        ExpertRouter(num_experts=9, top_k=4),
    ),
    "gpt_oss": (
        GptOssTopKRouter,
        transformers.GptOssConfig(hidden_size=HIDDEN, num_local_experts=6, num_experts_per_tok=4),
        ExpertRouter(num_experts=6, top_k=4, scores=Scores.CHOSEN),
    ),
    "deepseek_v2": (
        DeepseekV2TopkRouter,
        transformers.DeepseekV2Config(**DEEPSEEK, topk_method="group_limited_greedy", routed_scaling_factor=16.0),
        ExpertRouter(num_experts=20, top_k=5, scale=16.0, num_groups=5, top_groups=2),
    ),
    "deepseek_v2-greedy": (
        DeepseekV2TopkRouter,
        transformers.DeepseekV2Config(**DEEPSEEK, topk_method="greedy"),
        ExpertRouter(num_experts=20, top_k=5),
    ),
    "deepseek_v3": (
        DeepseekV3TopkRouter,
        transformers.DeepseekV3Config(**DEEPSEEK, routed_scaling_factor=2.5),
        ExpertRouter(
            num_experts=20,
            top_k=5,
            scores=Scores.SIGMOID,
            renormalize=True,
            scale=2.5,
            num_groups=5,
            top_groups=2,
            group_score=GroupScore.BEST_TWO,
        ),
    ),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_token_goes_where_transformers_sends_it(name: str) -> None:
    kind, config, router = ROUTERS[name]
    torch.manual_seed(3)
    theirs = kind(config)
    correction = None
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
        if name == "deepseek_v3":
            correction = theirs.e_score_correction_bias.normal_()
        logits, weights, experts = theirs(torch.randn(40, HIDDEN))
    ours = route(logits, router, correction)
    torch.testing.assert_close(by_expert(ours, router), by_expert(Routing(experts, weights), router))


def test_made_up_weights_send_tokens_everywhere() -> None:
    """Tokens whose logits are nearly the same, in few digits."""
    logits = (torch.arange(16.0) + torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()
    assert route(logits, ExpertRouter(num_experts=16, top_k=4)).experts.unique().tolist() == [12, 13, 14, 15]
    chosen = route(logits, ExpertRouter(num_experts=16, top_k=4, scattered=True)).experts
    counts = chosen.flatten().bincount(minlength=16)
    assert counts.min() > 350
    assert counts.max() < 650
    assert len(chosen.sort(-1).values.unique(dim=0)) > 1000


def by_expert(routing: Routing, router: ExpertRouter) -> torch.Tensor:
    """Each token's weight of each expert: the order of the chosen says nothing."""
    spread = torch.zeros(len(routing.experts), router.num_experts)
    return spread.scatter(1, routing.experts.long(), routing.weights.float())


@given(tokens=st.integers(1, 9), num_experts=st.integers(1, 6), held=st.integers(0, 6), first=st.integers(0, 3), data=st.data())
def test_experts_that_are_held_add_up_their_tokens(tokens: int, num_experts: int, held: int, first: int, data: st.DataObject) -> None:
    held = min(held, max(0, num_experts - first))
    top_k, size = data.draw(st.integers(1, num_experts)), 6
    torch.manual_seed(tokens)
    gate_up, down = torch.randn(held, 2 * size, HIDDEN), torch.randn(held, HIDDEN, size)
    router = ExpertRouter(num_experts=num_experts, top_k=top_k)
    x, routing = torch.randn(tokens, HIDDEN), route(torch.randn(tokens, num_experts), router)
    beside = Beside(torch.randn(tokens, HIDDEN), torch.randn(tokens, 1)) if data.draw(st.booleans()) else None
    weights = ExpertWeights(gate_up=gate_up, down=down, held=range(first, first + held))
    want = torch.zeros(tokens, HIDDEN, dtype=torch.float64) if beside is None else (beside.gate.sigmoid() * beside.term).double()
    for token in range(tokens):
        for expert, weight in zip(routing.experts[token].tolist(), routing.weights[token].double(), strict=True):
            if first <= expert < first + held:
                gate, up = (gate_up[expert - first].double() @ x[token].double()).chunk(2)
                want[token] += weight * (down[expert - first].double() @ (F.silu(gate) * up))
    for sum_of in (Ops().prepare_experts(weights, router, torch.float32), EveryExpert(weights)):
        torch.testing.assert_close(sum_of(x, routing, beside).double(), want, rtol=1e-4, atol=1e-4)


def test_loads_are_counted_and_read_now_and_then() -> None:
    router = ExpertRouter(num_experts=4, top_k=1)
    loads = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
    meter = ExpertLoadMeter(loads, steps=2)
    even, uneven = torch.eye(4), torch.tensor([[9.0, 0, 0, 0], [9, 0, 0, 0], [9, 0, 0, 0], [0, 9, 0, 0]])
    seen = []
    for of_layers in ((even, even), (even, even), (even, uneven), (even, even), (uneven, even), (uneven, even)):
        for logits, load in zip(of_layers, loads, strict=True):
            Ops().route(logits, router, load=load)
        counts = meter.due()
        seen.append(None if counts is None else meter.imbalance(counts))
    assert seen == [None, 1.0, None, pytest.approx(4 / 2), None, pytest.approx(3.0)]
    assert ExpertLoadMeter([], steps=1).due() is None
