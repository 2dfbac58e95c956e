"""How many workers of each role a load needs, by the workers' own step curves.

    prefill   c workers serve prompts as M/G/c: the share of first tokens later than the target is

                  sum over lengths of P(wait > target - edge - own time),   P(wait > t) = C(c, a) exp(-2 (c - a) t / (S (1 + scv)))

              a = rate * S offered load, S seconds of full steps that a prompt takes, C Erlang's probability of waiting. The factor
              (1 + scv) / 2 takes the tail from M/M/c to M/G/c (Lee and Longton 1959; Kimura 1994). Lengths are lognormal.
              Requests that name a target are refused where they would wait beyond it, and nobody waits behind them (Barrer 1957).
    decode    Little's law: n sequences are on each of c workers where  n = rate / c * tokens * step(n, n * context),
              plus what Poisson's noise adds to all of them together. Their step must keep TPOT, and they must have seats and blocks.

    together  workers that take work of both roles: decoding is worth d workers, d a real number, and n are enough if prompts are served in
              time by the n - d that are left

The driver's GPU utilisation is not looked at: it says that something ran, not how much. A worker without a curve is taken for what it has
been seen to do when it had more than enough to do.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist

from twostep.autoscaler.model import PolicyConfig, Role
from twostep.cluster.prediction import prompt_s
from twostep.step_curve import StepCurve, chunk_pairs

# No pool is larger; a search ends here.
MOST_WORKERS = 4096
_NUM_LENGTHS = 12
# A sequence's TPOT is a mean over its life, in which the others come and go: of noise with a memory of one life, a mean over one life keeps
# this part: sqrt(2 (x - 1 + exp(-x)) / x²) at x = 1.
_LIFE_NOISE = 0.86
# Parts of a worker that decoding is counted in.
_PARTS = 16
# Service times beyond which nobody is ever idle.
_FLOODED = -500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Describes what one worker of a role can do. 0: not known, no bound. `tokens_per_s`: what it computed when it had enough to do; used
    only without a curve."""

    curve: StepCurve | None = None
    step_tokens: int = 512
    max_num_seqs: int = 0
    num_blocks: int = 0
    block_size: int = 16
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """A load to be carried. `decoded_per_s`: tokens of answers that are given now, in sum: the least that there will be. `running`:
    sequences that decode now; only asked where there are no curves. `promised`: share of requests that name a time to their first token:
    routers refuse these rather than let them come late."""

    requests_per_s: float
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    prompt_scv: float = 0.5
    decoded_per_s: float = 0.0
    running: float = 0.0
    promised: float = 0.0

    @property
    def decode_per_s(self) -> float:
        """Tokens that decode workers are to give: the first of each answer comes from the prompt's step."""
        return max(self.requests_per_s * max(0.0, self.output_tokens - 1.0), self.decoded_per_s)

    @property
    def uncached_tokens(self) -> float:
        return max(1.0, self.prompt_tokens - self.cached_tokens)

    @property
    def context(self) -> float:
        """Tokens of a sequence in the middle of its answer."""
        return self.prompt_tokens + self.output_tokens / 2

    def times(self, factor: float) -> OfferedLoad:
        """So many times as many requests of the same kind."""
        return replace(
            self,
            requests_per_s=self.requests_per_s * factor,
            decoded_per_s=self.decoded_per_s * factor,
            running=self.running * factor,
        )

    def plus(self, requests_per_s: float) -> OfferedLoad:
        """So many more requests a second of the same kind."""
        return replace(self, requests_per_s=self.requests_per_s + requests_per_s)


