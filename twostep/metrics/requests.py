"""Declares the metrics that every process has: requests that run and that wait."""

from __future__ import annotations

from twostep.metrics.family import gauge

RUNNING = gauge("twostep_num_requests_running", "router: requests being served. Workers: sequences in the engine's batch.", ["role"])
WAITING = gauge(
    "twostep_num_requests_waiting",
    "router: requests that wait to be served. Workers: prompts that wait for a place in the batch, and sequences that gave way.",
    ["role"],
)
