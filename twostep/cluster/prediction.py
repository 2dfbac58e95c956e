"""Predicts what would become of a request on each worker, and what everybody else there would lose by it: from the workers' cost curves, in
seconds. Any worker may compute a prompt between the tokens of those that decode there, and keep the sequence.

    TTFT      half a decode step, if it decodes  +  the prompts queued there  +  the uncached part of this one. A worker that decodes
              computes prompts in chunks that fit into the longest step that those who decode are promised
    TPOT      a decode step with one sequence more, stretched by the prompts that pass there, or with drafts a part of it; the second
              token's wait (hand-over and half a step) is spread over the answer
    gap       the longest of: a step with a chunk where prompts pass, the wait for the second token
    hand-over bytes of the tokens that the worker has not  /  the transport's rate; as lately measured there, where it was

    cost      TTFT + answer * TPOT                      the request's own time
            + answer * others * (longer step)           what one sequence more costs those that decode there
            + others * stall                            what the prompt's chunks add to the steps of those that decode where it is computed
            + share of the prompt's own computing       those who come behind wait for it, and a cached prefix spares them
            + slower prompts                            what prompts lose that pass where it stays: a worker that decodes cuts them smaller

Within what was promised, seconds count for little: for a time per token by its target, for a stall by the bound of the worker's steps.

The first token is sampled where the prompt is computed, so the hand-over delays the second token and never the first.

Load is what this router has there now, and what it thinks the other routers have. Their part is known from heartbeats only, which are
older than a queue of prompts on a GPU. So it is taken for its mean over the last seconds, for at least as much, in proportion, as this
router has there itself, and for more where this router has sent more than elsewhere since. That keeps several routers from all filling
the same gap at once: each reckons that the others have seen it too. (Dahlin, "Interpreting stale load information", 1999: a report of
load is worth what has happened since. tests/router/placement_simulation.py shows what comes of it.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twostep.cluster.convertible import keeps_keys
from twostep.cluster.records import LayoutRecord, MeasuredHandOver, WorkerRecord
from twostep.quantized_vector import vector_bytes
from twostep.request_class import RequestClass
from twostep.step_curve import GAP_SHARE, StepCurve, StepWorkload

# Of a worker that has not measured itself. Only proportions matter then: moving a token's KV takes a fraction of computing it, and a
# sequence more slows the others, over an answer, by about as much as 64 tokens of prefill.
DEFAULT_CURVE = StepCurve(fixed_s=0.0, per_row_s=1e-4, per_sequence_s=3e-5)

# Tokens of an answer that placement reckons with: answers end long before max_tokens, as a rule.
ANSWER_TOKENS = 128
# How much of the prompt's computing is paid by those who come behind.
_CONGESTION = 0.5
# What a second counts that somebody loses within what was promised.
_SLACK_SHARE = 0.05
# Of a promised TPOT, how long steps with prompts are taken to be beside the request: less than engines allow (PACE_SHARE), since some
# of them last longer than foretold.
_TPOT_SHARE = 0.9
# Prompts take no larger part of the time than that of a worker that decodes, or nobody would be served there.
_MOST_PROMPTS = 0.9
# A batch request's own time counts for little beside what it costs others.
_OWN_WEIGHT = {RequestClass.INTERACTIVE: 1.0, RequestClass.STANDARD: 1.0, RequestClass.BATCH: 0.1}

# Above all costs in seconds. A target that is missed counts by how far; KV in another number format gives answers that no single worker
# would give, and is no cached prefix afterwards: only where no other has room; a worker that looks full is asked last, not never,
# since heartbeats are a second old.
_MISS_COST, _MAX_MISS = 1e5, 1e3
ROUNDING_COST = 1e9
FULL_COST = 2e9

# An answer's share of the load among several routers is never taken for less.
_LEAST_SHARE = 1 / 32
# How much of what others have sent lately, and records do not tell of yet, waits still.
_GROWTH = 0.35
# What a prompt gets of a step, however long the step is already.
_LEAST_CHUNK = 32
# What was sent so long ago counts a third of what is sent now: how old what records tell is at most, a heartbeat and a look at them.
RECENT_S = 1.5
# Towards having the workers to oneself, while there is hardly any load to tell by.
_PRIOR_TOKENS, _PRIOR_SEQS = 512.0, 1.0


# ---- the workers and the request at one moment: plain values, so that a decision can be repeated -------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLoad:
    """Means over the last seconds. All routers': prompt tokens not yet computed, those of batch requests among them, sequences that run or
    are reserved; `own_*`, the part of them that came from this router."""

    queued_tokens: float = 0.0
    batch_tokens: float = 0.0
    own_queued_tokens: float = 0.0
    num_seqs: float = 0.0
    own_num_seqs: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A live worker as this router sees it: its record, which is up to a second and a half old; the router's own load there, now; and the
    means of both over the last seconds."""

    record: WorkerRecord
    # Of the prompt, in its pool or in its host memory, and how many of them in the latter: those have to be copied to the pool first.
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    # Prompt tokens this router has sent it to compute, whose first token has not come yet.
    queued_tokens: int = 0
    batch_tokens: int = 0  # of batch requests, among them
    # And how many it has sent it lately, computed or not, the longer ago the less: about as many as records do not tell of yet. Batch
    # requests' are none of them.
    recent_tokens: float = 0.0
    # Attempts of this router that are there now.
    num_attempts: int = 0
    # It refused this request in this round, or lost an earlier attempt of it.
    excluded: bool = False
    # It computes no prompt for this request in this round: it has refused to, or has enough of this router's. It may still take KV.
    no_prompts: bool = False
    # None: nothing is known but the record.
    mean: MeanLoad | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Holds workers that hand over, and workers that decode. One that does both is in either."""

    prefill: Sequence[Candidate]
    decode: Sequence[Candidate]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """Describes what a request needs. `num_tokens` are to be prefilled, of which `num_prompt_tokens` are the prompt's (0: all of them) and
    the others an answer's that was begun; `max_new_tokens` may follow them. The targets are milliseconds from now; None: as soon as can be.
    `embeds`: the prompt is all there is, and none of its KV is wanted. `speculate`: its tokens may be drafted."""

    request_id: str
    num_tokens: int
    max_new_tokens: int
    request_class: RequestClass = RequestClass.STANDARD
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    gap_ms: float | None = None
    embeds: bool = False
    num_prompt_tokens: int = 0
    speculate: bool = True


# ---- what would become of it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRate:
    latency_s: float
    bytes_per_s: float


# From the first token to the commit (benchmarks/RESULTS.md), before a worker has measured its own; one that is not known here is taken for
# the slowest.
TRANSPORT_RATES = {
    "cuda_ipc": TransportRate(latency_s=3.6e-3, bytes_per_s=200e9),
    "nixl": TransportRate(latency_s=2e-3, bytes_per_s=100e9),
    "local": TransportRate(latency_s=1e-3, bytes_per_s=20e9),
    "ray": TransportRate(latency_s=5e-3, bytes_per_s=8e9),
}
_UNKNOWN_RATE = TRANSPORT_RATES["ray"]
# From a worker's own host memory to its pool, and cutting blocks anew on a decode worker's CPU.
_HOST_BYTES_PER_S = 20e9
_CONVERSION_BYTES_PER_S = 6e9
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(slots=True, kw_only=True)
class Prediction:
    """Predicts one worker's part. `cost` is what is compared (seconds and penalties); `load_s`, the part of it that hangs on how loaded the
    worker is, and may be out of date; `others_s`, what everybody else loses. Times of what this part does not decide are 0."""

    candidate: Candidate
    cost: float
    load_s: float
    others_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    gap_s: float = 0.0
    # The same, were the worker idle.
    idle_tpot_s: float = 0.0
    idle_gap_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Decoding:
    """A worker before it is known what it does for the request. Times in seconds."""

    candidate: Candidate
    seqs: float
    step_s: float  # 0: nothing is decoded there
    longer_step_s: float  # with this sequence
    idle_step_s: float  # with this one alone
    idle_tpot_s: float
    tpot_s: float  # with this sequence, and the prompts that pass there
    gap_s: float
    waiting_s: float  # until the prompts queued there are computed
    computing_s: float  # the uncached part of the request's prompt
    prompt_others_s: float  # what those that decode there, and prompts to come, lose if it computes the prompt
    prompt_penalty: float
    others_s: float  # what everybody there loses if it decodes the answer
    penalty: float
    host_copy_s: float
    missing_bytes: float


def kv_bytes(layout: LayoutRecord, num_tokens: float) -> float:
    """Returns about how large the KV of a sequence's last tokens is that is handed over, over all layers, heads and parts."""
    vectors = layout.num_planes * layout.num_layers * layout.num_kv_heads * layout.tp_size * layout.block_size
    if layout.quantization != "none":
        block_bytes = float(vectors * vector_bytes(layout.head_dim, layout.quantization))
    else:
        block_bytes = float(vectors * layout.head_dim * _DTYPE_BYTES.get(layout.dtype, 4))
    return layout.blocks_of(num_tokens) * block_bytes


