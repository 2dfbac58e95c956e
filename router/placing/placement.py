"""Which workers serve a request: a pure function of a snapshot.

1. who can     ready, not draining, large enough; in pairs of two workers with a layout and a transport in common, or each alone
2. predict     what each would do for this request, and to the others                                            prediction.py
3. choose      first among those that keep the targets (else those that miss them by least), the least cost in seconds. KV moves only
               where that gains more than the prediction's own noise: so a fleet is never worse, as predicted, than each worker alone

The two sides of a pair are chosen apart, among workers of one kind (layout and transports), and then joined: what a prefill worker decides
(time to the first token) and what a decode worker decides (hand-over, time per token) add up. So it is linear in the number of workers.

What differs by less than is known about loads is equal: of such near-equals two are drawn by a hash of the request, and the better one is
taken (Mitzenmacher, "The power of two choices in randomized load balancing", 2001). The same request falls the same way everywhere; many
are spread, and several routers with the same stale view do not all run to the one that looks best.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from twostep.cluster.convertible import HOST_TRANSPORTS, joinable, reasons_against
from twostep.cluster.prediction import (
    Candidate,
    Decoding,
    MeanLoad,
    PlacementRequest,
    Prediction,
    Predictor,
    Snapshot,
    conversion_cost,
    fallback_curve,
    hand_over_s,
    mean_load,
    shares,
)
from twostep.cluster.records import LayoutRecord, WorkerRecord
from twostep.version_skew import together

__all__ = ["Candidate", "Ground", "MeanLoad", "NoPlacement", "Placement", "PlacementRequest", "Shortage", "Snapshot", "place"]

# Of what hangs on the load of the best one: what comes within it is as good.
_NEAR = 0.05
# Gained by less than that, and that share of what hangs on the loads in which they differ, KV is not moved.
_LEAST_GAIN_S = 1e-3
_LEAST_RETRY_S, _MOST_RETRY_S = 0.05, 30.0
_MAX_PAIRS_NAMED = 4
# Costs beyond that are of targets that are missed, KV that is rounded, workers that are full.
_MOST_SECONDS = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to serve a request, as predicted: `others_s`, what everybody else loses by it; `cost`, what ways are compared by."""

    prefill: str | None
    decode: str
    ttft_s: float
    tpot_s: float
    gap_s: float
    others_s: float
    cost: float


