"""Routing, sorting and products of experts against torch, through Triton's interpreter on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pools import DEVICE, DTYPES, relative_limit, tolerance
from quantized_weights import FP8_GROUP, FP8_TOKEN, INT8_TOKEN, INT8_UNEVEN, random_weight

from twostep.model.kernels import experts as oracle
from twostep.model.kernels import triton_routing
from twostep.model.kernels.experts import Beside, ClampedGate, EveryExpert, ExpertRouter, ExpertWeights, GroupScore, Scores
from twostep.model.kernels.ops import Ops
from twostep.model.kernels.triton_expert_products import ExpertRowTile, ExpertTile, Pairs, multiply_rows, multiply_tiles
from twostep.model.kernels.triton_experts import TritonExperts, choose_tile, tile_tokens
from twostep.model.kernels.triton_ops import TritonOps

ROUTERS = [
    ExpertRouter(num_experts=7, top_k=3, renormalize=True),
    ExpertRouter(num_experts=16, top_k=5, scores=Scores.CHOSEN),
    ExpertRouter(num_experts=20, top_k=5, scale=16.0, num_groups=5, top_groups=2),
    ExpertRouter(
        num_experts=24,
        top_k=6,
        scores=Scores.SIGMOID,
        renormalize=True,
        scale=2.5,
        num_groups=8,
        top_groups=3,
        group_score=GroupScore.BEST_TWO,
    ),
    ExpertRouter(num_experts=1, top_k=1, scores=Scores.SIGMOID),
    ExpertRouter(num_experts=13, top_k=4, renormalize=True, scattered=True),
    ExpertRouter(num_experts=9, top_k=3, scores=Scores.CHOSEN, num_shared=1),
    ExpertRouter(num_experts=10, top_k=4, renormalize=True, scale=1.5, num_shared=3),
]


@pytest.mark.parametrize("router", ROUTERS)
def test_routes_as_torch_does(router: ExpertRouter) -> None:
    logits = torch.randn(9, router.num_experts, device=DEVICE)
    correction = torch.randn(router.num_experts, device=DEVICE) if router.scores is Scores.SIGMOID else None
    load = torch.full((router.num_experts,), 5, dtype=torch.int64, device=DEVICE)
    got, want = triton_routing.route(logits, router, correction, load), oracle.route(logits, router, correction)
    assert torch.equal(got.experts, want.experts)
    if router.num_shared:
        assert bool((got.experts[:, router.top_k :] == torch.arange(router.num_shared, device=DEVICE) + router.num_experts).all())
        assert bool((got.weights[:, router.top_k :] == 1).all())
        gate = torch.randn(9, 3, device=DEVICE)[:, 1:2]
        gated, want_gated = (route(logits, router, gate=gate) for route in (triton_routing.route, oracle.route))
        assert torch.equal(gated.experts, want.experts)
        torch.testing.assert_close(gated.weights, want_gated.weights)
        torch.testing.assert_close(gated.weights[:, router.top_k :], gate.sigmoid().expand(-1, router.num_shared))
    torch.testing.assert_close(got.weights, want.weights)
    # A sum that is still to be made.
    parts = torch.stack((logits * 0.25, logits * 0.75))
    again = triton_routing.route(parts, router, correction)
    assert torch.equal(again.experts, oracle.route(parts, router, correction).experts)
    if not router.scattered:
        torch.testing.assert_close(again.weights, want.weights)
    assert torch.equal(load - 5, want.experts[:, : router.top_k].flatten().bincount(minlength=router.num_experts))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_rows_of_no_numbers_point_to_experts_and_spoil_no_other() -> None:
    num_experts = 6
    router = ExpertRouter(num_experts=num_experts, top_k=3, num_groups=3, top_groups=2, renormalize=True)
    logits = torch.randn(4, num_experts, device=DEVICE)
    want = triton_routing.route(logits[1:], router)
    logits[0] = torch.nan
    got = triton_routing.route(logits, router)
    assert bool(((got.experts >= 0) & (got.experts < num_experts)).all())
    assert torch.equal(got.experts[1:], want.experts)
    assert torch.equal(got.weights[1:], want.weights)


@settings(max_examples=25)
@given(
    tokens=st.integers(0, 200),
    top_k=st.integers(1, 4),
    num_experts=st.integers(1, 12),
    spread=st.floats(0.1, 20.0),
    tile=st.sampled_from([4, 16]),
    bounds=st.tuples(st.integers(0, 12), st.integers(0, 12)),
)
def test_every_pair_that_is_held_is_in_one_tile_of_its_expert(
    tokens: int, top_k: int, num_experts: int, spread: float, tile: int, bounds: tuple[int, int]
) -> None:
    # From all to one expert to some for each.
    chosen = (torch.rand(tokens, top_k) ** spread * num_experts).int()
    held = range(min(bounds), max(bounds))
    tiles = triton_routing.sort_by_expert(chosen.to(DEVICE), held, tile)
    flat, found = chosen.flatten().tolist(), []
    for pairs, expert in zip(tiles.pairs.view(-1, tile).tolist(), tiles.experts.tolist(), strict=True):
        assert -1 <= expert < len(held)
        if expert >= 0:
            real = [pair for pair in pairs if pair != len(flat)]
            assert real
            assert pairs == real + [len(flat)] * (tile - len(real))
            assert all(flat[pair] == held.start + expert for pair in real)
            found += real
    assert sorted(found) == [pair for pair, expert in enumerate(flat) if expert in held]


def test_many_pairs_are_sorted_some_at_a_time() -> None:
    chosen = torch.randint(0, 3, (4100, 1), dtype=torch.int32, device=DEVICE)
    tiles = triton_routing.sort_by_expert(chosen, range(3), 64)
    pairs = tiles.pairs.view(-1, 64)
    for expert in range(3):
        mine = pairs[tiles.experts == expert].flatten()
        assert torch.equal(mine[mine < 4100].long(), (chosen[:, 0] == expert).nonzero()[:, 0])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_terms_are_added_up(gated: bool, beside: bool) -> None:
    chosen = torch.randint(0, 6, (5, 3), dtype=torch.int32, device=DEVICE)
    held = range(1, 4)
    terms = torch.randn(15, 1030, device=DEVICE)
    is_held = ((chosen >= 1) & (chosen < 4)).flatten()
    terms[~is_held] = torch.nan
    what = Beside(torch.randn(5, 1040, device=DEVICE)[:, :1030], torch.randn(5, 1, device=DEVICE) if gated else None) if beside else None
    want = torch.where(is_held[:, None], terms, 0).double().view(5, 3, -1).sum(1) + (0 if what is None else what().double())
    got = triton_routing.add_up(terms, chosen, held, what, torch.float32)
    torch.testing.assert_close(got.double(), want, **tolerance(torch.float32))


def expected(pairs: Pairs, weight: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """In float64, [T * k, N]; NaN for what is not held."""
    num_out = weight.shape[1] // (1 + gated)
    want = torch.full((pairs.chosen.numel(), num_out), torch.nan, dtype=torch.float64, device=DEVICE)
    for pair, expert in enumerate(pairs.chosen.flatten().tolist()):
        if expert in pairs.held:
            y = weight[expert - pairs.held.start].double() @ pairs.x[pair if pairs.of_pairs else pair // pairs.top_k].double()
            if gated:
                y = torch.nn.functional.silu(y[:num_out]) * y[num_out:]
            want[pair] = y * (1 if pairs.weights is None else pairs.weights.flatten()[pair].double())
    return want


def random_pairs(tokens: int, width: int, num_experts: int, held: range, *, dtype: torch.dtype, second: bool, in_parts: bool) -> Pairs:
    """`second`: of an expert's second product."""
    chosen = torch.stack([torch.randperm(num_experts)[:3] for _ in range(tokens)]).int().to(DEVICE)
    rows = tokens * 3 if second else tokens
    return Pairs(
        x=torch.randn(rows, width + 8, device=DEVICE).to(dtype)[:, :width],
        chosen=chosen,
        held=held,
        weights=torch.rand(tokens, 3, device=DEVICE) if second else None,
        of_pairs=second,
        in_parts=in_parts,
    )