def fallback_curve(candidates: Sequence[Candidate]) -> StepCurve:
    """Returns a neighbour's curve for those that have not measured themselves, so that they can be compared."""
    return next((c.record.curve for c in candidates if c.record.curve is not None), DEFAULT_CURVE)


# ---- load ---------------------------------------------------------------------------------------------------------------


def mean_load(candidate: Candidate, num_tokens: int) -> MeanLoad:
    """Returns a worker's means, or what the record says. A record without queued tokens has prompts by number: each is taken for one like
    this."""
    if candidate.mean is not None:
        return candidate.mean
    load = candidate.record.load
    queued = load.num_queued_tokens
    if not queued and not candidate.record.takes_over:
        queued = (load.num_running + load.num_waiting) * num_tokens
    seqs = load.num_seqs
    return MeanLoad(
        queued_tokens=queued,
        batch_tokens=load.num_queued_batch_tokens,
        own_queued_tokens=min(queued, candidate.queued_tokens),
        num_seqs=seqs,
        own_num_seqs=min(seqs, candidate.num_attempts),
    )


@dataclass(frozen=True, slots=True)
class Shares:
    """Which part of the load on all workers of a role comes from this router, and how many tokens it has sent lately to each on average."""

    tokens: float
    seqs: float
    recent_tokens: float = 0.0


