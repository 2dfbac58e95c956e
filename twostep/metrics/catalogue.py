"""Every metric there is, and the page that says so: `python -m twostep.metrics.catalogue > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from twostep.metrics import autoscaler, batches, engine, http, process, router, transfer, worker
from twostep.metrics.family import Family, MetricKind


def declared(module: ModuleType) -> list[Family]:
    """Returns the families of a module, in the order of their declarations, without those that it has from process.py."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, Family) and (module is process or value not in (process.RUNNING, process.WAITING))
    ]


# In the page's order: title, who exports it, the families.
SECTIONS: Sequence[tuple[str, str, Sequence[Family]]] = (
    ("Every process", "router, prefill and decode worker", declared(process)),
    ("Requests", "router", declared(router)),
    ("HTTP", "router with an HTTP port", declared(http)),
    ("Batches", "router with --batch-dir", declared(batches)),
    ("Engine", "prefill and decode worker", declared(engine)),
    ("Worker", "prefill and decode worker", declared(worker)),
    ("Hand-over", "prefill and decode worker, each its own side", declared(transfer)),
    ("Autoscaler", "autoscaler, beside `twostep_process_info`", declared(autoscaler)),
)

_HEAD = """\
# Metrics

<!-- Written by `python -m twostep.metrics.catalogue`; a test compares this page with what the code declares. -->

Every process serves `GET /metrics` in Prometheus' text format (OpenMetrics if asked for) over plain HTTP on `--metrics-port`
(`TWOSTEP_METRICS_PORT`; `--grpc-port` + 2 if not given, any free port if `--grpc-port` is 0, -1 for none), at `--host`. It has no
TLS and no authentication: keep the port inside the cluster.

| process | default |
|---|---|
| router | 50053 |
| prefill worker | 50063 |
| decode worker | 50073 |
| autoscaler | 50083 |

- Threads of their own serve it: it answers while the engine or the event loop is stuck. Whether to restart a process is for its health
  service to say.
- The router serves the same at `/metrics` of its HTTP port. The KV agent has no port: its worker exports what it holds.
- Units are seconds and bytes; counters end in `_total` and count from the process's start. Labels have few values, never a request.
- Python's process metrics (`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds`, ...) come along on Linux.
- A hand-over is also a log line with the request's id and a span of its trace ([tracing.md](tracing.md)).

[helm/files/](../helm/files) has, also for use without the chart, a Grafana dashboard (`grafana/twostep.json`), recording and alert rules
(`prometheus/rules.yaml`, `alerts.yaml`); [deploy/](../deploy) has a scrape configuration. What to do when an alert fires:
[runbook.md](runbook.md).

Behind the prefix, names are vLLM's where one has the same meaning: `time_to_first_token_seconds`, `inter_token_latency_seconds`,
`e2e_request_latency_seconds`, `request_queue_time_seconds`, `request_time_per_output_token_seconds`, `prompt_tokens_total`,
`generation_tokens_total`, `request_prompt_tokens` and `request_generation_tokens` of the router; `num_requests_running`,
`num_requests_waiting`, `num_preemptions_total`, `prefix_cache_queries_total` and `prefix_cache_hits_total` with `role`;
`http_requests_total{handler, method, status}`. And:

| vLLM | here |
|---|---|
| `vllm:request_prefill_time_seconds` | `twostep_request_phase_seconds{phase="prefill"}` |
| `vllm:request_decode_time_seconds` | `twostep_request_phase_seconds{phase="decode"}` |
| `vllm:request_success_total{finished_reason=...}` | `twostep_requests_total{status="OK", finish_reason=...}` |
| `vllm:kv_cache_usage_perc` | `twostep_kv_cache_usage_ratio` |

Questions it answers, in PromQL:

```
histogram_quantile(0.99, sum by (le) (rate(twostep_time_to_first_token_seconds_bucket[5m])))                      TTFT, 99th percentile
histogram_quantile(0.99, sum by (le) (rate(twostep_second_token_seconds_bucket[5m])))                             what the hand-over adds
sum by (transport) (rate(twostep_kv_transfers_total{direction="fetch", status="ok"}[5m]))                         which transport is used
sum by (transport) (rate(twostep_kv_transfer_bytes_total{direction="fetch"}[5m]))                                 bytes a second moved
sum by (transport) (increase(twostep_kv_transfer_retries_total{reason="data_loss"}[1h]))                          damaged chunks
sum(rate(twostep_prompt_tokens_cached_total[5m])) / sum(rate(twostep_prompt_tokens_total[5m]))                    prefix reuse
sum by (path, worker_role) (rate(twostep_request_placements_total[5m]))                                           kept, and moved
histogram_quantile(0.5, sum by (le, kind) (rate(twostep_request_prediction_ratio_bucket[5m])))                    1: predictions hold
max(twostep_kv_oldest_lease_seconds) > 60                                                                         a hand-over hangs
sum(rate(twostep_request_slo_attained_total[5m])) / sum(rate(twostep_request_slo_total[5m]))                      targets kept
avg(twostep_prefill_decode_load_ratio) > 1                                                                        prefill is short
max by (worker_role) (twostep_autoscaler_desired_replicas) - max by (worker_role) (twostep_autoscaler_pods)       pods to come or to go
```
"""


def page() -> str:
    """docs/metrics.md."""
    lines = [_HEAD]
    for title, where, families in SECTIONS:
        lines += [f"## {title}", "", f"Exported by: {where}.", "", "| name | kind | labels | what it says |", "|---|---|---|---|"]
        lines += [f"| `{f.name}` | {f.kind.value} | {', '.join(f'`{label}`' for label in f.labels)} | {f.help} |" for f in families]
        lines.append("")
    lines += ["## Buckets", "", "Upper bounds of the histograms, in the metric's unit.", "", "| buckets | of |", "|---|---|"]
    by_buckets: dict[tuple[float, ...], list[str]] = {}
    for family in FAMILIES:
        if family.kind is MetricKind.HISTOGRAM:
            by_buckets.setdefault(family.buckets, []).append(f"`{family.name}`")
    lines += [f"| {', '.join(f'{bound:g}' for bound in buckets)} | {', '.join(names)} |" for buckets, names in by_buckets.items()]
    return "\n".join(lines) + "\n"


FAMILIES = tuple(family for _, _, families in SECTIONS for family in families)


if __name__ == "__main__":
    sys.stdout.write(page())
