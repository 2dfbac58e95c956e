"""Around the products of experts, as Triton kernels: which experts a token goes to, which tokens an expert has, and their terms' sum.

    logits ─ route ─ experts, weights [T, k] ─ sort ─ tiles ─ products (triton_expert_products.py) ─ terms ─ add up ─ [T, H]

A tile is up to TOKENS pairs of one expert. Where there are no more tokens than that, each expert has one tile at most: its place is the
expert's number, and programs find its pairs themselves; nothing is sorted. Else how many tiles there are depends on what was chosen, which
stays on the device: there are places for as many as there can be, and empty ones say so. An expert's tiles begin at place

    pairs of experts before it / TOKENS + experts before it that may have pairs

so that nobody waits for another expert's count of tiles. The oracles are in experts.py. Nothing is added up by atomics but counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostep.model.kernels.experts import HASH_FACTORS, Beside, ExpertRouter, GroupScore, Routing, Scores
from twostep.model.kernels.triton_elementwise import sum_parts
from twostep.model.kernels.triton_launch import follow, overlaps

# Pairs among which programs of a product find their own.
_MOST_LOOKED_AT = 256
# Pairs that a program looks at together, the fewest that fit.
_SORTED_TOGETHER = (256, 4096)
_FILLED_TOGETHER = tl.constexpr(64)
_TERM_TILE = 1024
_FACTOR_0, _FACTOR_1, _FACTOR_2 = (tl.constexpr(factor) for factor in HASH_FACTORS)


def route(
    logits: torch.Tensor,
    router: ExpertRouter,
    correction: torch.Tensor | None = None,
    load: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
) -> Routing:
    """Chooses experts as experts.route does; of equal scores the expert with the lower number. logits: rows dense; in parts all of it."""
    tokens, experts = logits.shape[-2:]
    assert logits.stride(-1) == 1
    assert logits.dim() == 2 or (logits.is_contiguous() and logits.dtype == torch.float32)
    assert experts == router.num_experts
    assert gate is None or (router.num_shared and gate.shape == (tokens, 1))
    columns = router.top_k + router.num_shared
    routing = Routing(
        torch.empty(tokens, columns, dtype=torch.int32, device=logits.device),
        torch.empty(tokens, columns, dtype=torch.float32, device=logits.device),
    )
    if tokens:
        pdl = overlaps(logits.device)
        _route_kernel[(tokens,)](
            logits, logits.stride(-2), tokens * experts, logits if correction is None else correction, routing.experts, routing.weights,
            routing.experts if load is None else load, *((logits, 0) if gate is None else (gate, gate.stride(0))), router.scale,
            PARTS=len(logits) if logits.dim() == 3 else 1, EXPERTS=experts, BLOCK=triton.next_power_of_2(experts),
            TOP=router.top_k, SHARED=router.num_shared, GATED=gate is not None, BLOCK_TOP=triton.next_power_of_2(columns),
            SOFTMAX=router.scores is Scores.SOFTMAX, CHOSEN=router.scores is Scores.CHOSEN, RENORMALIZE=router.renormalize,
            GROUPS=router.num_groups, TOP_GROUPS=router.top_groups, BLOCK_GROUPS=triton.next_power_of_2(router.num_groups),
            BEST_TWO=router.group_score is GroupScore.BEST_TWO, CORRECTED=correction is not None,
            SCATTERED=router.scattered, COUNTS=load is not None,
            PDL=pdl, num_warps=1 if experts <= 256 else 4, launch_pdl=pdl,
        )  # fmt: skip
    return routing


@triton.jit(do_not_specialize=["numel"])
def _route_kernel(
    logits_ptr, stride, numel, correction_ptr, experts_ptr, weights_ptr, load_ptr, gate_ptr, stride_gate, scale,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    BLOCK_TOP: tl.constexpr, SOFTMAX: tl.constexpr, CHOSEN: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr, CORRECTED: tl.constexpr, SCATTERED: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    there = e < EXPERTS
    if PDL:
        follow()
    logits = sum_parts(logits_ptr + token * stride + e, there, numel, PARTS)
    logits = tl.where(there, logits, float("-inf"))
    score = logits
    if SOFTMAX:
        score = tl.exp(score - tl.max(score, 0))
        score = score / tl.sum(score, 0)
    elif not CHOSEN:
        score = tl.sigmoid(score)
    choice = score
    if CORRECTED:
        choice += tl.load(correction_ptr + e, mask=there, other=0.0)
    if SCATTERED:
        choice = _hashes(logits, e)
    # What is no number is chosen last, and never points past the experts.
    choice = tl.where(there & (choice == choice), choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_the_best_groups(choice, e // (EXPERTS // GROUPS), e, GROUPS, TOP_GROUPS, BLOCK_GROUPS, BEST_TWO)
    slot = tl.arange(0, BLOCK_TOP)
    chosen = tl.zeros([BLOCK_TOP], tl.int32)
    weight = tl.full([BLOCK_TOP], float("-inf") if CHOSEN else 0.0, tl.float32)
    for j in tl.static_range(TOP):
        best = tl.argmax(choice, 0)
        chosen = tl.where(slot == j, best, chosen)
        weight = tl.where(slot == j, tl.sum(tl.where(e == best, score, 0.0), 0), weight)
        choice = tl.where(e == best, float("-inf"), choice)
    if CHOSEN:
        weight = tl.exp(weight - tl.max(weight, 0))
        weight = weight / tl.sum(weight, 0)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    weight *= scale
    if SHARED > 0:
        of_shared = 1.0
        if GATED:
            of_shared = tl.sigmoid(tl.load(gate_ptr + token * stride_gate).to(tl.float32))
        chosen = tl.where(slot < TOP, chosen, EXPERTS + slot - TOP)
        weight = tl.where(slot < TOP, weight, of_shared)
    at = token * (TOP + SHARED) + slot
    tl.store(experts_ptr + at, chosen, mask=slot < TOP + SHARED)
    tl.store(weights_ptr + at, weight, mask=slot < TOP + SHARED)
    if COUNTS:
        tl.atomic_add(load_ptr + chosen, tl.full([BLOCK_TOP], 1, tl.int64), mask=slot < TOP, sem="relaxed")


@triton.jit
def _hashes(logits, e):
    digits = tl.where(logits == float("-inf"), 0, logits.to(tl.int32, bitcast=True))
    digits = (digits ^ (digits >> 16)) * (2 * e + 1)
    bits = tl.sum(digits.to(tl.int64), 0).to(tl.int32) ^ (e * _FACTOR_0)
    bits = (bits ^ (bits >> 15)) * _FACTOR_0
    bits = (bits ^ (bits >> 15)) * _FACTOR_1
    bits = (bits ^ (bits >> 15)) * _FACTOR_2
    return bits.to(tl.float32)


@triton.jit
def _in_the_best_groups(
    choice, group, e, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr
):
    """`choice`, -inf for the experts of all groups but the best. Groups may be of any size."""
    g = tl.arange(0, BLOCK_GROUPS)
    scores = tl.full([BLOCK_GROUPS], float("-inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        of_group = tl.where(group == i, choice, float("-inf"))
        best = tl.max(of_group, 0)
        if BEST_TWO:
            best += tl.max(tl.where(e == tl.argmax(of_group, 0), float("-inf"), of_group), 0)
        scores = tl.where(g == i, best, scores)
    kept = e < 0
    for _i in tl.static_range(TOP_GROUPS):
        best = tl.argmax(scores, 0)
        kept = kept | (group == best)
        # A group whose best is no number comes after all others, and before those that are not there.
        scores = tl.where(g == best, float("-inf"), scores)
    return tl.where(kept, choice, float("-inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """Pairs by expert.

    pairs    int32 [places * tokens]: of each tile the pairs, by number; past its last, and in no empty tile, the number of all pairs
    experts  int32 [places]: whose tile it is, counted from the first that is held; -1: it is empty
    tokens   of a tile at most
    first    the first expert that is held
    among    0; or pairs and experts are what was chosen, int32 [T * k], place is expert, and programs look at up to so many
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    tokens: int
    places: int
    first: int
    among: int = 0

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Returns what pairs_of asks of a kernel, and AMONG."""
        return self.pairs, self.experts, self.first


def tiles_of(chosen: torch.Tensor, held: range, tokens: int) -> ExpertTiles:
    """Tiles of up to `tokens` pairs; chosen int32 [T, k], dense, a token's experts differ. Experts that are not held have none."""
    # The same for all steps that small: they are captured at start-up, each with its programs.
    among = triton.next_power_of_2(tokens * chosen.shape[1])
    if len(chosen) > tokens or among > _MOST_LOOKED_AT:
        return sort_by_expert(chosen, held, tokens)
    assert chosen.is_contiguous()
    flat = chosen.view(-1)
    return ExpertTiles(pairs=flat, experts=flat, tokens=tokens, places=len(held), first=held.start, among=among)