def shares(side: Sequence[tuple[Candidate, MeanLoad]]) -> Shares:
    own_tokens = tokens = _PRIOR_TOKENS
    own_seqs = seqs = _PRIOR_SEQS
    recent = 0.0
    for candidate, mean in side:
        own_tokens += mean.own_queued_tokens
        tokens += mean.queued_tokens
        own_seqs += mean.own_num_seqs
        seqs += mean.num_seqs
        recent += candidate.recent_tokens
    return Shares(_share(own_tokens, tokens), _share(own_seqs, seqs), recent / max(1, len(side)))


def _share(own: float, total: float) -> float:
    return min(1.0, max(_LEAST_SHARE, own / total))


def load_now(own_now: float, mean_total: float, share: float) -> float:
    """Returns the load of all routers there now: what this router has, and of the others their mean, at least what they would have there
    if they did as this one does."""
    return own_now + (1.0 - share) * max(mean_total, own_now / share)


def queued_now(candidate: Candidate, mean: MeanLoad, share: Shares, request_class: RequestClass) -> float:
    """Returns the prompt tokens to be computed there. Queues are over before a record shows them: where this router has sent more lately
    than elsewhere, the others have too."""
    own, total, running = candidate.queued_tokens, mean.queued_tokens, 0.0
    batch = load_now(candidate.batch_tokens, mean.batch_tokens, share.tokens)
    if batch and request_class is not RequestClass.BATCH:
        # It goes before them, but for the step under way.
        own, total = own - candidate.batch_tokens, max(0.0, total - mean.batch_tokens)
        running = min(batch, candidate.record.step_tokens) / 2
    if share.tokens == 1.0:
        return own + running
    queued = load_now(own, total, share.tokens) + running
    more = candidate.recent_tokens - share.recent_tokens
    return queued + _GROWTH * more * (1.0 / share.tokens - 1.0) if more > 0.0 else queued


# ---- times --------------------------------------------------------------------------------------------------------------


