"""Who a process is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from twostep.metrics.family import gauge
from twostep.metrics.registry import MetricsRegistry

INFO = gauge("twostep_process_info", "1, with the process's role and the version it runs.", ["role", "version"])

FAMILIES = (INFO,)


def register_process(registry: MetricsRegistry, role: str) -> ProcessMetrics:
    """`role`: "router", "prefill" or "decode"."""
    return ProcessMetrics(registry, role)


class ProcessMetrics:
    def __init__(self, registry: MetricsRegistry, role: str) -> None:
        self._info = registry.gauge(INFO)
        self.serve(role)

    def serve(self, role: str) -> None:
        """The process has this role from now on."""
        self._info.clear()
        self._info.labels(role, package_version()).set(1)


def package_version() -> str:
    try:
        return version("twostep")
    except PackageNotFoundError:  # out of a checkout that is not installed
        return "unknown"