def sort_by_expert(chosen: torch.Tensor, held: range, tokens: int) -> ExpertTiles:
    """The same, listed. Waits for nothing: it can be captured."""
    num_pairs = chosen.numel()
    assert chosen.is_contiguous()
    places = num_pairs // tokens + min(len(held), num_pairs) if held else 0
    tiles = ExpertTiles(
        pairs=torch.empty(places * tokens, dtype=torch.int32, device=chosen.device),
        experts=torch.empty(places, dtype=torch.int32, device=chosen.device),
        tokens=tokens,
        places=places,
        first=held.start,
    )
    if places:
        pdl = overlaps(chosen.device)
        together = next((some for some in _SORTED_TOGETHER if num_pairs <= some), _SORTED_TOGETHER[-1])
        _sort_kernel[(len(held),)](
            chosen, tiles.pairs, tiles.experts, num_pairs, held.start, len(held), places, TOKENS=tokens, BLOCK=together,
            PDL=pdl, num_warps=8 if together > 1024 else 4, launch_pdl=pdl,
        )  # fmt: skip
    return tiles


@triton.jit(do_not_specialize=["num_pairs", "first", "places"])
def _sort_kernel(
    chosen_ptr, pairs_ptr, experts_ptr, num_pairs, first, held, places, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    expert = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if PDL:
        follow()
    before = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + i, mask=start + i < num_pairs, other=-1) - first
        before += tl.sum(((chosen >= 0) & (chosen < expert)).to(tl.int32), 0)
        count += tl.sum((chosen == expert).to(tl.int32), 0)
    place = before // TOKENS + tl.minimum(expert, before)
    end = (before + count) // TOKENS + tl.minimum(expert + 1, before + count)
    if expert == held - 1:
        end = places
    t = tl.arange(0, _FILLED_TOGETHER)
    for at in range(place, end, _FILLED_TOGETHER):
        used = (at + t - place) * TOKENS < count
        tl.store(experts_ptr + at + t, tl.where(used, expert, -1), mask=at + t < end)
    to = pairs_ptr + place.to(tl.int64) * TOKENS
    done = tl.zeros([], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + i, mask=start + i < num_pairs, other=-1) - first
        mine = chosen == expert
        ones = mine.to(tl.int32)
        tl.store(to + done + tl.cumsum(ones, 0) - 1, start + i, mask=mine)
        done += tl.sum(ones, 0)
    rest = count + tl.arange(0, TOKENS)
    tl.store(to + rest, tl.zeros([TOKENS], tl.int32) + num_pairs, mask=rest < tl.cdiv(count, TOKENS) * TOKENS)