def prompt_s(
    curve: StepCurve, num_tokens: float, pairs: float, room: int, *, decodes: float = 0.0, context: float = 0.0
) -> tuple[float, float]:
    """Returns the seconds that `num_tokens` of prompts with `pairs` query-key pairs take in steps of `room` tokens among `decodes` that go
    on, and how many of these seconds the steps would not have taken without them. `StepCurve.prefill_s` in closed form."""
    if num_tokens <= 0:
        return 0.0, 0.0
    full = num_tokens // room
    rest = num_tokens - full * room
    free = curve.knee - decodes
    base = curve.fixed_s + curve.per_sequence_s * decodes + curve.per_context_s * context
    if free <= 0:
        rows = num_tokens
        base -= curve.per_row_s * free
    else:
        # What the reading of the weights hides.
        rows = (full * (room - free) if room > free else 0.0) + (rest - free if rest > free else 0.0)
    stall = curve.per_row_s * rows + curve.per_pair_s * pairs
    num_steps = full + 1 if rest else full
    total = num_steps * base + stall
    if curve.mixed_s and decodes > 0 and total < num_steps * curve.mixed_s:
        stall += num_steps * curve.mixed_s - total
        total = num_steps * curve.mixed_s
    return total, stall


def hand_over_s(num_bytes: float, transport: str, measured: Sequence[MeasuredHandOver] = ()) -> float:
    """Returns the seconds from the first token to the commit. `measured`: by the worker that takes it; how they grow with the bytes is the
    transport's rate."""
    rate = TRANSPORT_RATES.get(transport, _UNKNOWN_RATE)
    for each in measured:
        if each.transport == transport:
            return max(0.0, each.seconds + (num_bytes - each.num_bytes) / rate.bytes_per_s)
    return rate.latency_s + num_bytes / rate.bytes_per_s


def conversion_cost(there: LayoutRecord, here: LayoutRecord, num_tokens: int) -> float:
    """Returns the seconds that cutting KV of one layout into the other's blocks costs."""
    if there == here:
        return 0.0
    return kv_bytes(here, num_tokens) / _CONVERSION_BYTES_PER_S + (0.0 if keeps_keys(there, here) else ROUNDING_COST)


def _host_copy_s(candidate: Candidate) -> float:
    if not candidate.host_cached_tokens:
        return 0.0
    return kv_bytes(candidate.record.layout, candidate.host_cached_tokens) / _HOST_BYTES_PER_S


def _miss(predicted_s: float, target_ms: float | None) -> float:
    """Returns how far it is beyond its target, 0 within it."""
    if target_ms is None or predicted_s * 1e3 <= target_ms:
        return 0.0
    return _MISS_COST * min(_MAX_MISS, predicted_s * 1e3 / target_ms - 1.0) if target_ms > 0 else _MISS_COST * _MAX_MISS


# ---- the parts ----------------------------------------------------------------------------------------------------------