class Ground(Enum):
    """Says what speaks for moving KV, or for keeping it where it was computed."""

    ONLY_WAY = "only_way"  # there is no pair, or no worker that may do it alone
    CHEAPER = "cheaper"  # it costs less, in seconds of everybody concerned
    NEAR = "near"  # it is kept: moving it would gain less than the prediction's noise
    UNFIT = "unfit"  # the other way misses a target by more, rounds the KV, or is full


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The workers that serve a request. `prefill` is None where one worker computes the prompt and keeps it: one that decodes, or for an
    embedding one that hands over, and both are `decode` here. `compared` has the best pair
    and the best worker alone, `why` what spoke for the one taken, and `ground` of which kind that is.

    Of the choice, as predicted now: time to the first token, time per token after it, whether both are within the demand's targets, and if
    not, after how many seconds it is worth asking again (0 otherwise). Not `attainable`: these workers would miss them without any load.
    """

    prefill: WorkerRecord | None
    decode: WorkerRecord
    cost: float
    reason: str
    predicted_ttft_s: float = 0.0
    predicted_tpot_s: float = 0.0
    predicted_gap_s: float = 0.0
    predicted_others_s: float = 0.0
    compared: tuple[Way, ...] = ()
    why: str = ""
    ground: Ground = Ground.ONLY_WAY
    meets_targets: bool = True
    attainable: bool = True
    retry_after_s: float = 0.0

    @property
    def computing(self) -> WorkerRecord:
        """Returns the worker that computes the prompt."""
        return self.prefill or self.decode

    @property
    def path(self) -> str:
        """Returns what becomes of the KV: "handed_over" to another worker, or "local", kept where it was computed."""
        return "local" if self.prefill is None else "handed_over"


class Shortage(Enum):
    MISSING = "missing"  # a role has no worker that could serve this request
    NO_TRANSPORT = "no transport"  # workers are there, but KV cannot travel between any two of them
    EXCLUDED = "excluded"  # every pair that could serve it has an excluded worker
    INCOMPATIBLE = "incompatible"  # no prefill worker's KV means anything to any decode worker
    TOO_LARGE = "too large"  # no live worker could ever hold it


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlacement:
    """Says why no workers can serve the request now; `reason` is a sentence for the client."""

    shortage: Shortage
    reason: str


def place(snapshot: Snapshot, demand: PlacementRequest) -> Placement | NoPlacement:
    """Returns the best pair, or the best decode worker alone. Ties fall by a hash of request and worker: the same for the same request,
    spread evenly over requests."""
    if demand.embeds:
        return _place_embedding(snapshot, demand)
    prefill = [c for c in snapshot.prefill if _serves(c.record)]
    decode = [c for c in snapshot.decode if _serves(c.record)]
    missing = [] if prefill or any(_alone(c.record) for c in decode) else ["prefill"]
    missing += [] if decode else ["decode"]
    if missing:
        return NoPlacement(shortage=Shortage.MISSING, reason=_missing(missing, snapshot))
    total = demand.num_tokens + demand.max_new_tokens
    prompt = demand.num_prompt_tokens or demand.num_tokens
    fitting_prefill = [c for c in prefill if _fits(c.record, demand.num_tokens, total, prompt)]
    fitting_decode = [c for c in decode if _fits(c.record, total, total, prompt)]
    if not fitting_decode or not (fitting_prefill or any(_alone(c.record) for c in fitting_decode)):
        return NoPlacement(shortage=Shortage.TOO_LARGE, reason=_too_large(demand, prefill, decode))
    best = _Choice(fitting_prefill, fitting_decode, demand, skip_excluded=True).best()
    if best is not None:
        return best
    if _Choice(fitting_prefill, fitting_decode, demand, skip_excluded=False).best() is not None:
        return NoPlacement(shortage=Shortage.EXCLUDED, reason="every worker that could serve the request is full or has just failed")
    versions = {c.record.version for c in fitting_prefill}, {c.record.version for c in fitting_decode}
    if fitting_prefill and not any(together(there, here) for there in versions[0] for here in versions[1]):
        return NoPlacement(shortage=Shortage.INCOMPATIBLE, reason=_versions_apart(fitting_prefill, fitting_decode))
    layouts = {c.record.layout for c in fitting_prefill}, {c.record.layout for c in fitting_decode}
    if not any(there == here or joinable(there, here) for there in layouts[0] for here in layouts[1]):
        return NoPlacement(shortage=Shortage.INCOMPATIBLE, reason=_incompatible(fitting_prefill, fitting_decode))
    return NoPlacement(shortage=Shortage.NO_TRANSPORT, reason=_no_transport(fitting_prefill, fitting_decode))


def _place_embedding(snapshot: Snapshot, demand: PlacementRequest) -> Placement | NoPlacement:
    """Returns the best worker among those that hand over."""
    prefill = [c for c in snapshot.prefill if _serves(c.record)]
    if not prefill:
        return NoPlacement(shortage=Shortage.MISSING, reason=_missing(["prefill"], snapshot, _FOR_EMBEDDINGS))
    fitting = [c for c in prefill if _fits(c.record, demand.num_tokens, demand.num_tokens, demand.num_tokens)]
    if not fitting:
        return NoPlacement(shortage=Shortage.TOO_LARGE, reason=_too_large(demand, prefill, []))
    best = _Choice(fitting, [], demand, skip_excluded=True).best_for_prompt()
    excluded = NoPlacement(shortage=Shortage.EXCLUDED, reason="every prefill worker is full or has just failed")
    return excluded if best is None else best


def _alone(record: WorkerRecord) -> bool:
    """Says whether it may compute the prompt and keep the sequence."""
    return record.local_prefill and record.takes_over


def _serves(record: WorkerRecord) -> bool:
    return record.ready and not record.draining


def _fits(record: WorkerRecord, num_tokens: int, total: int, prompt: int) -> bool:
    """Says whether `num_tokens` fit its pool, `total` its context, and the `prompt` one of its steps, where an encoder reads it in one. A
    decode worker needs that, too: it computes a sequence again that gave way."""
    in_one_step = not record.max_prompt_tokens or prompt <= record.max_prompt_tokens
    return in_one_step and total <= record.max_model_len and num_tokens <= record.layout.num_tokens_in(record.num_blocks)


# Layout, transports and version: all that says whether two workers can be paired, and by which transport. Layouts are numbered: hashing one
# takes longer than predicting.
_Kind = tuple[int, tuple[str, ...], str]
# By which transports are compared: a short prompt's KV, so that latency counts too.
_SOME_BYTES = 64e6


class _Choice:
    """Among workers that are large enough."""

    def __init__(self, prefill: Sequence[Candidate], decode: Sequence[Candidate], demand: PlacementRequest, *, skip_excluded: bool) -> None:
        self._demand = demand
        self._predictor = Predictor(demand, fallback_curve((*prefill, *decode)))
        # The excluded ones count where it is about loads: there is work on them.
        means = {id(c): mean_load(c, demand.num_tokens) for c in (*prefill, *decode)}
        for_prompts, for_answers = (shares([(c, means[id(c)]) for c in side]) for side in (prefill, decode))
        both = replace(for_prompts, seqs=for_answers.seqs)
        at = {
            id(c): self._predictor.decoding(c, means[id(c)], both if c.record.hands_over else for_answers)
            for c in (*prefill, *decode)
            if not (skip_excluded and c.excluded)
        }
        computes = {key for key, each in at.items() if not (skip_excluded and each.candidate.no_prompts)}
        self._sources = [at[id(c)] for c in prefill if id(c) in computes]
        self._targets = [at[id(c)] for c in decode if id(c) in at]
        self._alone = [at[id(c)] for c in decode if id(c) in computes and _alone(c.record)]
        self._layouts: list[LayoutRecord] = []
        self._numbers: dict[LayoutRecord, int] = {}
        self._numbers_by_id: dict[int, int] = {}

    def best(self) -> Placement | None:
        pair, alone = self._best_pair(), self._best_alone()
        if pair is None or alone is None:
            only = pair or alone
            return None if only is None else self._placement(only, [only], Ground.ONLY_WAY, "there is no other way")
        gain, least = alone.cost - pair.cost, _LEAST_GAIN_S + _NEAR * abs(alone.load_s - pair.load_s)
        if 0 < gain <= least:
            why = f"a pair gains {_seconds(gain)}, where {_seconds(least)} is worth a move"
            return self._placement(alone, [alone, pair], Ground.NEAR, why)
        taken, other, name = (pair, alone, "the best worker alone") if gain > least else (alone, pair, "a pair")
        if abs(gain) >= _MOST_SECONDS:
            return self._placement(taken, [taken, other], Ground.UNFIT, f"{name} misses a target by more, rounds the KV, or is full")
        return self._placement(taken, [taken, other], Ground.CHEAPER, f"{name} costs {_seconds(abs(gain))} more")

    def best_for_prompt(self) -> Placement | None:
        """Returns the worker that computes the prompt, where nothing comes after it."""
        if not self._sources:
            return None
        picked = self._pick([self._predictor.local(at) for at in self._sources])
        only = _Served(None, picked, picked.cost)
        return self._placement(only, [only], Ground.ONLY_WAY, "nothing comes after the prompt")

    def _best_pair(self) -> _Served | None:
        sources: dict[_Kind, list[Prediction]] = {}
        for at in self._sources:
            sources.setdefault(self._kind(at.candidate), []).append(self._predictor.prefill(at))
        targets: dict[_Kind, list[Decoding]] = {}
        for at in self._targets:
            targets.setdefault(self._kind(at.candidate), []).append(at)
        rails = [
            (there, here, transport) for there in sources for here in targets if (transport := self._transport(there, here)) is not None
        ]
        reading = {
            (here, transport): [self._predictor.decode(at, transport) for at in targets[here]]
            for here, transport in {(here, transport) for _, here, transport in rails}
        }
        pairs: list[_Served] = []
        for there, here, transport in rails:
            converting = conversion_cost(self._layouts[there[0]], self._layouts[here[0]], self._demand.num_tokens)
            pairs += [_Served(p, d, p.cost + d.cost + converting) for p, d in self._pick_two(sources[there], reading[here, transport])]
        return min(pairs, key=lambda pair: pair.cost, default=None)

    def _pick_two(self, sources: Sequence[Prediction], targets: Sequence[Prediction]) -> Sequence[tuple[Prediction, Prediction]]:
        """Returns the best of either side; where that is the same worker, each with the best other one."""
        p, d = self._pick(sources), self._pick(targets)
        if _name(p) != _name(d):
            return [(p, d)]
        other_sources = [each for each in sources if _name(each) != _name(d)]
        other_targets = [each for each in targets if _name(each) != _name(p)]
        pairs = [(self._pick(other_sources), d)] if other_sources else []
        return [*pairs, (p, self._pick(other_targets))] if other_targets else pairs

    def _best_alone(self) -> _Served | None:
        if not self._alone:
            return None
        picked = self._pick([self._predictor.local(at) for at in self._alone])
        return _Served(None, picked, picked.cost)

    def _kind(self, candidate: Candidate) -> _Kind:
        layout = candidate.record.layout
        number = self._numbers_by_id.get(id(layout))
        if number is None:
            number = self._numbers_by_id[id(layout)] = self._numbers.setdefault(layout, len(self._layouts))
            if number == len(self._layouts):
                self._layouts.append(layout)
        return number, candidate.record.transports, candidate.record.version

    def _transport(self, there: _Kind, here: _Kind) -> str | None:
        """Returns how KV goes: by the fastest in common, of those through the reader's host memory where it has to be cut anew."""
        if not together(there[2], here[2]):
            return None
        common = [transport for transport in there[1] if transport in here[1]]
        if there[0] != here[0]:
            common = [transport for transport in common if transport in HOST_TRANSPORTS]
            if common and not joinable(self._layouts[there[0]], self._layouts[here[0]]):
                return None
        return min(common, key=lambda transport: hand_over_s(_SOME_BYTES, transport), default=None)

    def _pick(self, predictions: Sequence[Prediction]) -> Prediction:
        """Returns the better of two among those that are near the best."""
        best = min(predictions, key=lambda p: p.cost)
        limit = best.cost + _NEAR * best.load_s
        near = [p for p in predictions if p.cost <= limit]
        if len(near) == 1:
            return best
        drawn = sorted((_tie(self._demand.request_id, p.candidate.record.worker_id), i) for i, p in enumerate(near))[:2]
        first, second = near[drawn[0][1]], near[drawn[1][1]]
        return second if second.cost < first.cost else first

    def _placement(self, served: _Served, compared: Sequence[_Served], ground: Ground, why: str) -> Placement:
        demand, p, d = self._demand, served.prefill, served.decode
        computing, way = p or d, served.way
        late = _beyond(way.ttft_s, demand.ttft_ms), _beyond(way.tpot_s, demand.tpot_ms), _beyond(way.gap_s, demand.gap_ms)
        met = not any(late)
        # A queue becomes shorter by a second each second. Steps become shorter as answers end.
        retry = late[0] + demand.max_new_tokens * late[1]
        decode = f"decode {way.decode}: {d.candidate.cached_tokens} cached"
        prefill = "the prompt computed there" if p is None else f"prefill {way.prefill}: {p.candidate.cached_tokens} cached"
        figures = f"{way.ttft_s * 1e3:.1f} ms, then {way.tpot_s * 1e3:.2f} ms a token"
        idle_ttft = self._predictor.idle_ttft_s(computing.candidate)
        never = _beyond(idle_ttft, demand.ttft_ms) or _beyond(d.idle_tpot_s, demand.tpot_ms) or _beyond(d.idle_gap_s, demand.gap_ms)
        return Placement(
            prefill=None if p is None else p.candidate.record,
            decode=d.candidate.record,
            cost=served.cost,
            reason=f"{prefill} of {demand.num_tokens} tokens; {decode}; {figures}; {why}",
            predicted_ttft_s=way.ttft_s,
            predicted_tpot_s=way.tpot_s,
            predicted_gap_s=way.gap_s,
            predicted_others_s=way.others_s,
            compared=tuple(each.way for each in compared),
            why=why,
            ground=ground,
            meets_targets=met,
            attainable=not never,
            retry_after_s=0.0 if met else min(_MOST_RETRY_S, max(_LEAST_RETRY_S, retry)),
        )


