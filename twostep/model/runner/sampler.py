"""Picking tokens from logits, all rows of a step at once.

    logits ─ penalties, min_tokens, grammars ─┬─ argmax                                                  temperature 0
                                              └─ / temperature ─ min_p ─ top-k ─ top-p ─ inverse CDF     otherwise

The order is vLLM's. Each filter keeps the logits above a floor, so equal logits are kept or dropped together and the result
does not depend on how a sort breaks ties. One uniform number per row (see noise.py) picks from the kept probabilities,
summed in vocabulary order in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from twostep.engine.batch import NO_TOKEN, Sampled, SamplingRow, TokenMasks, TopLogprob
from twostep.model.runner.noise import uniform
from twostep.model.runner.penalties import adjust

# Below it a temperature changes nothing but overflows.
MIN_TEMPERATURE = 1e-6
# top-p looks at this many best logits before it sorts a whole row.
_TOP_P_CANDIDATES = 1024
# Entries of [rows, vocabulary] drawn from at once: bounds the float64 temporaries to some 100 MB.
_MAX_DRAW_ENTRIES = 1 << 22


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow], masks: TokenMasks | None = None) -> Sampled:
    """Samples one token per row, NO_TOKEN where it has no finite maximum. logits [R, V] in any float dtype, aligned with rows; left as
    they are."""
    if not rows:
        return Sampled(token_ids=(), logprobs=(), top_logprobs=())
    adjusted = adjust(logits, rows, masks)
    best, tokens = adjusted.max(-1)
    drawn = [r for r, row in enumerate(rows) if not row.params.greedy]
    at_once = max(1, _MAX_DRAW_ENTRIES // logits.shape[-1])
    for start in range(0, len(drawn), at_once):
        part = drawn[start : start + at_once]
        index = torch.tensor(part, device=logits.device)
        picked = rows if len(part) == len(rows) else [rows[r] for r in part]
        tokens.index_copy_(0, index, _draw(adjusted.index_select(0, index), picked))
    # Both in one transfer, since each waits for the device; float64 holds any token id.
    finite, chosen = torch.stack((best.isfinite().double(), tokens.double())).tolist()
    token_ids = [int(token) if well else NO_TOKEN for well, token in zip(finite, chosen, strict=True)]
    logprobs, top_logprobs = _logprobs(logits, rows, token_ids)
    return Sampled(token_ids=token_ids, logprobs=logprobs, top_logprobs=top_logprobs)


def sampling_margin(logits: torch.Tensor, row: SamplingRow, masks: TokenMasks | None = None) -> float:
    """How far the choice from one row's logits [V] is from being another: for tests that compare up to near-ties.

    Greedy: the gap between the two best logits. Otherwise: the distance (in probability) of the row's uniform number from the
    ends of the interval it fell into; and where a filter's cut is closer than that to letting one token more or less in, by
    as much as that token could shift the interval, the distance of that cut.
    """
    adjusted = adjust(logits[None], [row], masks).to(torch.float64)
    if row.params.greedy:
        best = adjusted[0].topk(2).values
        return float(best[0] - best[1])
    scaled = _scale(adjusted, [row])
    floor = _floor(scaled, [row])
    weights = _kept_weights(scaled, floor)
    cumulative = weights.cumsum(-1)[0] / weights.sum()
    noise = float(uniform([row.params.seed], [row.position])[0])
    chosen = int(torch.searchsorted(cumulative, noise, right=True).clamp(max=len(cumulative) - 1))
    before = float(cumulative[chosen - 1]) if chosen else 0.0
    # 0 and 1 are no boundaries: noise never crosses them.
    ends = [abs(noise - end) for end in (before, float(cumulative[chosen])) if 0.0 < end < 1.0 - 1e-12]
    margin = min(ends, default=1.0)
    kept = scaled[0] >= floor[0]
    if bool(kept.all()):
        return margin
    lowest, highest_dropped = scaled[0][kept].min(), scaled[0][~kept].max()
    shift = float(lowest.exp() / weights.sum())
    cuts = [float(lowest - highest_dropped)]  # top-k
    if row.params.min_p > 0.0:
        cuts += [abs(float(edge.exp()) - row.params.min_p) for edge in (lowest, highest_dropped)]
    if row.params.top_p < 1.0:
        offered = float(_kept_weights(scaled, _floor(scaled, [row], top_p=False)).sum())
        mass = float(weights.sum()) / offered
        cuts += [abs(mass - row.params.top_p), abs(mass - float(lowest.exp()) / offered - row.params.top_p)]
    return min(margin, max(min(cuts), margin - shift))


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """int64 [R] from adjusted logits [R, V]: the inverse of the cumulative distribution at each row's noise."""
    scaled = _scale(logits, rows)
    cumulative = _kept_weights(scaled, _floor(scaled, rows)).cumsum(-1, dtype=torch.float64)
    noise = torch.from_numpy(uniform([row.params.seed for row in rows], [row.position for row in rows])).to(logits.device)
    total = cumulative[:, -1]
    # noise < 1, but the product may round up to the total, which no token would exceed.
    target = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)


