"""Where the time of requests went: causes of gaps, parts of percentiles, and the page that shows them."""

from __future__ import annotations

import json
from array import array
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve.causes import CAUSES, by_cause, first_token_parts, long_gaps, parts_at, second_token_parts
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.bench.serve.page import PageRun, page
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.bench.serve.saved import read_runs
from twostep.lab.bench.serve.summary import Windows, summarize

PHASES = {"route_s": 0.004, "wait_s": 0.001, "queue_s": 0.01, "prefill_s": 0.02, "publish_s": 0.005, "fetch_s": 0.01, "first_decode_s": 0.5}


def answered(
    gaps: list[float], *, tokens: list[int] | None = None, told: list[dict[str, float]] | None = None, **more: Any
) -> RequestRecord:
    times = array("d", accumulate([1.05, *gaps]))
    return RequestRecord(
        **{"index": 0, "sent_s": 1.0, "scheduled_s": 1.0, "prompt_tokens": 8, "max_tokens": 64, "ended_s": times[-1], "phases": PHASES}
        | more,
        times_s=times,
        num_tokens=array("I", tokens or [1] * len(times)),
        gaps=told or [],
    )


def of_token(position: int, gap_s: float, **parts: float) -> dict[str, float]:
    return {"position": position, "gap_s": gap_s, **parts}


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("hand-over", of_token(3, 0.06, hand_over_s=0.045, step_s=0.015)),
        ("mixed step", of_token(3, 0.06, step_s=0.05, late_s=0.01, prompt_tokens=512, decodes=3)),
        ("decode step", of_token(3, 0.06, step_s=0.05, late_s=0.01, decodes=3)),
        # A step of the usual length is no cause, however large a part of the gap it is.
        ("worker late", of_token(3, 0.018, step_s=0.01, late_s=0.007, outside_s=0.001)),
        ("preempted", of_token(3, 0.06, outside_s=0.05, step_s=0.01, steps_missed=4)),
        ("between steps", of_token(3, 0.06, outside_s=0.05, step_s=0.01)),
        ("to the router", of_token(3, 0.06, step_s=0.01, network_s=0.05)),
        ("migration", of_token(3, 0.06, migration_s=0.06)),
        ("replay", of_token(3, 0.06, replay_s=0.06)),
        ("to the client", of_token(3, 0.01, step_s=0.01)),
        ("untold", of_token(3, 0.06)),
    ],
)
def test_each_cause_by_hand(cause: str, told: dict[str, float]) -> None:
    gap_s = told["gap_s"] + (0.03 if cause == "to the client" else 0.0)
    (gap,) = long_gaps(answered([0.01, 0.01, gap_s, 0.01], told=[told]), None)
    assert (gap.cause, gap.position, gap.gap_s) == (cause, 3, pytest.approx(gap_s))
    assert gap.ended_s == pytest.approx(1.07 + gap_s)
    assert sum(gap.parts_s.values()) == pytest.approx(gap_s)


@given(
    gaps=st.lists(st.tuples(st.floats(1e-3, 2), st.integers(1, 4)), min_size=1, max_size=12),
    told=st.lists(st.tuples(st.integers(1, 40), st.floats(0, 2), st.floats(-0.5, 1), st.integers(0, 9)), max_size=8),
    bound=st.none() | st.floats(0, 2),
)
def test_every_long_gap_has_one_cause(
    gaps: list[tuple[float, int]], told: list[tuple[int, float, float, int]], bound: float | None
) -> None:
    record = answered(
        [gap for gap, _ in gaps],
        tokens=[1, *(n for _, n in gaps)],
        told=[of_token(p, gap, step_s=gap / 2, late_s=late, prompt_tokens=tokens) for p, gap, late, tokens in told],
    )
    found = long_gaps(record, bound)
    longest = max(b - a for a, b in zip(record.times_s, record.times_s[1:], strict=False))
    assert max(gap.gap_s for gap in found) == longest
    assert sum(f.count for f in by_cause(found).values()) == len(found)
    assert {gap.cause for gap in found} <= CAUSES.keys()
    wanted = sum(b - a > bound for a, b in zip(record.times_s, record.times_s[1:], strict=False)) if bound is not None else 0
    assert len(found) == max(1, wanted)


