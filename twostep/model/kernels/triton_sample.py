"""Drawing tokens on the GPU, one program for each row, nothing sorted and nothing asked by the host.

    logits ─ penalties ─ largest ─┬─ its place                                                      temperature 0
                                  └─ distance = (largest - logit) / temperature ≥ 0
                                       ─ min_p ─ top-k ─ top-p: keep distances up to a bound
                                       ─ first place where the kept weights' sum passes noise · total  otherwise

It does what twostep/model/runner/sampler.py does, its oracle, in the same order, and equal logits are kept or dropped together. Where that
sorts, this searches: bits of a distance order as the distance does, so the least bound that keeps k tokens, or p of the weight, is
found by looking at three bounds a pass over the row, and the interval shrinks to what lies in it (after a dozen passes over 256 KB that
mostly stay in the L2 cache; rows without top-k and top-p take two).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostep.model.kernels.triton_tokens import key_is_finite, key_place, sort_key

# Rows of `floats` and `ints`.
FLOATS = ("temperature", "log_min_p", "top_p", "repetition", "frequency", "presence", "noise")
INTS = ("row", "slot", "top_k")

# A token's count among the output, and whether the prompt or the output has it at all.
PROMPT_BIT = 1 << 30

_BLOCK = 4096
_WARPS = 16
_STAGES = tl.constexpr(1)
_INFINITY_BITS = tl.constexpr(0x7F800000)


def sample_rows(logits: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor) -> None:
    """Draws S rows and counts what they drew; NO_TOKEN where a row's largest logit is not finite.

    logits  [R, V] in any float dtype, dense rows
    floats  float64 [7, S], see FLOATS: log_min_p is -infinity for none, a temperature of 0 is greedy, noise in [0, 1)
    ints    int32 [3, S], see INTS: row of `logits` and `tokens`; row of `counts`, or -1; top_k, 0 for none
    counts  int32 [C, V]: times in the output, plus PROMPT_BIT where in the prompt; the drawn token is counted
    tokens  int64 [R], written at the rows drawn
    """
    num_rows = floats.shape[1]
    assert floats.shape == (len(FLOATS), num_rows)
    assert floats.dtype == torch.float64
    assert ints.shape == (len(INTS), num_rows)
    assert ints.dtype == torch.int32
    assert floats.is_contiguous()
    assert ints.is_contiguous()
    assert logits.stride(1) == 1
    assert counts.dtype == torch.int32
    assert counts.is_contiguous()
    assert counts.shape[1] == logits.shape[1]
    assert tokens.dtype == torch.int64
    assert tokens.is_contiguous()
    if num_rows:
        vocab_size = logits.shape[1]
        block = min(_BLOCK, triton.next_power_of_2(vocab_size))
        tiles = triton.next_power_of_2(triton.cdiv(vocab_size, block))
        _sample_kernel[(num_rows,)](
            logits, floats, ints, counts, tokens, num_rows, vocab_size, logits.stride(0), BLOCK=block, TILES=tiles, num_warps=_WARPS
        )


# A row in the functions below: where its logits and counts are, whether it is counted, its three penalties, and the vocabulary's size.


@triton.jit
def _adjusted(row, place):
    """Logits at `place` after penalties, float32; -infinity past the vocabulary."""
    row_ptr, counts_ptr, counted, repetition, frequency, presence, vocab_size = row
    logit = tl.load(row_ptr + place, mask=place < vocab_size, other=-float("inf")).to(tl.float32)
    if counted:
        seen = tl.load(counts_ptr + place, mask=place < vocab_size, other=0)
        times = (seen & 0x3FFFFFFF).to(tl.float64)
        less = (frequency * times + tl.where(times > 0, presence, 0.0)).to(tl.float32)
        changed = tl.where(logit > 0, logit / repetition, logit * repetition) - less
        logit = tl.where(seen != 0, changed, logit)
    return logit


@triton.jit
def _distance(row, place, largest, temperature):
    return (largest - _adjusted(row, place)) / temperature


@triton.jit
def _bound(row, largest, temperature, high, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The least bits of a distance such that distances up to it weigh `wanted` (COUNT: 1 each), where those up to `high` do."""
    vocab_size = row[6]
    low = high * 0 - 1  # distances up to it do not
    while low + 1 < high:
        step = (high - low + 3) // 4
        first_bound = tl.minimum(low + step, high)
        second_bound = tl.minimum(low + 2 * step, high)
        third_bound = tl.minimum(low + 3 * step, high)
        first_sum = tl.zeros((BLOCK,), tl.float32)
        second_sum = tl.zeros((BLOCK,), tl.float32)
        third_sum = tl.zeros((BLOCK,), tl.float32)
        least = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        most = tl.full((BLOCK,), -1, tl.int32)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=_STAGES):
            place = start + tl.arange(0, BLOCK)
            distance = _distance(row, place, largest, temperature)
            bits = distance.to(tl.int32, bitcast=True)
            there = place < vocab_size
            weight = there.to(tl.float32) if COUNT else tl.exp(-distance)
            first_sum += tl.where(bits <= first_bound, weight, 0.0)
            second_sum += tl.where(bits <= second_bound, weight, 0.0)
            third_sum += tl.where(bits <= third_bound, weight, 0.0)
            inside = there & (bits > low) & (bits <= high)
            least = tl.minimum(least, tl.where(inside, bits, 0x7FFFFFFF))
            most = tl.maximum(most, tl.where(inside, bits, -1))
        first = tl.sum(first_sum.to(tl.float64), 0) >= wanted
        second = tl.sum(second_sum.to(tl.float64), 0) >= wanted
        third = tl.sum(third_sum.to(tl.float64), 0) >= wanted
        lowest = tl.min(least, 0)
        highest = tl.max(most, 0)
        next_low = tl.where(first, low, tl.where(second, first_bound, tl.where(third, second_bound, third_bound)))
        next_high = tl.where(first, first_bound, tl.where(second, second_bound, tl.where(third, third_bound, high)))
        # Nothing lies between the old ends and the distances found inside.
        high = tl.where(highest >= 0, tl.minimum(next_high, highest), next_high)
        low = tl.minimum(tl.maximum(next_low, lowest - 1), high - 1)
    return high