def check(got: torch.Tensor, want: torch.Tensor, pairs: Pairs, dtype: torch.dtype) -> None:
    if pairs.in_parts:
        assert got.dtype == torch.float32
        got = got.transpose(0, 1).flatten(0, 1)
    held = ~want[:, 0].isnan()
    assert held.any()
    torch.testing.assert_close(got[held].double(), want[held], **tolerance(dtype))


HELD = [range(5), range(1, 3)]


@pytest.mark.parametrize(("dtype", "held"), list(zip(DTYPES, [*HELD, HELD[1]], strict=True)))
@pytest.mark.parametrize(("second", "in_parts"), [(False, False), (True, False), (True, True)])
def test_rows(second: bool, in_parts: bool, dtype: torch.dtype, held: range) -> None:
    pairs = random_pairs(2, 72, 5, held, dtype=dtype, second=second, in_parts=in_parts)
    weight = (torch.randn(len(held), 22, 72, device=DEVICE) * 72**-0.5).to(dtype)
    got = multiply_rows(pairs, weight, tile=ExpertRowTile(rows=4, num_warps=2), gated=not second)
    check(got, expected(pairs, weight, gated=not second), pairs, dtype)


@pytest.mark.parametrize(
    ("dtype", "turned", "bulk", "held"),
    [(torch.float32, False, False, HELD[1]), (torch.bfloat16, True, False, HELD[1]), (torch.float16, True, True, HELD[0])],
)
@pytest.mark.parametrize("tokens", [13, 21])
@pytest.mark.parametrize(("second", "in_parts"), [(False, False), (True, False), (True, True)])
def test_tiles(second: bool, in_parts: bool, tokens: int, turned: bool, bulk: bool, dtype: torch.dtype, held: range) -> None:
    """Programs find the pairs of few tokens by themselves; those of more are listed."""
    pairs = random_pairs(tokens, 40, 5, held, dtype=dtype, second=second, in_parts=in_parts)
    weight = (torch.randn(len(held), 44, 40, device=DEVICE) * 40**-0.5).to(dtype)
    tile = ExpertTile(tokens=16, cols=32, depth=16, num_warps=2, num_stages=2, turned=turned, bulk=bulk)
    tiles = triton_routing.tiles_of(pairs.chosen, held, 16)
    assert bool(tiles.among) == (tokens <= 16)
    got = multiply_tiles(pairs, tiles, weight, tile=tile, gated=not second)
    check(got, expected(pairs, weight, gated=not second), pairs, dtype)


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    router = ExpertRouter(num_experts=5, top_k=2)
    logits = torch.zeros(3, 5, device=DEVICE)
    got = triton_routing.route(logits, router)
    assert got.experts.tolist() == [[0, 1]] * 3


