"""Declares the metrics of a worker's engine: counted once a step, the rest read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twostep.engine.types import EngineStats, FailureKind, StepOutput
from twostep.metrics.family import STEP_SECONDS, Family, counter, gauge, histogram
from twostep.metrics.process import RUNNING, WAITING
from twostep.metrics.registry import MetricSample, MetricsRegistry

_ROLE = ["role"]

RESERVED = gauge("twostep_num_requests_reserved", "Sequences with blocks whose KV is still to come (decode workers).", _ROLE)
HELD = gauge("twostep_num_requests_held", "Computed prompts that keep their blocks for the hand-over (prefill workers).", _ROLE)
KV_USAGE = gauge("twostep_kv_cache_usage_ratio", "Share of the KV blocks that sequences own, 0 to 1.", _ROLE)
KV_BLOCKS = gauge(
    "twostep_kv_cache_blocks", "KV blocks by state: used (owned), cached (reusable prefixes, evictable), free.", ["role", "state"]
)
STALLED = gauge("twostep_engine_stalled_seconds", "Since the last finished step while there is work; 0 when idle.", _ROLE)
PREEMPTIONS = counter("twostep_num_preemptions_total", "How often a sequence gave its blocks to an older one.", _ROLE)
SWAPPED = counter("twostep_kv_swapped_bytes_total", "KV copied to host memory and back (--prefix-cache-space).", _ROLE)
STEPS = counter("twostep_engine_steps_total", "Steps that were launched.", _ROLE)
PREFIX_QUERIES = counter("twostep_prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", _ROLE)
PREFIX_HITS = counter("twostep_prefix_cache_hits_total", "Prompt tokens whose KV was found there.", _ROLE)
HOST_BLOCKS = gauge("twostep_prefix_cache_host_blocks", "KV blocks of prefixes kept in host memory, below the KV cache.", _ROLE)
HOST_HITS = counter("twostep_prefix_cache_host_hits_total", "Of the prompt tokens found, those copied back from host memory.", _ROLE)
EXPERTS = gauge(
    "twostep_expert_imbalance_ratio",
    "Of a mixture of experts, over the last few hundred steps: tokens of the busiest expert over the mean of its layer, in the least even "
    "layer. 1 is even; 0: not known yet, or the model has no experts.",
    _ROLE,
)
STEP_TOKENS = counter("twostep_engine_tokens_total", "Tokens computed, by kind: prefill, decode.", ["role", "kind"])
DRAFTED = counter(
    "twostep_spec_decode_num_draft_tokens_total",
    "Drafted tokens that steps computed (--speculative-config), by their position in the draft, from 0.",
    ["role", "position"],
)
ACCEPTED = counter(
    "twostep_spec_decode_num_accepted_tokens_total", "Of the drafted tokens, those that became part of an answer.", ["role", "position"]
)
DRAFT_MODEL_FAILED = gauge(
    "twostep_spec_decode_draft_model_failed",
    "1: the draft model has failed, and nothing is drafted by it until the worker is restarted; answers are not affected.",
    _ROLE,
)
FAILED = counter("twostep_engine_failed_sequences_total", "Sequences given up because a step of theirs failed.", _ROLE)
NO_TOKEN = counter(
    "twostep_engine_non_finite_sequences_total",
    "Sequences ended with an error because the model's logits for their next token were not finite. Their neighbours went on.",
    _ROLE,
)
STEP_DURATION = histogram("twostep_engine_step_duration_seconds", "A step by kind: prefill, decode, mixed.", STEP_SECONDS, ["role", "kind"])

_GAUGES = (RUNNING, WAITING, RESERVED, HELD, KV_USAGE, KV_BLOCKS, STALLED, HOST_BLOCKS, EXPERTS, DRAFT_MODEL_FAILED)
_READ = (*_GAUGES, PREEMPTIONS, SWAPPED, STEPS, PREFIX_QUERIES, PREFIX_HITS, HOST_HITS, DRAFTED, ACCEPTED)

# What an engine has counted, by family and the labels after the role.
_Counts = dict[tuple[Family, tuple[str, ...]], int]


class EngineMetrics:
    """on_step() on one thread; `stats` is called from scrapes' threads."""

    def __init__(self, registry: MetricsRegistry, *, role: str, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats
        self._tokens, self._duration = registry.counter(STEP_TOKENS), registry.histogram(STEP_DURATION)
        self._failures, self._no_tokens = registry.counter(FAILED), registry.counter(NO_TOKEN)
        # What the engine had counted in all when each role but the present one ended, less what was counted in others.
        self._counted: dict[str, _Counts] = {}
        self._serve(role)
        registry.on_scrape(_READ, self._read)

    def serve(self, role: str) -> None:
        """The worker has this role from now on. What was counted stays counted for the role in which it happened."""
        counted = {old: values for old, values in self._counted.items() if old != self._role}
        # Replaced as a whole, for scrapes' threads.
        self._counted = counted | {self._role: _less(_counters(self._stats()), counted)}
        self._serve(role)

    def _serve(self, role: str) -> None:
        self._prefill_tokens, self._decode_tokens = self._tokens.labels(role, "prefill"), self._tokens.labels(role, "decode")
        self._durations = {kind: self._duration.labels(role, kind) for kind in ("prefill", "decode", "mixed")}
        self._failed, self._without_token = self._failures.labels(role), self._no_tokens.labels(role)
        self._role = role

    def on_step(self, output: StepOutput) -> None:
        prefill, decode = output.num_prefill_tokens, output.num_decode_tokens
        if prefill:
            self._prefill_tokens.inc(prefill)
        if decode:
            self._decode_tokens.inc(decode)
        if prefill or decode:
            self._durations["decode" if not prefill else "mixed" if decode else "prefill"].observe(output.duration_s)
        if output.failures:
            without_token = sum(1 for failure in output.failures if failure.kind is FailureKind.NO_TOKEN)
            self._without_token.inc(without_token)
            self._failed.inc(len(output.failures) - without_token)

    def _read(self) -> Iterable[MetricSample]:
        stats, role = self._stats(), (self._role,)
        others = {old: values for old, values in self._counted.items() if old != self._role}
        used = stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
        values = {
            RUNNING: stats.num_running,
            WAITING: stats.num_waiting,
            RESERVED: stats.num_reserved,
            HELD: stats.num_held,
            KV_USAGE: used / stats.num_blocks if stats.num_blocks else 0.0,
            STALLED: stats.stalled_s,
            HOST_BLOCKS: stats.num_host_blocks,
            EXPERTS: stats.expert_imbalance,
            DRAFT_MODEL_FAILED: float(stats.drafting_failed),
        }
        yield from (MetricSample(family, value, role) for family, value in values.items())
        for of_role, counts in (others | {self._role: _less(_counters(stats), others)}).items():
            yield from (MetricSample(family, value, (of_role, *labels)) for (family, labels), value in counts.items())
        for state, count in (("used", used), ("cached", stats.num_cached_blocks), ("free", stats.num_free_blocks)):
            yield MetricSample(KV_BLOCKS, count, (self._role, state))


def _counters(stats: EngineStats) -> _Counts:
    """Returns what the engine has counted since its start."""
    counts: dict[Family, int] = {
        PREEMPTIONS: stats.num_preemptions,
        SWAPPED: stats.swapped_bytes,
        STEPS: stats.steps,
        PREFIX_QUERIES: stats.num_queried_tokens,
        PREFIX_HITS: stats.num_hit_tokens,
        HOST_HITS: stats.num_host_hit_tokens,
    }
    by_position: _Counts = {
        (family, (str(position),)): count
        for family, values in ((DRAFTED, stats.num_drafted), (ACCEPTED, stats.num_accepted))
        for position, count in enumerate(values)
    }
    return {**{(family, ()): count for family, count in counts.items()}, **by_position}


def _less(counts: _Counts, others: dict[str, _Counts]) -> _Counts:
    """Returns `counts` less what the other roles have counted."""
    return {key: count - sum(values.get(key, 0) for values in others.values()) for key, count in counts.items()}
