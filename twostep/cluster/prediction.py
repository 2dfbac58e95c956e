"""Predicts how long a request would wait on a worker, and how long others would wait for it: from the workers' cost curves, in seconds.

    TTFT      pair    what is queued on the prefill worker  +  the uncached part of the prompt, in steps of its budget
              local   half a decode step  +  the same on the decode worker, in what its decodes leave of the budget
    TPOT      a decode step with one sequence more; the second token's wait (hand-over and half a step) is spread over the answer
    hand-over bytes of the tokens that the decode worker has not  /  the transport's rate

    cost      TTFT + answer * TPOT                      the request's own time
            + answer * others * (longer step)           what one sequence more costs those that decode there
            + others * stall                            local: what the prompt's chunks add to their steps
            + share of the prompt's own computing       those who come behind wait for it, and a cached prefix spares them

The first token is sampled where the prompt is computed, so the hand-over delays the second token and never the first.

Load is what this router has there now, and what it thinks the other routers have. Their part is known from heartbeats only, which are
older than a queue of prompts on a GPU. So it is taken for its mean over the last seconds, for at least as much, in proportion, as this
router has there itself, and for more where this router has sent more than elsewhere since. That keeps several routers from all filling
the same gap at once: each reckons that the others have seen it too. (Dahlin, "Interpreting stale load information", 1999: a report of
load is worth what has happened since. tests/router/placement_simulation.py shows what comes of it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostep.cluster.convertible import keeps_keys
from twostep.cluster.records import LayoutRecord
from twostep.cluster.snapshot import Candidate, MeanLoad, PlacementRequest
from twostep.request_class import RequestClass
from twostep.step_curve import StepCurve

# Of a worker that has not measured itself. Only proportions matter then: moving a token's KV takes a fraction of computing it, and a
# sequence more slows the others, over an answer, by about as much as 64 tokens of prefill.
DEFAULT_CURVE = StepCurve(fixed_s=0.0, per_row_s=1e-4, per_sequence_s=3e-5)

# Tokens of an answer that placement reckons with: answers end long before max_tokens, as a rule.
ANSWER_TOKENS = 128
# How much of the prompt's computing is paid by those who come behind.
_CONGESTION = 0.5
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
# Towards having the workers to oneself, while there is hardly any load to tell by.
_PRIOR_TOKENS, _PRIOR_SEQS = 512.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRate:
    latency_s: float
    bytes_per_s: float


# Between two hosts or processes, everything included (benchmarks/RESULTS.md); one that is not known here is taken for the slowest.
TRANSPORT_RATES = {
    "cuda_ipc": TransportRate(latency_s=1e-3, bytes_per_s=200e9),
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
    worker is, and may be out of date. Times of what this part does not decide are 0."""

    candidate: Candidate
    cost: float
    load_s: float
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    # The same, were the worker idle (of a decode worker's own prompts: see Predictor.idle_local_s).
    idle_ttft_s: float = 0.0
    idle_tpot_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Decoding:
    """A decode worker before it is known where the prompt is computed. Times in seconds."""

    candidate: Candidate
    curve: StepCurve
    seqs: float
    context: float
    room: int  # tokens of prompts in a step
    step_s: float  # 0: nothing is decoded there
    longer_step_s: float  # with this sequence
    idle_step_s: float  # with this one alone
    waiting_s: float  # until the prompts queued there are computed, and how much of that their chunks add to its steps
    stall_s: float
    others_s: float
    penalty: float
    host_copy_s: float
    missing_bytes: float


def token_bytes(layout: LayoutRecord) -> float:
    """Returns the size of one token's KV, over all layers, heads and parts."""
    vectors = 2 * layout.num_layers * layout.num_kv_heads * layout.tp_size
    if layout.quantization != "none":
        return float(vectors * (layout.head_dim + 2))
    return float(vectors * layout.head_dim * _DTYPE_BYTES.get(layout.dtype, 4))


def fallback_curve(candidates: Sequence[Candidate]) -> StepCurve:
    """Returns a neighbour's curve for those that have not measured themselves, so that they can be compared."""
    return next((c.record.curve for c in candidates if c.record.curve is not None), DEFAULT_CURVE)


# ---- load ---------------------------------------------------------------------------------------------------------------


