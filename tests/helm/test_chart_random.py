"""Switches in combinations that nobody thought of: the chart renders what fits together, or says what does not. TWOSTEP_CHART_CASES=500 for
more of them than everybody has."""

from __future__ import annotations

import os

from chart_cases import PROFILES, SWITCHES
from chart_checks import CHECKS
from chart_processes import processes
from chart_render import merged, render, run
from chart_schemas import NEWEST, OLDEST, faults
from hypothesis import event, given, settings
from hypothesis import strategies as st

NUM_CASES = int(os.environ.get("TWOSTEP_CHART_CASES", "8"))


@settings(max_examples=NUM_CASES)
@given(profile=st.sampled_from(("", *PROFILES)), names=st.lists(st.sampled_from(sorted(SWITCHES)), min_size=2, max_size=6, unique=True))
def test_any_switches_together(profile: str, names: list[str]) -> None:
    values = merged(*(SWITCHES[name] for name in names))
    result = run(values, profile)
    if result.returncode:
        event("refused")
        # In the chart's own words, never by a template that breaks.
        assert "execution error at (twostep/templates/" in result.stderr, result.stderr
        return
    event("rendered")
    chart = render(values, profile)
    found = [f"{check.__name__}: {fault}" for check in CHECKS for fault in check(chart)]
    found += [fault for object in chart.objects for version in (OLDEST, NEWEST) for fault in faults(object, version)]
    for process in processes(chart):
        strangers = {name for name in process.environment if name.startswith("TWOSTEP_")} - process.flags
        found += [f"{process.name}: {process.fault or strangers}"] * bool(process.config is None or strangers)
    assert found == []