def test_tokens_that_came_together_share_their_gaps_account() -> None:
    # Tokens 2 and 3 came in one message, 30 ms late: the router knows of 10 ms before each.
    told = [of_token(2, 0.01, step_s=0.01), of_token(3, 0.01, late_s=0.01)]
    (gap,) = long_gaps(answered([0.005, 0.03], tokens=[1, 1, 2], told=told), None)
    assert gap.parts_s == {"decode step": 0.01, "worker late": 0.01, "to the client": pytest.approx(0.01)}


def test_parts_are_those_of_the_clients_times() -> None:
    record = answered([0.04, 0.01])
    parts = first_token_parts(record)
    assert parts == pytest.approx({"wait": 0.001, "route": 0.003, "queue": 0.01, "prefill": 0.02, "network": 0.016})
    # The router's phases may be longer than what the client saw: they are cut.
    assert second_token_parts(record) == pytest.approx({"publish": 0.005, "fetch": 0.01, "first_decode": 0.025, "other": 0.0})
    assert first_token_parts(answered([0.01], phases=None)) == pytest.approx({"untold": 0.05})
    records = [answered([0.01], sent_s=1.0 - i / 100) for i in range(101)]
    found = parts_at(records, first_token_parts)
    assert [sum(found[share].values()) for share in ("p50", "p95", "p99")] == pytest.approx([0.55, 1.0, 1.04], abs=0.011)
    assert parts_at([], first_token_parts) == {}


# ---- saved requests and the page -----------------------------------------------------------------------------------------


def saved(path: Path, records: list[RequestRecord], rate: float | None) -> Path:
    path.write_text("".join(json.dumps({"rate": rate, **record.as_json()}) + "\n" for record in records))
    return path


def test_a_saved_request_keeps_what_was_told(tmp_path: Path) -> None:
    before = answered([0.01, 0.2], told=[of_token(2, 0.2, step_s=0.15, late_s=0.05, prompt_tokens=64)])
    ((label, (after,)),) = read_runs(saved(tmp_path / "a.jsonl", [before], 4.0))
    assert label == "a: 4 requests/s"
    assert by_cause(long_gaps(after, None)).keys() == by_cause(long_gaps(before, None)).keys() == {"mixed step"}


def test_results_of_vllm_are_read(tmp_path: Path) -> None:
    path = tmp_path / "vllm.json"
    result = {"ttfts": [0.05, 0.0], "itls": [[0.01, 0.3], []], "input_lens": [9, 9], "output_lens": [5, 3], "errors": ["", "timed out"]}
    path.write_text(json.dumps(result | {"start_times": [70.0, 70.5], "request_rate": "inf"}))
    ((label, (good, bad)),) = read_runs(path)
    assert (label, good.output_tokens, bad.completed) == ("vllm", 5, False)
    assert (good.sent_s, bad.sent_s, list(good.times_s)) == (0.0, 0.5, pytest.approx([0.05, 0.06, 0.36]))
    (gap,) = long_gaps(good, None)
    assert gap.cause == "untold"


@pytest.mark.parametrize("text", ["", "{}", "[]", "not JSON", '{"rate": 1}\n', '{"itls": []}'])
def test_what_is_no_saved_run_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="save-requests"):
        read_runs(path)


class Nesting(HTMLParser):
    """Fails on an element that is closed where another is open; notes what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "path", "rect"):
            self.open.append(tag)
        self.loads += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]
        assert tag != "script"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing is in it."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@given(
    runs=st.lists(
        st.lists(st.tuples(st.floats(0, 60), st.lists(st.floats(0, 4), max_size=6), st.booleans()), max_size=6), min_size=1, max_size=3
    ),
    targets=st.sampled_from([LatencyTargets(), LatencyTargets(ttft_ms=50, tpot_ms=1, gap_ms=20)]),
)
def test_a_page_is_whole_whatever_there_was(runs: list[list[tuple[float, list[float], bool]]], targets: LatencyTargets) -> None:
    made = []
    for found in runs:
        records = [
            answered(gaps, index=i, sent_s=sent % 1, phases=PHASES if tells else None, error="" if gaps or tells else "refused")
            for i, (sent, gaps, tells) in enumerate(found)
        ]
        summary = summarize(records, Windows.of_requests(records, open_loop=False), targets=targets)
        made.append(PageRun(label="<run> & one", records=records, summary=summary, targets=targets))
    text = page(made, "A <title>", "about")
    parser = Nesting()
    parser.feed(text)
    assert not parser.open
    assert not parser.loads
    assert "url(" not in text
    assert "nan" not in parser.words.split()
    assert parser.words.count("<run> & one") >= len(made)