@dataclass(frozen=True, slots=True)
class _Served:
    """A way to serve the request. `prefill` None: one worker does all of it."""

    prefill: Prediction | None
    decode: Prediction
    cost: float

    @property
    def load_s(self) -> float:
        return self.decode.load_s + (0.0 if self.prefill is None else self.prefill.load_s)

    @property
    def way(self) -> Way:
        p, d = self.prefill, self.decode
        return Way(
            prefill=None if p is None else p.candidate.record.worker_id,
            decode=d.candidate.record.worker_id,
            ttft_s=d.ttft_s if p is None else p.ttft_s,
            tpot_s=d.tpot_s,
            gap_s=d.gap_s,
            others_s=d.others_s + (0.0 if p is None else p.others_s),
            cost=self.cost,
        )


def _name(part: Prediction) -> str:
    return part.candidate.record.worker_id


def _seconds(cost: float) -> str:
    return f"{cost * 1e3:.1f} ms"


def _beyond(predicted_s: float, target_ms: float | None) -> float:
    """Returns the seconds beyond the target."""
    return 0.0 if target_ms is None else max(0.0, predicted_s - target_ms / 1e3)


def _tie(request_id: str, worker_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{request_id}/{worker_id}".encode(), digest_size=8).digest(), "little")


# ---- why not: sentences for clients and operators, with what to do -----------------------------------------------------------


_FOR_EMBEDDINGS = (
    "decode workers with --fixed-roles or --no-local-prefill make no embeddings: start a prefill worker, or one with both roles (without "
    "these flags), or repeat the request later"
)


def _missing(roles: Sequence[str], snapshot: Snapshot, advice: str = "start one, or repeat the request later") -> str:
    """Names roles of which there is no worker that takes work."""
    parts: list[str] = []
    for role in roles:
        here = snapshot.prefill if role == "prefill" else snapshot.decode
        idle = [f"{c.record.worker_id} {'is draining' if c.record.draining else 'is not ready'}" for c in here]
        parts.append(f"no {role} worker is available" + (f" ({', '.join(idle[:8])})" if idle else ""))
    return f"{' and '.join(parts)}; {advice}"


def _too_large(demand: PlacementRequest, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
    """`prefill` may be empty, where decode workers compute prompts, and `decode`, where nothing is decoded."""
    sides = [side for side in (prefill, decode) if side]
    prompt = demand.num_prompt_tokens or demand.num_tokens
    rooms = [[c.record.max_prompt_tokens or prompt for c in side] for side in sides]
    rooms_alone = [c.record.max_prompt_tokens or prompt for c in decode if _alone(c.record)]
    longest = max(min(max(side) for side in rooms), *rooms_alone, 0)
    if prompt > longest:
        # Clients do not know of the last token, which the decoder begins with.
        return (
            f"the prompt is too long: the model's encoder reads its {prompt - 1} tokens in one step, and steps of the workers have room "
            f"for {longest - 1} of one prompt; shorten it, or start workers with a higher --max-num-batched-tokens or lower --max-num-seqs"
        )
    slots = min(max(c.record.layout.num_tokens_in(c.record.num_blocks) for c in side) for side in sides)
    context = min(max(c.record.max_model_len for c in side) for side in sides)
    new, less = ("", "") if demand.embeds else (f" and up to {demand.max_new_tokens} new ones", " or ask for fewer new tokens (max_tokens)")
    return (
        f"This model's maximum context length is {context} tokens on its workers, whose KV pool has {slots}, and there are "
        f"{demand.num_tokens}{new}; shorten the prompt{less}"
    )


def _incompatible(prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
    """Returns why KV cannot be converted, for one worker of each layout; the first few pairs."""
    sides = [{c.record.layout: c.record.worker_id for c in reversed(side)} for side in (prefill, decode)]
    pairs = list(itertools.product(sides[0].items(), sides[1].items()))
    parts = [f"from {p} to {d}, {_why_not(there, here)}" for (there, p), (here, d) in pairs[:_MAX_PAIRS_NAMED]]
    if len(pairs) > _MAX_PAIRS_NAMED:
        parts.append(f"and so on for {len(pairs) - _MAX_PAIRS_NAMED} more such pairs")
    return (
        f"no prefill worker has a KV layout that any decode worker takes: {'; '.join(parts)}. "
        "Start both with the same model, and with blocks of a multiple of 4 tokens where KV is quantized"
    )


def _why_not(there: LayoutRecord, here: LayoutRecord) -> str:
    return ", ".join(reasons_against(there, here)) or f"KV is in {there.tp_size} parts there and {here.tp_size} here"


def _versions_apart(prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
    """Returns which versions are too far from each other. Each is near enough to the router's, and none of one side to any of the
    other's."""
    sides = [sorted({c.record.version for c in side}) for side in (prefill, decode)]
    return (
        f"prefill workers run {', '.join(sides[0])} and decode workers {', '.join(sides[1])}, more than one minor version apart; "
        "upgrade the older ones, or repeat the request later"
    )


def _no_transport(prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> str:
    """Says which transport is lacking where, for workers whose KV could travel."""
    sides = (("prefill", prefill), ("decode", decode))
    names = sorted({t for c in (*prefill, *decode) for t in c.record.transports})
    ids = {role: ", ".join(sorted(c.record.worker_id for c in workers)[:8]) for role, workers in sides}
    if not names:
        return f"no KV transport is ready on {ids['prefill']}, {ids['decode']}; see that Ray is up, and repeat the request later"
    parts: list[str] = []
    for name in names:
        lacking = [ids[role] for role, workers in sides if not any(name in c.record.transports for c in workers)]
        parts.append(f"KV transport {name} is not ready on {', '.join(lacking) or 'workers of one layout'}")
    return "; ".join(parts) + "; see that Ray is up, and repeat the request later"
