"""How many workers of each role: the cheapest that keep the targets at a rate, or those of a number of GPUs that keep them at the highest.

Every candidate is judged by simulating it. Arithmetic on the curves only says where to begin, and which candidates are not worth trying:

    prefill    rate · the work of a prompt in full steps                 no fewer workers can keep up
    decode     rate / (sequences whose step keeps TPOT / time that each stays)

Searched are (prefill, decode) pairs, and aggregated workers, among which KV never moves, for each of some step budgets. Workers of a pair
take work of both roles (`fixed_roles`: they do not), so it is their sum that carries a rate, and they are divided by the work of each role.
More workers are taken to be never worse.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.plan.goodput import Trial, find_knee, simulate, try_rate
from twostep.lab.plan.workload import PlannedWorkload
from twostep.lab.simulator.cluster import SimulatedDeployment, SimulatedRequest
from twostep.lab.simulator.engine import EngineSpec
from twostep.step_curve import StepWorkload, chunk_pairs

AGGREGATED_BUDGETS = (128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
# What arithmetic says is exceeded by this much at most before a simulation is asked.
_SLACK = 1.15
_MOST_WORKERS = 4096
# Splits that are tried to either side of the division by work.
_NEAR = 2
# About how long parts of a search take, a step budget of aggregated workers being 1: for its progress alone.
_PAIR, _KNEE = 3, 6
# To which highest rates are found, of themselves.
_PRECISION = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Says what is to be planned. `base` has the workers' specs and the hand-over; its numbers of workers do not matter. Prices are of one
    worker (all its GPUs) for an hour; an aggregated worker costs what a prefill worker does."""

    base: SimulatedDeployment
    workload: PlannedWorkload
    targets: LatencyTargets
    prefill_hour: float = 1.0
    decode_hour: float = 1.0
    budgets: Sequence[int] = AGGREGATED_BUDGETS
    fixed_roles: bool = False
    seed: int = 0
    # Of arrivals in each simulation; None: a minute, or what it takes to judge by.
    seconds: float | None = None

    def split(self, num_prefill: int, num_decode: int) -> SimulatedDeployment:
        return replace(self.base.sized(num_prefill, num_decode), both_roles=not self.fixed_roles)

    def aggregated(self, budget: int, num_workers: int) -> SimulatedDeployment:
        # Launching prompts takes the host about as long as the device needs for a small chunk: steps are planned at once.
        spec = replace(self.base.decode, step_tokens=budget, ahead_s=math.inf, max_step_s=0.0)
        return replace(self.base, num_prefill=0, num_decode=num_workers, decode=spec, both_roles=False)

    def hour(self, deployment: SimulatedDeployment) -> float:
        """Returns the cost of an hour."""
        if deployment.aggregated:
            return deployment.num_decode * self.prefill_hour
        return deployment.num_prefill * self.prefill_hour + deployment.num_decode * self.decode_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A deployment that keeps the targets. `goodput` is the highest rate at which it does; `trial` the simulation at the rate that it is
    planned for."""

    deployment: SimulatedDeployment
    hour: float
    trial: Trial
    goodput: float

    @property
    def goodput_per_worker(self) -> float:
        return self.goodput / self.deployment.num_workers

    @property
    def worth(self) -> float:
        """Goodput for the money."""
        return self.goodput / self.hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best of either kind; None: none keeps the targets. `tried` counts simulations."""

    disaggregated: Option | None
    aggregated: Option | None
    by_rate: bool
    tried: int

    @property
    def best(self) -> Option:
        """For a rate the cheaper one, and of equally cheap ones, as for a number of workers, that of the higher goodput for the money."""
        options = [option for option in (self.disaggregated, self.aggregated) if option is not None]
        return min(options, key=lambda option: (option.hour if self.by_rate else 0.0, -option.worth))

    @property
    def gain(self) -> float | None:
        """Goodput for the money of disaggregated over aggregated, less 1; None: one of them keeps the targets at no rate."""
        if self.disaggregated is None or self.aggregated is None:
            return None
        return self.disaggregated.worth / self.aggregated.worth - 1