def _scale(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """(logit - the row's largest) / temperature: at most 0, at least float32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    temperature = wide.new_tensor([max(row.params.temperature, MIN_TEMPERATURE) for row in rows])
    return (wide - wide.amax(-1, keepdim=True)).div_(temperature[:, None])


def _kept_weights(scaled: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return scaled.exp().masked_fill_(scaled < floor, 0.0)


def _floor(scaled: torch.Tensor, rows: Sequence[SamplingRow], *, top_p: bool = True) -> torch.Tensor:
    """The lowest scaled logit that each row's min_p, top-k and (unless told otherwise) top-p keep, [R, 1]."""
    vocab_size = scaled.shape[-1]
    floor = scaled.new_tensor([row.params.min_p for row in rows]).log_()[:, None]
    k = [row.params.top_k if 0 < row.params.top_k < vocab_size else 0 for row in rows]
    p = [row.params.top_p if top_p else 1.0 for row in rows]
    ranked = [r for r in range(len(rows)) if k[r] or p[r] < 1.0]
    if not ranked:
        return floor
    index = torch.tensor(ranked, device=scaled.device)
    part = scaled if len(ranked) == len(rows) else scaled.index_select(0, index)
    cut_p = any(x < 1.0 for x in p)
    num_best = min(vocab_size, max(max(k), _TOP_P_CANDIDATES if cut_p else 1))
    best = part.topk(num_best).values
    ks = torch.tensor([k[r] or num_best for r in ranked], device=scaled.device)
    kth = best.gather(1, ks[:, None] - 1)
    limited = torch.tensor([k[r] > 0 for r in ranked], device=scaled.device)[:, None]
    cut = torch.where(limited, torch.maximum(kth, floor.index_select(0, index)), floor.index_select(0, index))
    if cut_p:
        cut = torch.maximum(cut, _top_p_floor(part, best, cut, scaled.new_tensor([p[r] for r in ranked], dtype=torch.float64)))
    return floor.index_copy_(0, index, cut)


def _top_p_floor(scaled: torch.Tensor, best: torch.Tensor, floor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The logit at which the best ones' share of what `floor` keeps reaches p, [R, 1]; -inf where p is 1.

    best  the largest logits of each row, descending; rows where they do not reach p are sorted whole
    """
    wanted = (_kept_weights(scaled, floor).sum(-1, dtype=torch.float64) * p)[:, None]
    reached = _kept_weights(best, floor).cumsum(-1, dtype=torch.float64)
    place = (reached < wanted).sum(-1, keepdim=True)
    result = best.gather(1, place.clamp(max=best.shape[1] - 1)).masked_fill_(p[:, None] >= 1.0, -torch.inf)
    if best.shape[1] < scaled.shape[1]:
        short = ((place[:, 0] == best.shape[1]) & (p < 1.0)).nonzero()[:, 0]
        if len(short):
            whole = scaled.index_select(0, short)
            in_order = whole.sort(-1, descending=True).values
            result.index_copy_(0, short, _top_p_floor(whole, in_order, floor.index_select(0, short), p.index_select(0, short)))
    return result


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int]
) -> tuple[list[float | None], list[tuple[TopLogprob, ...]]]:
    """The model's own log-probabilities (before penalties, grammars and temperature) of the rows that ask."""
    chosen: list[float | None] = [None] * len(rows)
    top: list[tuple[TopLogprob, ...]] = [()] * len(rows)
    asked = [(r, n) for r, row in enumerate(rows) if (n := row.params.logprobs) is not None]
    if not asked:
        return chosen, top
    index = torch.tensor([r for r, _ in asked], device=logits.device)
    raw = logits.index_select(0, index).float()
    norm = raw.logsumexp(-1, keepdim=True)
    picked = (raw.gather(1, torch.tensor([[max(token_ids[r], 0)] for r, _ in asked], device=logits.device)) - norm)[:, 0].tolist()
    most = raw.topk(min(max(n for _, n in asked), raw.shape[-1]))
    ids, values = most.indices.tolist(), (most.values - norm).tolist()
    for i, (r, n) in enumerate(asked):
        chosen[r] = picked[i]
        top[r] = tuple(map(TopLogprob, ids[i][:n], values[i][:n]))
    return chosen, top