def mean_load(candidate: Candidate, num_tokens: int) -> MeanLoad:
    """Its means, or what the record says. A record without queued tokens has prompts by number: each is taken for one like this."""
    if candidate.mean is not None:
        return candidate.mean
    load = candidate.record.load
    queued = load.num_queued_tokens
    if not queued and candidate.record.role == "prefill":
        queued = (load.num_running + load.num_waiting) * num_tokens
    seqs = load.num_running + load.num_reserved
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
    """Seconds that `num_tokens` of prompts with `pairs` query-key pairs take in steps of `room` tokens among `decodes` that go on, and how
    many of these seconds the steps would not have taken without them. `StepCurve.prefill_s` in closed form."""
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


def hand_over_s(num_bytes: float, transport: str) -> float:
    rate = TRANSPORT_RATES.get(transport, _UNKNOWN_RATE)
    return rate.latency_s + num_bytes / rate.bytes_per_s


def conversion_cost(there: LayoutRecord, here: LayoutRecord, num_tokens: int) -> float:
    """Returns the seconds that cutting KV of one layout into the other's blocks costs."""
    if there == here:
        return 0.0
    return token_bytes(here) * num_tokens / _CONVERSION_BYTES_PER_S + (0.0 if keeps_keys(there, here) else ROUNDING_COST)


def _host_copy_s(candidate: Candidate) -> float:
    if not candidate.host_cached_tokens:
        return 0.0
    return candidate.host_cached_tokens * token_bytes(candidate.record.layout) / _HOST_BYTES_PER_S


def _miss(predicted_s: float, target_ms: float | None) -> float:
    """Returns how far it is beyond its target, 0 within it."""
    if target_ms is None or predicted_s * 1e3 <= target_ms:
        return 0.0
    return _MISS_COST * min(_MAX_MISS, predicted_s * 1e3 / target_ms - 1.0) if target_ms > 0 else _MISS_COST * _MAX_MISS


# ---- the parts ----------------------------------------------------------------------------------------------------------


