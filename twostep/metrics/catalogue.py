"""Every metric there is, and the page that says so: `python -m twostep.metrics.catalogue > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from twostep.metrics import autoscaler, batches, engine, http, process, requests, router, transfer, worker
from twostep.metrics.family import Family, MetricKind

# In the page's order: title, who exports it, the families.
SECTIONS: Sequence[tuple[str, str, Sequence[Family]]] = (
    ("Every process", "router, prefill and decode worker", (*process.FAMILIES, *requests.FAMILIES)),
    ("Requests", "router", router.FAMILIES),
    ("HTTP", "router with an HTTP port", http.FAMILIES),
    ("Batches", "router with --batch-dir", batches.FAMILIES),
    ("Engine", "prefill and decode worker", engine.FAMILIES),
    ("Worker", "prefill and decode worker", worker.FAMILIES),
    ("Hand-over", "prefill and decode worker, each its own side", transfer.FAMILIES),
    ("Autoscaler", "autoscaler, beside `twostep_process_info`", autoscaler.FAMILIES),
)

_HEAD = """\
# Metrics

<!-- Written by `python -m twostep.metrics.catalogue`; a test compares this page with what the code declares. -->

Every process serves `GET /metrics` in Prometheus' text format (OpenMetrics if asked for) over plain HTTP on `--metrics-port`
(`TWOSTEP_METRICS_PORT`; `--port` + 2 if not given, any free port if `--port` is 0, -1 for none), on the address given by `--host`. It has
no TLS and no authentication: nothing secret is in it, but keep the port inside the cluster. `twostep up` prints the addresses.

| process | default |
|---|---|
| router | 50053 |
| prefill worker | 50063 |
| decode worker | 50073 |
| autoscaler | 50083 |

- Threads of their own serve it: it answers while the engine or the event loop is stuck. Whether a process should be restarted is for its
  health service to say.
- The KV agent, the helper process that joins Ray for a worker, has no port: its worker asks it once a second and exports what it holds.
- Units are seconds and bytes; counters end in `_total` and count from the process's start. Labels have few values, never a request.
- A hand-over is also one log line with the request's id (`transfer request=…`, at debug level, failures at info; fields of their own with
  `--log-json`), and a span of its request's trace ([tracing.md](tracing.md)).
- The router serves the same at `/metrics` of its HTTP port.
- Python's process metrics (`process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds`, ...) come along on Linux.

In [helm/files/](../helm/files), also for use without the chart: a Grafana dashboard (`grafana/twostep.json`), recording and alert rules
(`prometheus/rules.yaml`, `alerts.yaml`); in [deploy/](../deploy): how to provision them, and a scrape configuration. A test checks them
against this page. What to do when an alert fires: [runbook.md](runbook.md).

Where vLLM has a metric of the same meaning, the name behind the prefix is the same, or follows from Prometheus' rules for units:

| vLLM | here |
|---|---|
| `vllm:time_to_first_token_seconds`, `vllm:inter_token_latency_seconds` | `twostep_` and the same, of the router |
| `vllm:e2e_request_latency_seconds`, `vllm:request_queue_time_seconds` | `twostep_` and the same, of the router |
| `vllm:request_time_per_output_token_seconds` | `twostep_request_time_per_output_token_seconds` |
| `vllm:request_prefill_time_seconds` | `twostep_request_phase_seconds{phase="prefill"}` |
| `vllm:request_decode_time_seconds` | `twostep_request_phase_seconds{phase="decode"}` |
| `vllm:num_requests_running`, `vllm:num_requests_waiting`, `vllm:num_preemptions_total` | `twostep_` and the same, with `role` |
| `vllm:prompt_tokens_total`, `vllm:generation_tokens_total` | `twostep_` and the same, of the router |
| `vllm:request_prompt_tokens`, `vllm:request_generation_tokens` | `twostep_` and the same, of the router |
| `vllm:request_success_total{finished_reason=...}` | `twostep_requests_total{status="OK", finish_reason=...}` |
| `vllm:kv_cache_usage_perc` | `twostep_kv_cache_usage_ratio` |
| `vllm:prefix_cache_queries_total`, `vllm:prefix_cache_hits_total` | `twostep_` and the same, with `role` |
| `http_requests_total{handler, method, status}` | `twostep_http_requests_total`, with the same labels |

Questions it answers, in PromQL:

```
histogram_quantile(0.99, sum by (le) (rate(twostep_time_to_first_token_seconds_bucket[5m])))                      TTFT, 99th percentile
histogram_quantile(0.99, sum by (le) (rate(twostep_second_token_seconds_bucket[5m])))                             what the hand-over adds
sum by (transport) (rate(twostep_kv_transfers_total{direction="fetch", status="ok"}[5m]))                         which transport is used
sum by (transport) (rate(twostep_kv_transfer_bytes_total{direction="fetch"}[5m]))                                 bytes a second moved
sum by (transport) (increase(twostep_kv_transfer_retries_total{reason="data_loss"}[1h]))                          damaged chunks
sum(rate(twostep_prompt_tokens_cached_total[5m])) / sum(rate(twostep_prompt_tokens_total[5m]))                    prefix reuse
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