@triton.jit
def pairs_of(place, pairs_ptr, experts_ptr, first, num_pairs, TOKENS: tl.constexpr, AMONG: tl.constexpr):
    """Whose tile lies at `place`, -1: nobody's, and its pairs [TOKENS], `num_pairs` where there is none."""
    t = tl.arange(0, TOKENS)
    if AMONG == 0:
        expert = tl.load(experts_ptr + place)
        pair = tl.load(pairs_ptr + place * TOKENS + t)
    else:
        i = tl.arange(0, AMONG)
        mine = (tl.load(pairs_ptr + i, mask=i < num_pairs, other=-1) == first + place).to(tl.int32)
        # The pair that so many of the expert's come before.
        rank = tl.where(mine > 0, tl.cumsum(mine, 0) - 1, -1)
        pair = tl.min(tl.where(rank[:, None] == t[None, :], i[:, None], num_pairs), 0)
        expert = tl.where(tl.sum(mine, 0) > 0, place, -1)
    return expert, pair


def add_up(terms: torch.Tensor, chosen: torch.Tensor, held: range, beside: Beside | None, dtype: torch.dtype) -> torch.Tensor:
    """Sums each token's terms in order, those of experts that are held, and what stands beside them.

    terms   [T * k, H], dense; of experts that are not held anything
    chosen  int32 [T, k]
    Returns [T, H] in `dtype`.
    """
    tokens, top_k = chosen.shape
    width = terms.shape[1]
    assert terms.is_contiguous()
    out = torch.empty(tokens, width, dtype=dtype, device=terms.device)
    term = out if beside is None else beside.term
    gate = out if beside is None or beside.gate is None else beside.gate
    assert term.stride(1) == 1
    if tokens:
        pdl = overlaps(terms.device)
        _add_up_kernel[(tokens, triton.cdiv(width, _TERM_TILE))](
            terms, chosen, term, term.stride(0), gate, gate.stride(0), out, width, held.start, held.stop,
            TOP=top_k, BLOCK=_TERM_TILE, BESIDE=beside is not None, GATED=beside is not None and beside.gate is not None,
            PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first", "end"])
def _add_up_kernel(
    terms_ptr, chosen_ptr, beside_ptr, stride_beside, gate_ptr, stride_gate, out_ptr, width, first, end,
    TOP: tl.constexpr, BLOCK: tl.constexpr, BESIDE: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        follow()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP):
        expert = tl.load(chosen_ptr + token * TOP + j)
        held = (expert >= first) & (expert < end)
        total += tl.load(terms_ptr + (token * TOP + j) * width + col, mask=mask & held, other=0.0).to(tl.float32)
    if BESIDE:
        term = tl.load(beside_ptr + token * stride_beside + col, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            term *= tl.sigmoid(tl.load(gate_ptr + token * stride_gate).to(tl.float32))
        total += term
    tl.store(out_ptr + token * width + col, total.to(out_ptr.dtype.element_ty), mask=mask)