class Predictor:
    """Predicts what each worker of a side would do for one request."""

    def __init__(self, demand: PlacementRequest, fallback: StepCurve) -> None:
        """`fallback`: of workers that have not measured themselves."""
        self._demand = demand
        self._fallback = fallback
        self._answer = max(0, min(demand.max_new_tokens, ANSWER_TOKENS) - 1)  # tokens after the first
        self._own = _OWN_WEIGHT[demand.request_class]

    def prefill(self, candidate: Candidate, mean: MeanLoad, share: Shares) -> Prediction:
        demand, record = self._demand, candidate.record
        curve = record.curve or self._fallback
        # The last token is always computed: its logits are what the first new token is sampled from.
        cached = min(candidate.cached_tokens, demand.num_tokens - 1)
        own_pairs = (demand.num_tokens * demand.num_tokens - cached * cached) / 2
        computing, _ = prompt_s(curve, demand.num_tokens - cached, own_pairs, record.step_tokens)
        computing += _host_copy_s(candidate)
        queued = queued_now(candidate, mean, share, demand.request_class)
        # Prompts in the queue are taken for ones like this.
        waiting = prompt_s(curve, queued, queued * demand.num_tokens / 2, record.step_tokens)[0] if queued else 0.0
        ttft = waiting + computing
        return Prediction(
            candidate=candidate,
            cost=self._own * ttft + _CONGESTION * computing + _miss(ttft, demand.ttft_ms),
            load_s=waiting,
            ttft_s=ttft,
            idle_ttft_s=computing,
        )

    def decoding(self, candidate: Candidate, mean: MeanLoad, share: Shares) -> Decoding:
        """Describes what a decode worker is at, and would be with this request."""
        demand, record, answer = self._demand, candidate.record, self._answer
        curve, load = record.curve or self._fallback, record.load
        seqs = load_now(candidate.num_attempts, mean.num_seqs, share.seqs)
        own_context = demand.num_tokens + answer / 2  # in the middle of its answer
        known = load.num_running and load.num_context_tokens
        context = seqs * (load.num_context_tokens / load.num_running if known else demand.num_tokens)
        fixed, per_row, knee = curve.fixed_s, curve.per_row_s, curve.knee
        per_sequence, per_context = curve.per_sequence_s, curve.per_context_s
        rows = seqs - knee if seqs > knee else 0.0
        step = fixed + per_row * rows + per_sequence * seqs + per_context * context if seqs else 0.0
        rows = seqs + 1.0 - knee if seqs + 1.0 > knee else 0.0
        longer = fixed + per_row * rows + per_sequence * (seqs + 1.0) + per_context * (context + own_context)
        queued = queued_now(candidate, mean, share, demand.request_class)
        room = max(1, record.step_tokens - int(seqs))
        if load.max_step_s and seqs:
            # What was promised to those that decode there bounds its steps (docs/scheduling.md).
            hidden, left_s = max(0.0, knee - seqs), load.max_step_s - step
            a_token = per_row + curve.per_pair_s * demand.num_tokens / 2
            fits = hidden + left_s / a_token if left_s >= 0.0 and a_token else 0.0
            room = min(room, max(_LEAST_CHUNK, int(fits)))
        waiting = stall = 0.0
        if queued:
            waiting, stall = prompt_s(curve, queued, queued * demand.num_tokens / 2, room, decodes=seqs, context=context)
        # New tokens get their blocks as they come; those in host memory need one each.
        new = demand.num_tokens - candidate.cached_tokens + candidate.host_cached_tokens + 1
        full = max(seqs, load.num_running + load.num_reserved) >= record.max_num_seqs
        full = full or load.num_free_blocks < -(-new // record.layout.block_size)
        return Decoding(
            candidate=candidate,
            curve=curve,
            seqs=seqs,
            context=context,
            room=room,
            step_s=step,
            longer_step_s=longer,
            idle_step_s=fixed + per_row * max(0.0, 1.0 - knee) + per_sequence + per_context * own_context,
            waiting_s=waiting,
            stall_s=stall,
            # What one sequence more costs those that are there.
            others_s=answer * seqs * (longer - step),
            penalty=FULL_COST if full else 0.0,
            host_copy_s=_host_copy_s(candidate),
            missing_bytes=max(0, demand.num_tokens - candidate.cached_tokens) * token_bytes(record.layout),
        )

    def decode(self, at: Decoding, transport: str) -> Prediction:
        """The prompt's KV comes to it by this transport."""
        answer = self._answer
        if not answer:
            return Prediction(candidate=at.candidate, cost=at.penalty, load_s=0.0)
        moving = hand_over_s(at.missing_bytes, transport) + at.host_copy_s
        # The second token waits for the hand-over and for the step under way, and prompts that are computed there meanwhile make steps
        # longer, for as long as they last.
        extra = moving + at.step_s / 2 + at.stall_s
        tpot = at.longer_step_s + extra / answer
        cost = self._own * (answer * at.longer_step_s + extra) + at.others_s + _miss(tpot, self._demand.tpot_ms) + at.penalty
        return Prediction(
            candidate=at.candidate,
            cost=cost,
            load_s=answer * (at.longer_step_s - at.idle_step_s) + at.others_s + at.stall_s,
            tpot_s=tpot,
            idle_tpot_s=at.idle_step_s + moving / answer,
        )

    def local(self, at: Decoding) -> Prediction:
        """It computes the prompt itself, in chunks beside its decodes."""
        demand, answer = self._demand, self._answer
        cached = min(at.candidate.cached_tokens, demand.num_tokens - 1)
        num_tokens, pairs = demand.num_tokens - cached, (demand.num_tokens * demand.num_tokens - cached * cached) / 2
        computing, stall = prompt_s(at.curve, num_tokens, pairs, at.room, decodes=at.seqs, context=at.context)
        ttft = at.step_s / 2 + at.waiting_s + computing + at.host_copy_s
        tpot = at.longer_step_s if answer else 0.0
        # An idle decode worker does not stay idle: others come while a long prompt is computed.
        others = at.others_s + stall * max(1.0, at.seqs)
        cost = self._own * (ttft + answer * tpot) + others + _miss(ttft, demand.ttft_ms) + _miss(tpot, demand.tpot_ms) + at.penalty
        return Prediction(
            candidate=at.candidate,
            cost=cost,
            load_s=at.waiting_s + answer * (at.longer_step_s - at.idle_step_s) + others,
            ttft_s=ttft,
            tpot_s=tpot,
            idle_tpot_s=at.idle_step_s if answer else 0.0,
        )

    def idle_local_s(self, candidate: Candidate) -> float:
        """The time to the first token, were the worker idle."""
        demand = self._demand
        cached = min(candidate.cached_tokens, demand.num_tokens - 1)
        pairs = (demand.num_tokens * demand.num_tokens - cached * cached) / 2
        computing, _ = prompt_s(candidate.record.curve or self._fallback, demand.num_tokens - cached, pairs, candidate.record.step_tokens)
        return computing + _host_copy_s(candidate)