Report = Callable[[str, float], None]  # told what was tried, and about which share of the search is done


def plan_for_rate(question: Question, rate: float, report: Report = lambda line, share: None) -> Plan:
    """The cheapest deployments that keep the targets at `rate` requests a second. Raises InvalidRequest if none does."""
    search = _Search(question, report, total=_PAIR + len(question.budgets) + 2 * _KNEE)
    search.refuse_impossible()
    pair = search.cheapest_pair(rate)
    search.done += _PAIR
    alike = search.cheapest_aggregated(rate)
    if pair is None and alike is None:
        raise InvalidRequest(
            f"no deployment of up to {_MOST_WORKERS} workers keeps {question.targets} at {rate:g} requests/s; relax a target"
        )
    return Plan(disaggregated=search.option(pair, rate), aggregated=search.option(alike, rate), by_rate=True, tried=search.tried)


def plan_for_workers(question: Question, num_workers: int, report: Report = lambda line, share: None) -> Plan:
    """Finds for so many workers the split, and the step budget without a split, that keep the targets at the highest rate. Raises
    InvalidRequest if none does at any."""
    search = _Search(question, report)
    search.refuse_impossible()
    splits = search.splits(num_workers)
    search.total = _PAIR * len(splits) + len(question.budgets)
    pair = search.best_of(splits)
    alike = search.best_of([question.aggregated(budget, num_workers) for budget in question.budgets])
    if pair is None and alike is None:
        raise InvalidRequest(f"{num_workers} workers keep {question.targets} at no rate; relax a target, or shorten prompts")
    return Plan(disaggregated=pair, aggregated=alike, by_rate=False, tried=search.tried)