class Predictor:
    """Predicts what each worker would do for one request."""

    def __init__(self, demand: PlacementRequest, fallback: StepCurve) -> None:
        """`fallback`: of workers that have not measured themselves."""
        self._demand = demand
        self._fallback = fallback
        self._answer = max(0, min(demand.max_new_tokens, ANSWER_TOKENS) - 1)  # tokens after the first
        self._own = _OWN_WEIGHT[demand.request_class]
        # Of steps with prompts beside its tokens, by what it is promised; infinity: the worker's own bound holds.
        tpot_s, gap_s = (demand.tpot_ms or 0.0) / 1e3, (demand.gap_ms or 0.0) / 1e3
        self._own_pace_s, self._own_gap_s = _TPOT_SHARE * tpot_s or math.inf, GAP_SHARE * gap_s or math.inf

    def decoding(self, candidate: Candidate, mean: MeanLoad, share: Shares) -> Decoding:
        """Describes what a worker is at, and would be with this request."""
        demand, record, answer = self._demand, candidate.record, self._answer
        curve, load = record.curve or self._fallback, record.load
        seqs = load_now(candidate.num_attempts, mean.num_seqs, share.seqs) if record.takes_over else 0.0
        own_context = demand.num_tokens + answer / 2  # in the middle of its answer
        num_decoding = load.num_running - load.num_handing_over
        known = num_decoding > 0 and load.num_context_tokens
        context = seqs * (load.num_context_tokens / num_decoding if known else demand.num_tokens)
        fixed, per_row, knee = curve.fixed_s, curve.per_row_s, curve.knee
        per_sequence, per_context = curve.per_sequence_s, curve.per_context_s
        rows = seqs - knee if seqs > knee else 0.0
        step = fixed + per_row * rows + per_sequence * seqs + per_context * context if seqs else 0.0
        rows = seqs + 1.0 - knee if seqs + 1.0 > knee else 0.0
        longer = fixed + per_row * rows + per_sequence * (seqs + 1.0) + per_context * (context + own_context)

        # Prompts there: those that wait, and this one.
        bound = load.max_step_s if seqs else 0.0
        fits = curve.chunk_within(bound, decodes=seqs, context=context, before=demand.num_tokens / 2) if bound else math.inf
        room = max(1, record.step_tokens - int(seqs))
        room = min(room, int(max(_LEAST_CHUNK, min(fits, room))))
        queued = queued_now(candidate, mean, share, demand.request_class)
        waiting = stall = 0.0
        if queued:
            # They are taken for ones like this.
            waiting, stall = prompt_s(curve, queued, queued * demand.num_tokens / 2, room, decodes=seqs, context=context)
        # The last token is always computed: its logits are what the first new token is sampled from.
        cached = min(candidate.cached_tokens, demand.num_tokens - 1)
        pairs = (demand.num_tokens * demand.num_tokens - cached * cached) / 2
        computing, own_stall = prompt_s(curve, demand.num_tokens - cached, pairs, room, decodes=seqs, context=context)
        # A decode worker that is idle does not stay so: others come while a long prompt is computed.
        held_up = max(1.0, seqs) if record.role == "decode" else seqs
        charge, prompt_penalty = (_SLACK_SHARE, 0.0) if bound else (1.0, 0.0)
        if fits < _LEAST_CHUNK:
            least = StepWorkload(prompt_tokens=_LEAST_CHUNK, decodes=int(seqs), context=int(context))
            charge, prompt_penalty = 1.0, _miss(curve.step_s(least), bound * 1e3)
        prompt_others = charge * held_up * own_stall + _CONGESTION * (own_stall if seqs else computing)

        # Its tokens, among the prompts that pass. By drafts, a step gives several.
        tokens_per_step = load.tokens_per_step if demand.speculate else 1.0
        rate = max(load.prompt_tokens_per_s, candidate.recent_tokens / (RECENT_S * share.tokens))
        tpot, gap, slower = longer / tokens_per_step, longer, 0.0
        if answer and record.takes_over and (rate or queued):
            own = min(tokens_per_step * self._own_pace_s, self._own_gap_s)
            own = record.max_step_s if own == math.inf else own
            bounds = [each for each in (bound, own) if each]
            most = max(1.0, record.step_tokens - seqs - 1.0)
            chunk = min(most, demand.num_tokens)
            if bounds:
                fits = curve.chunk_within(min(bounds), decodes=seqs + 1.0, context=context + own_context, before=demand.num_tokens / 2)
                chunk = min(chunk, max(_LEAST_CHUNK, fits))
            beside, added = prompt_s(curve, chunk, chunk * demand.num_tokens / 2, int(chunk) + 1, decodes=seqs + 1.0, context=context)
            gap = max(longer, beside)
            # For as long as it lasts, or what waits there now, if that is more.
            tpot = max(tpot / (1.0 - min(_MOST_PROMPTS, rate * added / chunk)), tpot + stall / answer)
            if record.role == "prefill":
                # Beside tokens prompts are cut smaller, for as long as anybody decodes; alone they fill the budget. All that decode there
                # share that: if one goes elsewhere nothing is gained, if all do it is all of it.
                lost = beside / chunk - prompt_s(curve, most, most * demand.num_tokens / 2, int(most))[0] / most
                slower = (1.0 + _CONGESTION) * answer * tpot * rate * max(0.0, lost) / (seqs + 1.0)
        later, others_penalty = answer / tokens_per_step * seqs * (longer - step), 0.0
        if load.tpot_s and seqs:
            others_penalty = _miss(tpot * tokens_per_step / load.tokens_per_step, load.tpot_s * 1e3)
            later *= 1.0 if others_penalty else _SLACK_SHARE

        # New tokens get their blocks as they come; those in host memory need one each.
        new = demand.num_tokens - candidate.cached_tokens + candidate.host_cached_tokens + 1
        full = max(seqs, load.num_seqs) >= record.max_num_seqs
        full = full or load.num_free_blocks < math.ceil(record.layout.blocks_of(new))
        idle_step = fixed + per_row * max(0.0, 1.0 - knee) + per_sequence + per_context * own_context
        return Decoding(
            candidate=candidate,
            seqs=seqs,
            step_s=step,
            longer_step_s=longer,
            idle_step_s=idle_step,
            idle_tpot_s=idle_step / tokens_per_step,
            tpot_s=tpot,
            gap_s=gap,
            waiting_s=waiting,
            computing_s=computing,
            prompt_others_s=prompt_others,
            prompt_penalty=prompt_penalty,
            others_s=later + slower,
            penalty=(FULL_COST if full else 0.0) + others_penalty,
            host_copy_s=_host_copy_s(candidate),
            missing_bytes=kv_bytes(record.layout, max(0, demand.num_tokens - candidate.cached_tokens)),
        )

    def prefill(self, at: Decoding) -> Prediction:
        """Predicts that it computes the prompt, and hands it over."""
        ttft = self._ttft(at)
        cost = self._own * ttft + at.prompt_others_s + at.prompt_penalty + _miss(ttft, self._demand.ttft_ms)
        return Prediction(candidate=at.candidate, cost=cost, load_s=at.waiting_s, others_s=at.prompt_others_s, ttft_s=ttft)

    def decode(self, at: Decoding, transport: str) -> Prediction:
        """Predicts that it decodes, where the prompt's KV comes to it by this transport."""
        answer = self._answer
        if not answer:
            return Prediction(candidate=at.candidate, cost=at.penalty, load_s=0.0)
        moving = hand_over_s(at.missing_bytes, transport, at.candidate.record.load.hand_overs) + at.host_copy_s
        # The second token waits for the hand-over and for the step under way; where a gap was promised, the first one waits with it, for so
        # long at most (router/serving/attempt.py).
        moving = max(0.0, moving - (self._demand.gap_ms or 0.0) / 1e3)
        tpot = at.tpot_s + (moving + at.step_s / 2) / answer
        gap = max(at.gap_s, moving + at.step_s / 2 + at.longer_step_s)
        missed = _miss(tpot, self._demand.tpot_ms) + _miss(gap, self._demand.gap_ms)
        return Prediction(
            candidate=at.candidate,
            cost=self._own * self._answer_cost(tpot) + at.others_s + missed + at.penalty,
            load_s=answer * (at.tpot_s - at.idle_tpot_s) + at.others_s,
            others_s=at.others_s,
            tpot_s=tpot,
            gap_s=gap,
            idle_tpot_s=at.idle_tpot_s + moving / answer,
            idle_gap_s=at.idle_step_s + moving,
        )

    def local(self, at: Decoding) -> Prediction:
        """Predicts that it computes the prompt itself, in chunks beside its decodes, and keeps the sequence."""
        answer, ttft = self._answer, self._ttft(at)
        tpot, gap = (at.tpot_s, at.gap_s) if answer else (0.0, 0.0)
        others = at.prompt_others_s + (at.others_s if answer else 0.0)
        missed = _miss(ttft, self._demand.ttft_ms) + _miss(tpot, self._demand.tpot_ms) + _miss(gap, self._demand.gap_ms)
        return Prediction(
            candidate=at.candidate,
            cost=self._own * (ttft + self._answer_cost(tpot)) + others + missed + at.prompt_penalty + at.penalty,
            load_s=at.waiting_s + answer * (at.tpot_s - at.idle_tpot_s) + others,
            others_s=others,
            ttft_s=ttft,
            tpot_s=tpot,
            gap_s=gap,
            idle_tpot_s=at.idle_tpot_s if answer else 0.0,
            idle_gap_s=at.idle_step_s if answer else 0.0,
        )

    def idle_ttft_s(self, candidate: Candidate) -> float:
        """Returns the time to the first token, were the worker idle."""
        demand = self._demand
        cached = min(candidate.cached_tokens, demand.num_tokens - 1)
        pairs = (demand.num_tokens * demand.num_tokens - cached * cached) / 2
        computing, _ = prompt_s(candidate.record.curve or self._fallback, demand.num_tokens - cached, pairs, candidate.record.step_tokens)
        return computing + _host_copy_s(candidate)

    def _ttft(self, at: Decoding) -> float:
        return at.step_s / 2 + at.waiting_s + at.computing_s + at.host_copy_s

    def _answer_cost(self, tpot_s: float) -> float:
        """Returns the seconds of its own tokens, of which those within its target count for little."""
        target_ms = self._demand.tpot_ms
        within = target_ms is not None and tpot_s * 1e3 <= target_ms
        return self._answer * tpot_s * (_SLACK_SHARE if within else 1.0)
