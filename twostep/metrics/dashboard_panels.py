"""Lists what Grafana's dashboard shows: rows of panels, with their queries. twostep/metrics/dashboard.py makes Grafana's JSON of it.

Queries name metrics by hand, as people read them; a test checks names and labels against what the code exports.
"""

from __future__ import annotations

from collections.abc import Sequence

from twostep.metrics.dashboard_autoscaler import AUTOSCALER
from twostep.metrics.panel import GOOD_HIGH, GOOD_LOW, Panel, R, S, W, areas, lines, number, percentiles, quantile, rate

_ANSWERED = f'{S}, status!="CANCELLED"'
_OWED = f'{S}, status=~"UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED|DATA_LOSS|UNKNOWN"'
_HIT_RATE = f"{rate('twostep_prefix_cache_hits_total')} / {rate('twostep_prefix_cache_queries_total')}"
_SLO = f"{rate('twostep_request_slo_attained_total')} / {rate('twostep_request_slo_total')}"

ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "Overview",
        (
            number("Requests", "reqps", "Ended requests a second.", rate("twostep_requests_total")),
            number(
                "Errors",
                "percentunit",
                "Share of requests that the system owed an answer and gave none.",
                f"({rate('twostep_requests_total', match=_OWED)} or vector(0)) / {rate('twostep_requests_total', match=_ANSWERED)}",
                thresholds=GOOD_LOW,
            ),
            number("TTFT p99", "s", "Time to the first token.", quantile(0.99, "twostep_time_to_first_token_seconds")),
            number(
                "TPOT p99",
                "s",
                "Mean time of a token after the first, of each answer.",
                quantile(0.99, "twostep_request_time_per_output_token_seconds"),
            ),
            number(
                "SLO attainment",
                "percentunit",
                "Of requests with targets, those that ended within all of them.",
                _SLO,
                thresholds=GOOD_HIGH,
            ),
            number("Prefix hit rate", "percentunit", "Of prompt tokens looked up on workers, those whose KV was there.", _HIT_RATE),
            number(
                "P:D load",
                "none",
                "Work that waits on prefill workers over work that waits on decode workers: above 1 prefill is short, below 1 decode.",
                f"avg(twostep_prefill_decode_load_ratio{{{S}}})",
                thresholds=((0.0, "orange"), (0.33, "green"), (3.0, "orange")),
            ),
            number(
                "Workers",
                "none",
                "That may get new work, as routers see them.",
                f"max by (worker_role) (twostep_router_workers{{{S}}})",
                legend="{{worker_role}}",
                thresholds=((0.0, "red"), (1.0, "green")),
            ),
        ),
    ),
    (
        "Requests",
        (
            areas(
                "Requests by status",
                "reqps",
                "Ended requests by gRPC status. CANCELLED: the client went away.",
                (rate("twostep_requests_total", "status"), "{{status}}"),
            ),
            areas(
                "Requests by class",
                "reqps",
                "Interactive goes first, batch fills the gaps.",
                (rate("twostep_requests_total", "request_class"), "{{request_class}}"),
            ),
            areas(
                "Refused, or out of time",
                "reqps",
                "Before any worker had begun with them.",
                (rate("twostep_requests_refused_total", "reason"), "{{reason}}"),
            ),
            lines(
                "Running and waiting",
                "none",
                "Requests in routers; sequences in workers.",
                (f"sum by (role) (twostep_num_requests_running{{{R}}})", "running, {{role}}"),
                (f"sum by (role) (twostep_num_requests_waiting{{{R}}})", "waiting, {{role}}"),
            ),
            lines(
                "Tokens",
                "none",
                "Prompt tokens, those of them that came out of prefix caches, and tokens sent to clients.",
                (rate("twostep_prompt_tokens_total"), "prompt"),
                (rate("twostep_prompt_tokens_cached_total"), "of it cached"),
                (rate("twostep_generation_tokens_total"), "generated"),
            ),
            lines(
                "HTTP",
                "reqps",
                "Requests by route and class of status.",
                (rate("twostep_http_requests_total", "handler, status"), "{{handler}} {{status}}"),
            ),
            lines(
                "Open event streams",
                "none",
                "Server-sent events, by route.",
                (f"sum by (handler) (twostep_http_open_streams{{{S}}})", "{{handler}}"),
            ),
            lines(
                "Batch requests",
                "reqps",
                "Requests of batches by outcome, and those asked once more.",
                (rate("twostep_batch_requests_total", "status"), "{{status}}"),
                (rate("twostep_batch_request_retries_total"), "asked once more"),
            ),
            lines(
                "Batches",
                "none",
                "Those that are not over, and those that routers run.",
                (f"max(twostep_batch_jobs_open{{{S}}})", "open"),
                (f"sum by (state) (twostep_batch_jobs{{{S}}})", "{{state}}"),
                (f"sum by (status) (increase(twostep_batch_jobs_ended_total{{{S}}}[{W}]))", "{{status}}"),
            ),
            lines(
                "Begun again elsewhere",
                "none",
                "Requests that went on on other workers because one was lost.",
                (f"sum(increase(twostep_request_migrations_total{{{S}}}[{W}]))", "migrations"),
            ),
            lines(
                "Lengths",
                "none",
                "Median tokens of prompts and of answers.",
                (quantile(0.5, "twostep_request_prompt_tokens"), "prompt"),
                (quantile(0.5, "twostep_request_generation_tokens"), "answer"),
            ),
        ),
    ),
    (
        "Latency",
        (
            lines("TTFT", "s", "From a request's arrival to its first token.", *percentiles("twostep_time_to_first_token_seconds")),
            lines(
                "TTFT, visible",
                "s",
                "To the first text of the answer itself: later than the first token where a model thinks first.",
                *percentiles("twostep_time_to_first_visible_token_seconds"),
            ),
            lines(
                "TPOT",
                "s",
                "Of each answer, the mean time of its tokens after the first.",
                *percentiles("twostep_request_time_per_output_token_seconds"),
            ),
            lines("Between two tokens", "s", "Every gap is one observation.", *percentiles("twostep_inter_token_latency_seconds")),
            lines(
                "First to second token",
                "s",
                "Of prompts handed over, what the hand-over adds.",
                *percentiles("twostep_second_token_seconds"),
            ),
            lines(
                "Whole requests",
                "s",
                "From arrival to the last token, of those that ended well.",
                *percentiles("twostep_e2e_request_latency_seconds"),
            ),
            lines(
                "Queue p95 by class",
                "s",
                "From arrival until a worker computes the prompt.",
                (quantile(0.95, "twostep_request_queue_time_seconds", "request_class"), "{{request_class}}"),
                width=12,
            ),
            areas(
                "Where the time goes",
                "s",
                "Mean seconds of each phase of a request that ended well.",
                (
                    f"{rate('twostep_request_phase_seconds_sum', 'phase')} / {rate('twostep_request_phase_seconds_count', 'phase')}",
                    "{{phase}}",
                ),
                width=12,
            ),
        ),
    ),
    (
        "Prefill and decode",
        (
            lines(
                "P:D load ratio",
                "none",
                "Seconds of work that wait on a prefill worker for each second that waits on a decode worker.",
                (f"twostep_prefill_decode_load_ratio{{{S}}}", "{{instance}}"),
            ),
            lines(
                "Workers by role",
                "none",
                "That may get new work, as routers see them.",
                (f"max by (worker_role) (twostep_router_workers{{{S}}})", "{{worker_role}}"),
            ),
            areas(
                "Placements",
                "reqps",
                "handed_over: a prefill worker computes the prompt. local: the decode worker does.",
                (rate("twostep_request_placements_total", "path"), "{{path}}"),
            ),
            areas(
                "Tokens computed",
                "none",
                "By workers, of prompts and of answers.",
                (rate("twostep_engine_tokens_total", "role, kind", R), "{{role}}: {{kind}}"),
            ),
            lines(
                "Step p95",
                "s",
                "Duration of an engine step by what it computed.",
                (quantile(0.95, "twostep_engine_step_duration_seconds", "role, kind", R), "{{role}}: {{kind}}"),
            ),
            lines(
                "Sequences",
                "none",
                "reserved: blocks set aside, KV still to come. held: computed, KV not yet fetched.",
                (f"sum by (role) (twostep_num_requests_running{{{R}}})", "{{role}}: running"),
                (f"sum by (role) (twostep_num_requests_reserved{{{R}}})", "{{role}}: reserved"),
                (f"sum by (role) (twostep_num_requests_held{{{R}}})", "{{role}}: held"),
            ),
        ),
    ),
    (
        "KV cache",
        (
            lines(
                "KV usage",
                "percentunit",
                "Share of blocks that sequences own.",
                (f"twostep_kv_cache_usage_ratio{{{R}}}", "{{role}} {{instance}}"),
                maximum=1.0,
            ),
            areas(
                "Blocks",
                "none",
                "used: owned by sequences. cached: prefixes that may be reused, or given up.",
                (f"sum by (role, state) (twostep_kv_cache_blocks{{{R}}})", "{{role}}: {{state}}"),
            ),
            lines(
                "Prefix hit rate",
                "percentunit",
                "Of prompt tokens looked up, those found; host: those copied back from host memory.",
                (
                    f"{rate('twostep_prefix_cache_hits_total', 'role', R)} / {rate('twostep_prefix_cache_queries_total', 'role', R)}",
                    "{{role}}",
                ),
                (
                    f"{rate('twostep_prefix_cache_host_hits_total', 'role', R)} / {rate('twostep_prefix_cache_queries_total', 'role', R)}",
                    "{{role}}: host",
                ),
                maximum=1.0,
            ),
            lines(
                "Preemptions",
                "none",
                "Sequences that gave their blocks to older ones.",
                (f"sum by (role) (increase(twostep_num_preemptions_total{{{R}}}[{W}]))", "{{role}}"),
            ),
            lines(
                "Swapped",
                "Bps",
                "KV copied to the host and back for sequences that gave way.",
                (rate("twostep_kv_swapped_bytes_total", "role", R), "{{role}}"),
            ),
            lines(
                "Prefixes in host memory",
                "none",
                "Blocks below the KV cache (--prefix-cache-space).",
                (f"sum by (role) (twostep_prefix_cache_host_blocks{{{R}}})", "{{role}}"),
            ),
        ),
    ),
    (
        "Hand-over",
        (
            areas(
                "KV fetched",
                "Bps",
                "Bytes a second, by transport.",
                (rate("twostep_kv_transfer_bytes_total", "transport", f'{S}, direction="fetch"'), "{{transport}}"),
            ),
            lines(
                "Rate of one fetch",
                "Bps",
                "Median bytes a second while it copies.",
                (quantile(0.5, "twostep_kv_transfer_bytes_per_second", "transport"), "{{transport}}"),
            ),
            lines(
                "Exposed p95",
                "s",
                "What a client may feel of a hand-over. publish: after the first token. fetch: after the last block was published.",
                (quantile(0.95, "twostep_kv_transfer_exposed_seconds", "direction, transport"), "{{direction}} {{transport}}"),
            ),
            lines(
                "Failures",
                "none",
                "Failed hand-overs by reason; cancelled: a client went away.",
                (
                    f"sum by (direction, reason) (increase(twostep_kv_transfer_failures_total{{{S}}}[{W}]))",
                    "{{direction}}: {{reason}}",
                ),
            ),
            lines(
                "Chunks fetched again",
                "none",
                "data_loss: the checksum did not match.",
                (f"sum by (transport, reason) (increase(twostep_kv_transfer_retries_total{{{S}}}[{W}]))", "{{transport}}: {{reason}}"),
            ),
            lines(
                "Leases",
                "none",
                "Hand-overs under way, and the age of the oldest.",
                (f"sum by (role) (twostep_kv_leases{{{R}}})", "{{role}}: leases"),
                (f"max by (role) (twostep_kv_oldest_lease_seconds{{{R}}})", "{{role}}: oldest, seconds"),
            ),
            lines(
                "Published and not fetched",
                "bytes",
                "KV in the KV agents and pools.",
                (f"sum by (transport) (twostep_kv_stored_bytes{{{R}}})", "{{transport}}"),
            ),
            lines(
                "Transports that work",
                "none",
                "Workers on which each does.",
                (f"sum by (role, transport) (twostep_kv_transport_ready{{{R}}})", "{{role}}: {{transport}}"),
            ),
            lines(
                "Probe copies",
                "Bps",
                "What the last one from each prefill worker reached; 0: that way is closed.",
                (f"min by (transport, peer) (twostep_kv_probe_bytes_per_second{{{S}}})", "{{transport}} {{peer}}"),
            ),
        ),
    ),
    (
        "Targets",
        (
            lines(
                "Attainment by class",
                "percentunit",
                "Of requests with targets, those that ended within all of them.",
                (
                    f"{rate('twostep_request_slo_attained_total', 'request_class')} / {rate('twostep_request_slo_total', 'request_class')}",
                    "{{request_class}}",
                ),
                maximum=1.0,
            ),
            areas("Missed", "reqps", "Targets that were missed.", (rate("twostep_request_slo_missed_total", "reason"), "{{reason}}")),
            lines(
                "Error budget burnt",
                "none",
                "How many times as fast as a month's budget of 1% allows (prometheus/rules.yaml); alerts from 14.4 over an hour.",
                ('max(twostep:request_slo_missed:ratio_rate1h{namespace=~"$namespace"}) / 0.01', "over 1 h"),
                ('max(twostep:request_slo_missed:ratio_rate6h{namespace=~"$namespace"}) / 0.01', "over 6 h"),
            ),
        ),
    ),
    AUTOSCALER,
    (
        "Health",
        (
            lines("Ready", "none", "Workers that take new work.", (f"twostep_worker_ready{{{R}}}", "{{role}} {{instance}}"), maximum=1.0),
            lines(
                "Standing still",
                "s",
                "Since an engine's last step while it has work; since a router's event loop came round.",
                (f"twostep_engine_stalled_seconds{{{R}}}", "{{role}} {{instance}}"),
                (f"twostep_router_stalled_seconds{{{S}}}", "router {{instance}}"),
            ),
            lines(
                "Redis, streams",
                "none",
                "Whether routers reach Redis, and their open token streams to decode workers.",
                (f"twostep_router_registry_connected{{{S}}}", "Redis, {{instance}}"),
                (f"twostep_router_streams{{{S}}}", "streams, {{instance}}"),
            ),
            lines("Memory", "bytes", "Resident, of each process.", (f"process_resident_memory_bytes{{{S}}}", "{{job}} {{instance}}")),
            lines(
                "CPU", "none", "Cores in use, of each process.", (f"rate(process_cpu_seconds_total{{{S}}}[{W}])", "{{job}} {{instance}}")
            ),
            lines(
                "Failed sequences, lost spans",
                "none",
                "Sequences given up because a step failed, or for logits that are not finite; spans that the collector did not take.",
                (f"sum by (role) (increase(twostep_engine_failed_sequences_total{{{R}}}[{W}]))", "sequences, {{role}}"),
                (f"sum by (role) (increase(twostep_engine_non_finite_sequences_total{{{R}}}[{W}]))", "not finite, {{role}}"),
                (f'sum(increase(twostep_trace_spans_total{{{S}, status="lost"}}[{W}]))', "spans"),
            ),
        ),
    ),
)
