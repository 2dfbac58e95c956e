"""Declares the metrics of what clients get: requests by outcome, latencies by phase, tokens. The router's event loop counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from twostep.metrics.family import REQUEST_SECONDS, STEP_SECONDS, TOKENS, counter, gauge, histogram
from twostep.metrics.process import RUNNING, WAITING
from twostep.metrics.registry import MetricSample, MetricsRegistry

REQUESTS = counter(
    "twostep_requests_total",
    "Ended requests by gRPC status (OK, UNAVAILABLE, CANCELLED, ...), finish_reason (stop, length, content_filter; empty unless OK) and "
    "request_class (interactive, standard, batch).",
    ["status", "finish_reason", "request_class"],
)
REFUSED = counter(
    "twostep_requests_refused_total",
    "Requests refused, or out of time, before any worker had begun with them: bounded (too many wait, or too many of the tenant's), "
    "target_ttft, target_tpot and target_gap (could not be kept), deadline (passed in the queue), quota (an API key's tokens were used "
    "up).",
    ["reason", "request_class"],
)
SLO = counter(
    "twostep_request_slo_total",
    "Ended requests with targets (ttft_ms, tpot_ms, gap_ms), refused ones included, cancelled ones not.",
    ["request_class"],
)
SLO_ATTAINED = counter("twostep_request_slo_attained_total", "Those of them that ended OK within all of their targets.", ["request_class"])
SLO_MISSED = counter(
    "twostep_request_slo_missed_total",
    "Targets that were missed: target_ttft (also if no token came), target_tpot, target_gap; of a request refused for one, that one.",
    ["reason", "request_class"],
)
TTFT = histogram("twostep_time_to_first_token_seconds", "From the whole request at the router to a worker's first token.", REQUEST_SECONDS)
VISIBLE_TTFT = histogram(
    "twostep_time_to_first_visible_token_seconds",
    "From a request's arrival to the first text of its answer: later than the first token where a model thinks first.",
    REQUEST_SECONDS,
)
TPOT = histogram(
    "twostep_request_time_per_output_token_seconds",
    "Of an answer of two tokens or more, complete or not: the mean time of those after the first.",
    STEP_SECONDS,
)
ITL = histogram(
    "twostep_inter_token_latency_seconds",
    "Between two tokens of a request, each gap one observation; the gap after the first token and those of migrations included. Tokens "
    "of one step, some of which were drafted, have no gap between them: the mean time of a token is "
    "twostep_request_time_per_output_token_seconds.",
    STEP_SECONDS,
)
SECOND_TOKEN = histogram(
    "twostep_second_token_seconds", "From the first token to the second: of prompts handed over, what that adds.", STEP_SECONDS
)
E2E = histogram("twostep_e2e_request_latency_seconds", "From arrival to the last token, of requests that ended OK.", REQUEST_SECONDS)
QUEUE = histogram(
    "twostep_request_queue_time_seconds",
    "Until a worker computes the prompt: route and queue.",
    REQUEST_SECONDS,
    ["request_class"],
)
PHASES = histogram(
    "twostep_request_phase_seconds",
    "A phase of a request that ended OK: route (until its workers accepted it), queue (in the worker that computes the prompt), prefill, "
    "publish (after the first token), fetch (after the last block was published), first_decode, decode. Of a prompt that the decode worker "
    "computed itself, publish and fetch are 0.",
    REQUEST_SECONDS,
    ["phase"],
)
PROMPT_TOKENS = counter("twostep_prompt_tokens_total", "Prompt tokens of requests that got a first token, or an embedding.")
CACHED_TOKENS = counter("twostep_prompt_tokens_cached_total", "Those of them found in the prefix cache of the worker that computed them.")
GENERATION_TOKENS = counter("twostep_generation_tokens_total", "Tokens sent to clients.")
PROMPT_SIZES = histogram("twostep_request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
GENERATION_SIZES = histogram("twostep_request_generation_tokens", "Tokens of an answer, complete or not.", TOKENS)
ATTEMPTS = counter("twostep_request_attempts_total", "Placements that requests ran on; one for each unless a worker was lost.")
PLACEMENTS = counter(
    "twostep_request_placements_total",
    "Attempts that workers took, by path: handed_over (KV moves to another worker), local (it is kept: one worker computes the prompt and "
    "decodes); by what the worker that computes the prompt is for; and by what spoke for that: only_way (there was no other), cheaper, "
    "near (moving gains less than the prediction's noise), unfit (the other way misses a target by more, rounds the KV, or is full).",
    ["path", "worker_role", "reason"],
)
PREDICTION = histogram(
    "twostep_request_prediction_ratio",
    "What a request took over what was predicted at its placement, by path, of workers that have measured themselves. kind ttft: from the "
    "placement to the first token; tpot: of answers in one attempt. 1: as predicted, 2: twice as long.",
    (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0),
    ["kind", "path"],
)
MIGRATIONS = counter("twostep_request_migrations_total", "How often a request went on elsewhere because a worker was lost.")
STREAMS = gauge("twostep_router_streams", "Token streams open to decode workers.")
WORKERS = gauge("twostep_router_workers", "Workers that may get new work, by role.", ["worker_role"])
REFUSED_WORKERS = gauge(
    "twostep_router_refused_workers",
    "Registered workers that get no request: another model, secret or hash unit, a version too far away, a record that cannot be read. "
    "`twostep status` says which and why.",
)
LOAD_RATIO = gauge(
    "twostep_prefill_decode_load_ratio",
    "Seconds of prompts to compute per worker for prefill, for each second of answers to decode per worker for decode, by their measured "
    "curves: above 1 prefill workers are short, below 1 decode workers are. Where workers do both, the work is counted on whichever it "
    "lies. Missing while there is none.",
)
REGISTRY_CONNECTED = gauge("twostep_router_registry_connected", "1: Redis answers. 0: requests go to the workers known last.")
STALLED = gauge("twostep_router_stalled_seconds", "Since the router's event loop last came round; a quarter of a second as a rule.")

_READ = (RUNNING, WAITING, GENERATION_TOKENS, STREAMS, WORKERS, REFUSED_WORKERS, LOAD_RATIO, REGISTRY_CONNECTED, STALLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterGauges:
    """A moment of a router. `workers` by role; `load_ratio` as router/placing/load_ratio.py says."""

    num_running: int
    num_waiting: int
    num_streams: int
    workers: Mapping[str, int]
    num_refused: int = 0
    load_ratio: float | None = None
    registry_connected: bool = True
    stalled_s: float = 0.0


class RouterMetrics:
    """One thread counts. What is counted for every token costs well below a microsecond: `itl` is a tally, `num_generation_tokens` a
    plain number; both are read when somebody scrapes."""

    def __init__(self, registry: MetricsRegistry, state: Callable[[], RouterGauges]) -> None:
        """`state` is called from scrapes' threads."""
        self._state = state
        self.requests = registry.counter(REQUESTS)
        self.refused = registry.counter(REFUSED)
        self.slo = registry.counter(SLO)
        self.slo_attained = registry.counter(SLO_ATTAINED)
        self.slo_missed = registry.counter(SLO_MISSED)
        self.ttft = registry.histogram(TTFT)
        self.visible_ttft = registry.histogram(VISIBLE_TTFT)
        self.tpot = registry.histogram(TPOT)
        self.itl = registry.tally(ITL)
        self.second_token = registry.histogram(SECOND_TOKEN)
        self.e2e = registry.histogram(E2E)
        self.queue = registry.histogram(QUEUE)
        phases = registry.histogram(PHASES)
        names = ("route", "queue", "prefill", "publish", "fetch", "first_decode", "decode")
        self.phases = {name: phases.labels(name) for name in names}
        self.prompt_tokens = registry.counter(PROMPT_TOKENS)
        self.cached_tokens = registry.counter(CACHED_TOKENS)
        self.prompt_sizes = registry.histogram(PROMPT_SIZES)
        self.generation_sizes = registry.histogram(GENERATION_SIZES)
        self.attempts = registry.counter(ATTEMPTS)
        self.placements = registry.counter(PLACEMENTS)
        self.prediction = registry.histogram(PREDICTION)
        self.migrations = registry.counter(MIGRATIONS)
        self.num_generation_tokens = 0
        registry.on_scrape(_READ, self._read)

    def _read(self) -> Iterable[MetricSample]:
        state = self._state()
        yield MetricSample(RUNNING, state.num_running, ("router",))
        yield MetricSample(WAITING, state.num_waiting, ("router",))
        yield MetricSample(GENERATION_TOKENS, self.num_generation_tokens)
        yield MetricSample(STREAMS, state.num_streams)
        yield MetricSample(REFUSED_WORKERS, state.num_refused)
        if state.load_ratio is not None:
            yield MetricSample(LOAD_RATIO, state.load_ratio)
        yield MetricSample(REGISTRY_CONNECTED, state.registry_connected)
        yield MetricSample(STALLED, state.stalled_s)
        yield from (MetricSample(WORKERS, count, (role,)) for role, count in state.workers.items())