@dataclass(slots=True)
class _Search:
    question: Question
    report: Report
    total: int = 1
    done: int = 0
    tried: int = 0
    _sample: list[SimulatedRequest] = field(default_factory=list)
    _known: dict[tuple[SimulatedDeployment, float], Trial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sample = self.question.workload.sample()

    # ---- judging ----------------------------------------------------------------------------------------------------

    def met(self, deployment: SimulatedDeployment, rate: float) -> bool:
        return self.trial(deployment, rate, to_the_end=False).met

    def trial(self, deployment: SimulatedDeployment, rate: float, *, to_the_end: bool) -> Trial:
        known = self._known.get((deployment, rate))
        if known is not None and not (to_the_end and known.run.stopped):
            return known
        question = self.question
        trial = try_rate(
            deployment,
            question.workload,
            rate,
            question.targets,
            seed=question.seed,
            seconds=question.seconds,
            to_the_end=to_the_end,
        )
        self.tried += 1
        self._known[deployment, rate] = trial
        self.report(f"{deployment.name} at {rate:.4g} requests/s: {'kept' if trial.met else 'missed'}", self.done / self.total)
        return trial

    def option(self, deployment: SimulatedDeployment | None, rate: float) -> Option | None:
        if deployment is None:
            return None
        goodput = self.knee(deployment, guess=rate)
        self.done += _KNEE
        trial = self.trial(deployment, rate, to_the_end=True)
        return Option(deployment=deployment, hour=self.question.hour(deployment), trial=trial, goodput=goodput)

    def knee(self, deployment: SimulatedDeployment, guess: float) -> float:
        return find_knee(lambda rate: self.met(deployment, rate), guess=guess, precision=_PRECISION)

    def refuse_impossible(self) -> None:
        """Raises InvalidRequest where a request that is alone misses a target as often as not."""
        question = self.question
        ordinary = sorted(self._sample, key=lambda r: r.num_uncached)[len(self._sample) // 2]
        alone = replace(ordinary, arrival_s=0.0)
        missed: list[str] = []
        for deployment in (replace(question.split(1, 1), both_roles=False), question.aggregated(max(question.budgets), 1)):
            latency = simulate(deployment, [alone]).served[0].latency
            if not (missed := list(question.targets.missed(latency))):
                return
        tpot = "" if latency.tpot_s is None else f", TPOT {latency.tpot_s * 1e3:.1f} ms"
        raise InvalidRequest(
            f"no number of workers keeps {question.targets}: alone, a request of {alone.num_prompt} tokens misses {', '.join(missed)} "
            f"(TTFT {latency.ttft_s * 1e3:.0f} ms{tpot}); relax these targets, or take faster workers"
        )

    # ---- a number of workers ----------------------------------------------------------------------------------------

    def splits(self, num_workers: int) -> Sequence[SimulatedDeployment]:
        """Those to look at: where roles are not fixed, those near the division by work."""
        near = range(1, num_workers)
        if not self.question.fixed_roles and num_workers > 1:
            middle = self.by_work(num_workers).num_prefill
            near = range(max(1, middle - _NEAR), min(num_workers, middle + _NEAR + 1))
        return [self.question.split(num_prefill, num_workers - num_prefill) for num_prefill in near]

    def by_work(self, num_workers: int) -> SimulatedDeployment:
        """So many workers, 2 at least, divided in proportion to the work of each role."""
        prefill, decode = self._work_s()
        num_prefill = min(num_workers - 1, max(1, round(num_workers * prefill / (prefill + decode))))
        return self.question.split(num_prefill, num_workers - num_prefill)

    def _work_s(self) -> tuple[float, float]:
        """Seconds of a worker that a request takes of each role."""
        base, targets = self.question.base, self.question.targets
        assert base.prefill is not None
        return prompt_work_s(base.prefill, self._sample), 1 / decode_rate(base.decode, self._sample, targets)

    def best_of(self, deployments: Sequence[SimulatedDeployment]) -> Option | None:
        """Returns the option of the highest goodput. The most promising are tried first, those that arithmetic rules out not at all."""
        promising = sorted(((self.most_rate(d), d) for d in deployments), key=lambda pair: (self._strain(pair[1]), -pair[0]))
        best: tuple[float, SimulatedDeployment] | None = None
        for most, deployment in promising:
            if best is None or (most > best[0] and self.met(deployment, best[0] * 1.001)):
                goodput = self.knee(deployment, guess=most * 0.8 if best is None else best[0] * 1.02)
                if goodput > 0 and (best is None or goodput > best[0]):
                    best = goodput, deployment
            self.done += 1 if deployment.aggregated else _PAIR
        if best is None:
            return None
        goodput, deployment = best
        trial = self.trial(deployment, goodput, to_the_end=True)
        return Option(deployment=deployment, hour=self.question.hour(deployment), trial=trial, goodput=goodput)

    def most_rate(self, deployment: SimulatedDeployment) -> float:
        """No deployment keeps its targets beyond this rate."""
        sample, targets = self._sample, self.question.targets
        if deployment.aggregated or deployment.both_roles:
            return deployment.num_workers / prompt_work_s(deployment.decode, sample) * _SLACK
        assert deployment.prefill is not None
        prefill = deployment.num_prefill / prompt_work_s(deployment.prefill, sample)
        return min(prefill, deployment.num_decode * decode_rate(deployment.decode, sample, targets)) * _SLACK

    def _strain(self, deployment: SimulatedDeployment) -> float:
        """How far a full step is from the longest that the targets leave, if that is known. Orders budgets, and rules out none."""
        targets, spec = self.question.targets, deployment.decode
        limits = [ms / 1e3 for ms in (targets.gap_ms, targets.tpot_ms) if ms is not None]
        if not deployment.aggregated or not limits:
            return 0.0
        return abs(math.log(spec.prompt_curve.step_s(StepWorkload(prompt_tokens=spec.step_tokens)) / limits[0]))

    # ---- a rate -----------------------------------------------------------------------------------------------------

    def cheapest_pair(self, rate: float) -> SimulatedDeployment | None:
        """Fixed roles: prefill workers from the least that can keep up; for each number of them the least decode workers that will do."""
        prefill_s, decode_s = self._work_s()
        if not self.question.fixed_roles:
            least = max(2, math.ceil(rate * prefill_s / _SLACK))
            return self._fewest(self.by_work, rate, least, 8 * least + 8)
        least_prefill = max(1, math.ceil(rate * prefill_s / _SLACK))
        least_decode = max(1, math.ceil(rate * decode_s / _SLACK))
        best: SimulatedDeployment | None = None
        for num_prefill in range(least_prefill, _MOST_WORKERS):
            most = self._most_decode(best, num_prefill, least_decode)
            if most < least_decode:
                break
            found = self._fewest(partial(self.question.split, num_prefill), rate, least_decode, most)
            if found is not None:
                best = found
            elif best is None and num_prefill > 4 * least_prefill + 8:
                break
        return best

    def _most_decode(self, best: SimulatedDeployment | None, num_prefill: int, least_decode: int) -> int:
        """Decode workers beside so many prefill workers that would still be cheaper than `best`."""
        if best is None:
            return 4 * least_decode + 8
        question = self.question
        left = question.hour(best) - num_prefill * question.prefill_hour
        return min(best.num_decode - 1, math.ceil(left / question.decode_hour - 1e-9) - 1) if question.decode_hour else best.num_decode - 1

    def cheapest_aggregated(self, rate: float) -> SimulatedDeployment | None:
        """Returns the fewest workers, of any step budget."""
        best: SimulatedDeployment | None = None
        for budget in self.question.budgets:
            least = max(1, math.ceil(rate * prompt_work_s(self.question.aggregated(budget, 1).decode, self._sample) / _SLACK))
            most = 8 * least + 8 if best is None else best.num_decode - 1
            found = self._fewest(partial(self.question.aggregated, budget), rate, least, most)
            best = best if found is None else found
            self.done += 1
        return best

    def _fewest(self, sized: Callable[[int], SimulatedDeployment], rate: float, least: int, most: int) -> SimulatedDeployment | None:
        """In growing strides from `least`, then by bisection; None: not even `most` will do."""
        if most < least:
            return None
        stride = 1
        while not self.met(sized(high := min(most, least + stride - 1)), rate):
            if high == most:
                return None
            least, stride = high + 1, 2 * stride
        return sized(least + bisect_left(range(least, high), True, key=lambda num_workers: self.met(sized(num_workers), rate)))


# ---- arithmetic ---------------------------------------------------------------------------------------------------------


def prompt_work_s(spec: EngineSpec, sample: Sequence[SimulatedRequest]) -> float:
    """Seconds of a worker that a prompt takes at least, on average: its share of full steps."""
    curve = spec.prompt_curve
    rows = sum(r.num_uncached for r in sample) / len(sample)
    pairs = sum(chunk_pairs(r.num_uncached, r.num_prompt - r.num_uncached) for r in sample) / len(sample)
    share = max(0.0, curve.fixed_s - curve.per_row_s * curve.knee) / spec.step_tokens
    return max(1e-9, rows * (curve.per_row_s + share) + pairs * curve.per_pair_s)


def decode_rate(spec: EngineSpec, sample: Sequence[SimulatedRequest], targets: LatencyTargets) -> float:
    """Requests a second that one decode worker can keep up with, with as many sequences as its seats, its blocks and the TPOT target
    allow."""
    num_later = sum(r.num_output - 1 for r in sample) / len(sample)
    if num_later <= 0:
        return float("inf")
    context = sum((r.num_prompt + r.num_output / 2) * (r.num_output - 1) for r in sample) / len(sample) / num_later
    taken = context + spec.num_state_blocks * spec.block_size
    seats = max(1, min(spec.max_num_seqs, spec.step_tokens, int(spec.num_tokens / taken)))
    limit = float("inf") if targets.tpot_ms is None else targets.tpot_ms / 1e3

    def step_s(num_seqs: int) -> float:
        return spec.curve.decode_step_s(num_seqs, round(num_seqs * context))

    # The most that keep the target; one in any case.
    num_seqs = 1 + bisect_left(range(2, seats + 1), True, key=lambda n: step_s(n) > limit)
    return num_seqs / (step_s(num_seqs) * num_later)
