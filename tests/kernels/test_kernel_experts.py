"""Routing, sorting and products of experts against torch, through Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pools import DEVICE, DTYPES, tolerance

from twostep.model.kernels import experts as oracle
from twostep.model.kernels import triton_routing
from twostep.model.kernels.experts import Beside, GroupScore, Router, Scores
from twostep.model.kernels.triton_expert_products import ExpertRowTile, ExpertTile, Pairs, multiply_rows, multiply_tiles

ROUTERS = [
    Router(num_experts=7, top_k=3, renormalize=True),
    Router(num_experts=16, top_k=5, scores=Scores.CHOSEN),
    Router(num_experts=20, top_k=5, scale=16.0, num_groups=5, top_groups=2),
    Router(
        num_experts=24,
        top_k=6,
        scores=Scores.SIGMOID,
        renormalize=True,
        scale=2.5,
        num_groups=8,
        top_groups=3,
        group_score=GroupScore.BEST_TWO,
    ),
    Router(num_experts=1, top_k=1, scores=Scores.SIGMOID),
]


@pytest.mark.parametrize("router", ROUTERS)
def test_routes_as_torch_does(router: Router) -> None:
    logits = torch.randn(9, router.num_experts, device=DEVICE)
    correction = torch.randn(router.num_experts, device=DEVICE) if router.scores is Scores.SIGMOID else None
    load = torch.full((router.num_experts,), 5, dtype=torch.int64, device=DEVICE)
    got, want = triton_routing.route(logits, router, correction, load), oracle.route(logits, router, correction)
    assert torch.equal(got.experts, want.experts)
    torch.testing.assert_close(got.weights, want.weights)
    assert torch.equal(load - 5, want.experts.flatten().bincount(minlength=router.num_experts))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_rows_of_no_numbers_point_to_experts_and_spoil_no_other() -> None:
    num_experts = 6
    router = Router(num_experts=num_experts, top_k=3, num_groups=3, top_groups=2, renormalize=True)
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
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def expected(pairs: Pairs, weight: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """In float64, [T * k, N]; NaN for what is not held."""
    num_out = weight.shape[1] // (1 + gated)
    want = torch.full((pairs.chosen.numel(), num_out), torch.nan, dtype=torch.float64)
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


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("second", "in_parts"), [(False, False), (True, False), (True, True)])
def test_rows(second: bool, in_parts: bool, dtype: torch.dtype, held: range) -> None:
    pairs = random_pairs(2, 72, 5, held, dtype=dtype, second=second, in_parts=in_parts)
    weight = (torch.randn(len(held), 22, 72, device=DEVICE) * 72**-0.5).to(dtype)
    got = multiply_rows(pairs, weight, tile=ExpertRowTile(rows=4, num_warps=2), gated=not second)
    check(got, expected(pairs, weight, gated=not second), pairs, dtype)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("turned", "bulk"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("second", "in_parts"), [(False, False), (True, False), (True, True)])
def test_tiles(second: bool, in_parts: bool, turned: bool, bulk: bool, dtype: torch.dtype, held: range) -> None:
    pairs = random_pairs(21, 40, 5, held, dtype=dtype, second=second, in_parts=in_parts)
    weight = (torch.randn(len(held), 44, 40, device=DEVICE) * 40**-0.5).to(dtype)
    tile = ExpertTile(tokens=16, cols=32, depth=16, num_warps=2, num_stages=2, turned=turned, bulk=bulk)
    tiles = triton_routing.sort_by_expert(pairs.chosen, held, 16)
    got = multiply_tiles(pairs, tiles, weight, tile=tile, gated=not second)
    check(got, expected(pairs, weight, gated=not second), pairs, dtype)


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    router = Router(num_experts=5, top_k=2)
    logits = torch.zeros(3, 5, device=DEVICE)
    got = triton_routing.route(logits, router)
    assert got.experts.tolist() == [[0, 1]] * 3