FORMS = [
    {"kind": "int4", "group": 32},
    {"kind": "int4", "group": 128, "zeros": True},
    {"kind": "int8"},
    {"kind": "int8", "activations": INT8_TOKEN},
    {"kind": "fp8"},
    {"kind": "fp8", "activations": FP8_TOKEN},
    {"kind": "fp8", "group": 128, "block_rows": 16, "activations": FP8_GROUP},
    {"kind": "fp4", "group": 32},
    # What no kernel takes is made dense, its input rounded.
    {"kind": "int8", "activations": INT8_UNEVEN},
]


# Of an expert: input and weights of two products, both ahead of the gate and behind it, the gated product, the result.
_ROUNDINGS = 2 * 2 + 2 + 2 + 1 + 1


def quantized_limit(form: dict[str, Any], dtype: torch.dtype, *, sums: int = 0) -> float:
    """Steps of e4m3 are an eighth of a number; int8 has 127 for the largest number of a row, some four times as large as most. `sums`: how
    many terms torch may add up in `dtype`, where weights are made dense."""
    activations = form.get("activations")
    step = 0.0 if activations is None else 1 / 8 if activations.is_float else 4 / 127
    return relative_limit(dtype, _ROUNDINGS + sums, step=step)


def in_float64(weights: ExpertWeights) -> ExpertWeights:
    """Quantized weights stay, and are multiplied in what x is."""

    def wide(one: Any) -> Any:
        return one.double() if isinstance(one, torch.Tensor) else one

    biases = None if weights.biases is None else (wide(weights.biases[0]), wide(weights.biases[1]))
    return replace(weights, gate_up=wide(weights.gate_up), down=wide(weights.down), biases=biases)