def erlang_b(num_workers: int, offered: float) -> float:
    """Probability that all workers are busy where nobody waits, in M/M/c/c."""
    blocked = 1.0
    for k in range(1, num_workers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    return blocked


def erlang_c(num_workers: int, offered: float) -> float:
    """Probability that a request waits, in M/M/c. 1 where the workers cannot keep up."""
    if offered >= num_workers:
        return 1.0
    blocked = erlang_b(num_workers, offered)
    return blocked / (1.0 - offered / num_workers * (1.0 - blocked))


def refused_share(num_workers: int, offered: float, patience: float) -> float:
    """Probability that a request would wait longer than its patience, in M/M/c where such a one is refused at once, so that the others are
    served however many come. `patience` in service times."""
    if num_workers < 1:
        return 1.0
    rest = num_workers - offered
    if rest * patience < _FLOODED:
        return -rest / offered
    at_limit = math.exp(-rest * patience)
    # Relative to the probability that one worker is free: of less work, of a wait within patience, and of a longer one.
    idler = 1.0 / erlang_b(num_workers - 1, offered)
    waiting = offered * (patience if abs(rest * patience) < 1e-9 else -math.expm1(-rest * patience) / rest)
    beyond = offered / num_workers * at_limit
    return beyond / (idler + waiting + beyond)


# ---- prefill ------------------------------------------------------------------------------------------------------------


def prompt_work_s(spec: WorkerSpec, demand: OfferedLoad) -> float:
    """Seconds of a worker that a prompt takes on average, as its share of full steps."""
    curve = _curve(spec)
    uncached = demand.uncached_tokens
    pairs = uncached * demand.cached_tokens + uncached * uncached * (1.0 + demand.prompt_scv) / 2
    share = max(0.0, curve.fixed_s - curve.per_row_s * curve.knee) / max(1, spec.step_tokens)
    return max(1e-9, uncached * (curve.per_row_s + share) + pairs * curve.per_pair_s)


def own_times_s(spec: WorkerSpec, demand: OfferedLoad) -> tuple[float, ...]:
    """How long prompts of this load take on a worker of their own, at equally likely lengths."""
    sigma = math.sqrt(math.log1p(demand.prompt_scv))
    normal = NormalDist()
    factors = [math.exp(sigma * normal.inv_cdf((i + 0.5) / _NUM_LENGTHS)) for i in range(_NUM_LENGTHS)]
    scale = demand.uncached_tokens * _NUM_LENGTHS / sum(factors)
    curve, cached = _curve(spec), round(demand.cached_tokens)
    lengths = [max(1, round(factor * scale)) for factor in factors]
    return tuple(prompt_s(curve, length, chunk_pairs(length, cached), max(1, spec.step_tokens))[0] for length in lengths)


def late_share(config: PolicyConfig, demand: OfferedLoad, work_s: float, own_s: tuple[float, ...], num_workers: float) -> float:
    """Share of first tokens later than the target on so many prefill workers, or refused, predicted. A broken number is between the two
    whole ones."""
    offered, left = demand.requests_per_s * work_s, config.ttft_ms / 1e3 - config.edge_s
    whole, rest = int(num_workers), num_workers - offered

    def between(share: Callable[[int], float]) -> float:
        part, least = num_workers - whole, share(whole)
        return least + part * (share(whole + 1) - least) if part > 0.0 else least

    waits = between(partial(erlang_c, offered=offered))
    late = 0.0
    for own in own_s:
        # In service times whose tail is that of M/M/c.
        patience = 2.0 * (left - own) / (work_s * (1.0 + demand.prompt_scv))
        waiting = waits * math.exp(-rest * patience) if rest > 0.0 and patience >= 0.0 else 1.0
        refused = between(partial(refused_share, offered=offered, patience=patience)) if demand.promised else 0.0
        late += 1.0 if patience < 0.0 else waiting + demand.promised * (refused - waiting)
    return late / len(own_s)


def prefill_need(config: PolicyConfig, spec: WorkerSpec, demand: OfferedLoad) -> int:
    """The least prefill workers with which the TTFT target is kept by the share of requests that is asked for. What is too late even on an
    idle worker is not counted against them: more workers would not mend it. 0 without load."""
    if demand.requests_per_s <= 0.0:
        return 0
    if spec.curve is None:
        return _by_tokens(config, spec, demand.requests_per_s * demand.uncached_tokens)
    return _prompt_servers(config, spec, demand, beside=0.0)


def _prompt_servers(config: PolicyConfig, spec: WorkerSpec, demand: OfferedLoad, *, beside: float) -> int:
    """The least workers that keep the TTFT target while they do the work of `beside` workers besides."""
    work_s, own_s = prompt_work_s(spec, demand), own_times_s(spec, demand)
    left = config.ttft_ms / 1e3 - config.edge_s
    hopeless = sum(own > left for own in own_s) / len(own_s)
    late = 1.0 - config.attainment
    allowed = late if hopeless < late / 2 else hopeless + late / 2
    # What the model cannot see has the rest. Where it would come too late it is refused, and costs no others their time.
    utilization = config.max_utilization + demand.promised * (1.0 - config.max_utilization)
    served = 1.0 - demand.promised * (1.0 - config.attainment)
    fewest = max(1, math.ceil(beside + demand.requests_per_s * served * work_s / utilization - 1e-9))
    for num_workers in range(fewest, MOST_WORKERS):
        if late_share(config, demand, work_s, own_s, num_workers - beside) <= allowed:
            return num_workers
    return MOST_WORKERS


# ---- decode -------------------------------------------------------------------------------------------------------------


def seats(spec: WorkerSpec, context: float) -> float:
    """Sequences of `context` tokens that a worker has room for; the last block of each is half full."""
    bounds = [math.inf]
    if spec.max_num_seqs:
        bounds.append(spec.max_num_seqs)
    if spec.num_blocks:
        bounds.append(spec.num_blocks * spec.block_size / (context + spec.block_size / 2))
    return max(1.0, min(bounds))


def decode_step_s(curve: StepCurve, num_seqs: float, context: float) -> float:
    rows = max(0.0, num_seqs - curve.knee)
    return curve.fixed_s + curve.per_row_s * rows + num_seqs * (curve.per_sequence_s + curve.per_context_s * context)


def sequences(curve: StepCurve, token_rate: float, context: float) -> float:
    """Sequences on a worker that is to give `token_rate` tokens a second, each one in a step: n = token_rate * step(n). inf: it cannot."""
    slope = curve.per_sequence_s + curve.per_context_s * context
    below = 1.0 - token_rate * slope
    if below > 0.0:
        num_seqs = token_rate * curve.fixed_s / below
        if num_seqs <= curve.knee or not curve.per_row_s:
            return num_seqs
    above = 1.0 - token_rate * (slope + curve.per_row_s)
    return max(curve.knee, token_rate * (curve.fixed_s - curve.per_row_s * curve.knee) / above) if above > 0.0 else math.inf


def decode_need(config: PolicyConfig, spec: WorkerSpec, demand: OfferedLoad) -> int:
    """The least decode workers whose steps keep the TPOT target and that have seats and blocks for the sequences that are there at a time.
    A target that a sequence alone would miss is left out: more workers would not mend it. 0 without load."""
    if demand.decode_per_s <= 0.0 and demand.running <= 0.0:
        return 0
    if spec.curve is None:
        by_seats = math.ceil(demand.running / (seats(spec, demand.context) * config.max_utilization) - 1e-9)
        return max(1, by_seats, _by_tokens(config, spec, demand.decode_per_s))
    for num_workers in range(1, MOST_WORKERS):
        if decode_holds(config, spec, demand, num_workers):
            return num_workers
    return MOST_WORKERS


def workers_needed(config: PolicyConfig, role: Role, spec: WorkerSpec, demand: OfferedLoad) -> int:
    return prefill_need(config, spec, demand) if role == "prefill" else decode_need(config, spec, demand)


def decode_holds(config: PolicyConfig, spec: WorkerSpec, demand: OfferedLoad, num_workers: float) -> bool:
    """Returns whether so many decode workers keep the target, with room for all sequences."""
    curve, context = _curve(spec), demand.context
    later = max(0.0, demand.output_tokens - 1.0)
    limit = config.tpot_ms / 1e3 - (config.hand_over_s / later if later else 0.0)
    if decode_step_s(curve, 1.0, context) > limit:
        limit = math.inf
    room = seats(spec, context)
    mean = sequences(curve, demand.decode_per_s / num_workers, context)
    if mean > room * config.max_utilization:
        return False
    noise = NormalDist().inv_cdf(config.attainment) * math.sqrt(mean / num_workers)
    if mean + max(0.0, noise) > room:
        return False
    busy = mean + _LIFE_NOISE * max(0.0, noise)
    return decode_step_s(curve, max(1.0, busy), context) <= limit


def can_help(config: PolicyConfig, role: Role, spec: WorkerSpec, demand: OfferedLoad) -> bool:
    """Returns whether more workers would mend a missed target: not where a request alone misses it."""
    if spec.curve is None or demand.requests_per_s <= 0.0:
        return True
    if role == "decode":
        return decode_step_s(spec.curve, 1.0, demand.context) <= config.tpot_ms / 1e3
    left = config.ttft_ms / 1e3 - config.edge_s
    own_s = own_times_s(spec, demand)
    return sum(own > left for own in own_s) / len(own_s) < 1.0 - config.attainment


# ---- both ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededWorkers:
    """So many of each role, and in sum: more than the two where some are for either."""

    prefill: int
    decode: int
    total: int

    def of(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode

    def less(self, others: Mapping[Role, int]) -> NeededWorkers:
        """Without what so many others do."""
        prefill, decode = (max(0, self.of(role) - others[role]) for role in others)
        return NeededWorkers(prefill=prefill, decode=decode, total=max(0, self.total - sum(others.values())))


def needed(
    config: PolicyConfig, specs: Mapping[Role, WorkerSpec], demands: Mapping[Role, OfferedLoad], *, both_roles: bool
) -> NeededWorkers:
    """The least workers for loads of prompts and of answers. `both_roles`: each takes work of either role, so that what counts is their
    sum; a role has its share of the work in whole workers, and what is left over is for either."""
    prefill, decode = (workers_needed(config, role, specs[role], demands[role]) for role in ("prefill", "decode"))
    if not (both_roles and prefill and decode and specs["prefill"].curve and specs["decode"].curve):
        return NeededWorkers(prefill=prefill, decode=decode, total=prefill + decode)
    # Where more decode than on average, it is prompts that give way: steps become no longer.
    even = replace(config, attainment=0.5)
    parts = range(1, decode * _PARTS)
    part = 1 + bisect_left(parts, True, key=lambda n: decode_holds(even, specs["decode"], demands["decode"], n / _PARTS))
    decoding = part / _PARTS
    total = min(prefill + decode, _prompt_servers(config, specs["prefill"], demands["prefill"], beside=decoding))
    return NeededWorkers(prefill=int(total - decoding), decode=int(decoding), total=total)


def _by_tokens(config: PolicyConfig, spec: WorkerSpec, tokens_per_s: float) -> int:
    """Without a curve. A worker that never had enough to do is taken to be enough: once it is not, what it can do is known."""
    if spec.tokens_per_s <= 0.0:
        return 1
    return min(MOST_WORKERS, max(1, math.ceil(tokens_per_s / (spec.tokens_per_s * config.max_utilization) - 1e-9)))


def _curve(spec: WorkerSpec) -> StepCurve:
    assert spec.curve is not None
    return spec.curve