@triton.jit
def _weigh(row, largest, temperature, bound, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """The sum of the kept weights of each tile of the row, float64 [TILES]."""
    vocab_size = row[6]
    tiles = tl.arange(0, TILES)
    sums = tl.zeros((TILES,), tl.float64)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=_STAGES):
        place = start + tl.arange(0, BLOCK)
        distance = _distance(row, place, largest, temperature)
        kept = (distance.to(tl.int32, bitcast=True) <= bound) & (place < vocab_size)
        weight = tl.sum(tl.where(kept, tl.exp(-distance), 0.0).to(tl.float64), 0)
        sums = tl.where(tiles == start // BLOCK, weight, sums)
    return sums


@triton.jit
def _sample_kernel(
    logits_ptr, floats_ptr, ints_ptr, all_counts_ptr, tokens_ptr, num_rows, vocab_size, row_stride,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    temperature = tl.load(floats_ptr + i).to(tl.float32)
    least_log = tl.load(floats_ptr + num_rows + i).to(tl.float32)
    top_p = tl.load(floats_ptr + 2 * num_rows + i)
    repetition = tl.load(floats_ptr + 3 * num_rows + i).to(tl.float32)
    frequency = tl.load(floats_ptr + 4 * num_rows + i)
    presence = tl.load(floats_ptr + 5 * num_rows + i)
    noise = tl.load(floats_ptr + 6 * num_rows + i)
    row_index = tl.load(ints_ptr + i)
    slot = tl.load(ints_ptr + num_rows + i)
    top_k = tl.load(ints_ptr + 2 * num_rows + i)
    counted = slot >= 0
    row_ptr = logits_ptr + row_index.to(tl.int64) * row_stride
    counts_ptr = all_counts_ptr + tl.maximum(slot, 0).to(tl.int64) * vocab_size
    row = (row_ptr, counts_ptr, counted, repetition, frequency, presence, vocab_size)

    best = tl.full((BLOCK,), -(2**63), tl.int64)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=_STAGES):
        place = start + tl.arange(0, BLOCK)
        logit = _adjusted(row, place)
        best = tl.maximum(best, tl.where(place < vocab_size, sort_key(logit, place), -(2**63)))
    key = tl.max(best, 0)
    token = tl.where(key_is_finite(key), key_place(key), -1)
    if key_is_finite(key) & (temperature > 0.0):
        ordered = (key >> 32).to(tl.int32)
        largest = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)
        bound = (0.0 - least_log).to(tl.int32, bitcast=True)
        if (top_k > 0) & (top_k < vocab_size):
            all_of_them = bound * 0 + _INFINITY_BITS
            kth = _bound(row, largest, temperature, all_of_them, top_k.to(tl.float64), True, BLOCK)
            bound = tl.minimum(bound, kth)
        sums = _weigh(row, largest, temperature, bound, BLOCK, TILES)
        if top_p < 1.0:
            bound = _bound(row, largest, temperature, bound, tl.sum(sums, 0) * top_p, False, BLOCK)
            sums = _weigh(row, largest, temperature, bound, BLOCK, TILES)
        target = noise * tl.sum(sums, 0)
        tiles = tl.arange(0, TILES)
        here = (sums > 0.0) & (tl.cumsum(sums, 0) > target)
        # Rounding may leave the target just above every sum: the last tile and token that have any weight then.
        first_tile = tl.min(tl.where(here, tiles, TILES), 0)
        tile = tl.where(first_tile < TILES, first_tile, tl.max(tl.where(sums > 0.0, tiles, 0), 0))
        before = tl.sum(tl.where(tiles < tile, sums, 0.0), 0)
        place = tile * BLOCK + tl.arange(0, BLOCK)
        distance = _distance(row, place, largest, temperature)
        kept = (distance.to(tl.int32, bitcast=True) <= bound) & (place < vocab_size)
        weight = tl.where(kept, tl.exp(-distance), 0.0).to(tl.float64)
        passed = before + tl.cumsum(weight, 0) > target
        drawable = weight > 0.0
        drawn = tl.min(tl.where(drawable & passed, place, 0x7FFFFFFF), 0)
        last = tl.max(tl.where(drawable, place, 0), 0)
        token = tl.where(drawn < 0x7FFFFFFF, drawn, last).to(tl.int64)
    tl.store(tokens_ptr + row_index, token)
    if counted & (token >= 0):
        tl.store(counts_ptr + token, tl.load(counts_ptr + token) + 1)