def quantized_experts(held: range, hidden: int, features: int, form: dict[str, Any]) -> ExpertWeights:
    return ExpertWeights(
        gate_up=[random_weight(rows=2 * features, columns=hidden, **form) for _ in held],
        down=[random_weight(rows=hidden, columns=features, **form) for _ in held],
        held=held,
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that are not held
@pytest.mark.parametrize(("form", "held"), [(form, HELD[i % 2]) for i, form in enumerate(FORMS)])
def test_quantized_experts(form: dict[str, Any], held: range) -> None:
    dtype = torch.bfloat16 if form["kind"] in ("int4", "fp4") else torch.float16
    router = ExpertRouter(num_experts=5, top_k=2, renormalize=True)
    weights = quantized_experts(held, 128, 160, form)
    layer = TritonExperts(weights, router, dtype)
    # By rows where there are some, in tiles without a list, and with one.
    for tokens in (1, 5, 18):
        x = torch.randn(tokens, 128, device=DEVICE).to(dtype)
        routing = oracle.route(torch.randn(tokens, 5, device=DEVICE), router)
        want = EveryExpert(in_float64(weights))(x.double(), routing)
        assert float((layer(x, routing).double() - want).norm()) <= quantized_limit(form, dtype) * float(want.norm())


@pytest.mark.parametrize("tokens", [2, 3])
def test_the_norm_ahead_rounds_what_experts_take(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    router, dtype = ExpertRouter(num_experts=5, top_k=2), torch.float16
    ops = TritonOps(DEVICE)
    layer = ops.prepare_experts(quantized_experts(range(5), 128, 160, FORMS[5]), router, dtype)
    x, residual, weight = (torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((tokens, 128), (tokens, 128), (128,)))
    routing = oracle.route(torch.randn(tokens, 5, device=DEVICE), router)
    want = layer(ops.add_rms_norm(x, residual.clone(), weight, 1e-5), routing)
    rounded = []
    monkeypatch.setattr("twostep.model.kernels.triton_quantized_input.round_input", lambda *args: rounded.append(args))
    entered = ops.join_rms_norm(lambda x: x, x, residual, weight, 1e-5, layer.enter)
    assert torch.equal(layer(entered, routing), want)
    assert not rounded


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (3, torch.float32), (40, torch.bfloat16), (257, torch.float32)]
)
def test_a_layer_is_right_whichever_kernel_multiplies(tokens: int, dtype: torch.dtype) -> None:
    router = ExpertRouter(num_experts=3, top_k=2, scores=Scores.SIGMOID)
    gate_up, down = torch.randn(3, 2 * 24, 16, device=DEVICE) * 0.25, torch.randn(3, 16, 24, device=DEVICE) * 0.2
    weights = ExpertWeights(gate_up=gate_up.to(dtype), down=down.to(dtype), held=range(3))
    layer = TritonOps(DEVICE).prepare_experts(weights, router, dtype)
    x = torch.randn(tokens, 16, device=DEVICE).to(dtype)
    routing = oracle.route(torch.randn(tokens, 3, device=DEVICE), router)
    want = EveryExpert(in_float64(weights))(x.double(), routing)
    limit = relative_limit(dtype, _ROUNDINGS)
    assert float((layer(x, routing).double() - want).norm() / want.norm()) < limit
    parts = layer.parts(x, routing)
    assert (parts.dim() == 3) == (tokens <= 256)
    parts = parts.double().sum(0) if parts.dim() == 3 else parts.double()
    assert float((parts - want).norm() / want.norm()) < limit


@pytest.mark.parametrize("clamped", [None, ClampedGate(1.702, 0.5)])
@pytest.mark.parametrize(("tokens", "form"), [(2, None), (9, None), (5, {"kind": "int4", "group": 32}), (5, FORMS[5])])
def test_biases_and_clamped_gates(tokens: int, form: dict[str, Any] | None, clamped: ClampedGate | None) -> None:
    router, dtype = ExpertRouter(num_experts=3, top_k=2), torch.float32 if form is None else torch.float16
    if form is None:
        weights = ExpertWeights(gate_up=torch.randn(3, 96, 32, device=DEVICE), down=torch.randn(3, 32, 48, device=DEVICE), held=range(3))
    else:
        weights = quantized_experts(range(3), 32, 48, form)
    biases = torch.randn(3, 96, device=DEVICE).to(dtype), torch.randn(3, 32, device=DEVICE).to(dtype)
    weights = replace(weights, biases=biases, clamped=clamped)
    x = torch.randn(tokens, 32, device=DEVICE).to(dtype)
    routing = oracle.route(torch.randn(tokens, 3, device=DEVICE), router)
    want = EveryExpert(in_float64(weights))(x.double(), routing)
    got = TritonExperts(weights, router, dtype)(x, routing).double()
    limit = relative_limit(dtype, _ROUNDINGS) if form is None else quantized_limit(form, dtype, sums=32 + 48)
    assert float((got - want).norm() / want.norm()) < limit
    by_torch = Ops().prepare_experts(in_float64(weights), router, torch.float64)(x.double(), routing)
    assert float((by_torch - want).norm() / want.norm()) < limit


def test_a_trial_finds_what_is_wrong() -> None:
    router = ExpertRouter(num_experts=2, top_k=1)
    weights = ExpertWeights(gate_up=torch.randn(2, 8, 16, device=DEVICE), down=torch.randn(2, 16, 4, device=DEVICE), held=range(2))
    layer = TritonExperts(weights, router, torch.float32)
    assert layer.trial(EveryExpert(weights), num_tokens=(1, 5)) == ""
    other = ExpertWeights(gate_up=weights.gate_up, down=weights.down * 1.1, held=range(2))
    assert layer.trial(EveryExpert(other), num_tokens=(1, 5)) != ""


@given(
    tokens=st.sampled_from([16, 32, 64, 128]),
    item_bytes=st.sampled_from([1, 2, 4]),
    shared=st.integers(0, 300_000),
    num_pairs=st.integers(0, 1 << 20),
    num_experts=st.integers(1, 512),
)
def test_a_tile_keeps_to_what_there_is(tokens: int, item_bytes: int, shared: int, num_pairs: int, num_experts: int) -> None:
    tile = choose_tile(tokens, item_bytes=item_bytes, bulk=True, shared_bytes=shared)
    assert tile.tokens == tokens
    taken = (tile.cols + tokens) * tile.depth * item_bytes * tile.num_stages
    assert taken <= shared or tile.num_stages == 2
    chosen = tile_tokens(num_pairs, num_experts, 64)
    assert chosen in (16, 32, 64)
    # Where an expert has its share, it fills a tile at most once or a few times.
    assert num_pairs / num_experts <= chosen or chosen == 64
