"""What heartbeats tell of rates, and records of workers that are older or newer than who reads them."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_harness import WAIT_S, make_runner, prompt_of, routed, started

from twostep.cluster.records import LayoutRecord, WorkerLoad, WorkerRecord
from twostep.errors import InvalidRequest
from twostep.step_curve import StepCurve
from twostep.worker.telemetry import Counts, RateMeter

_LAYOUT = LayoutRecord(model_fingerprint="m", dtype="float32", block_size=16, num_layers=2, num_kv_heads=2, head_dim=8)
_RECORD = WorkerRecord(
    worker_id="d0",
    role="decode",
    address="127.0.0.1:1",
    epoch=7,
    model="m",
    layout=_LAYOUT,
    hash_unit=64,
    secret_check="x",
    num_blocks=16,
    max_num_seqs=4,
    max_model_len=256,
    load=WorkerLoad(num_running=3, tokens_per_s=12.5, fetched_bytes_per_s=1e9, queried_tokens_per_s=100.0, hit_tokens_per_s=75.0),
    curve=StepCurve(fixed_s=0.01, per_row_s=1e-5),
)

# ---- rates ---------------------------------------------------------------------------------------------------------------


def test_what_was_longer_ago_than_the_window_is_forgotten() -> None:
    meter = RateMeter(window_s=10.0)
    meter.observe(Counts(), 0.0)
    assert meter.observe(Counts(tokens=1000), 1.0).tokens == 1000
    assert meter.observe(Counts(tokens=1000), 5.0).tokens == 200
    for second in range(6, 12):
        rates = meter.observe(Counts(tokens=1000), float(second))
    assert rates.tokens == 0


def test_a_new_edge_that_counts_from_zero_takes_nothing_away() -> None:
    """A change of roles makes a new edge; the engine goes on counting."""
    meter = RateMeter(window_s=10.0)
    meter.observe(Counts(fetched_bytes=10_000, tokens=5), 0.0)
    meter.observe(Counts(fetched_bytes=10_400, tokens=6), 1.0)
    rates = meter.observe(Counts(fetched_bytes=100, tokens=7), 2.0)
    assert (rates.fetched_bytes, rates.tokens) == (250, 1)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 10**6)), min_size=2, max_size=200))
def test_rates_are_what_was_counted_since_some_heartbeat(steps: list[tuple[float, int]]) -> None:
    """Against the definition, from all that was ever observed; and what is kept is bounded."""
    meter, now, total = RateMeter(window_s=10.0), 0.0, 0
    seen: list[tuple[float, int]] = []
    for gap, more in steps:
        now, total = now + gap, total + more
        rate = meter.observe(Counts(tokens=total), now).tokens
        possible = [(total - before) / (now - then) for then, before in seen if now > then]
        seen.append((now, total))
        assert rate == 0 or any(rate == pytest.approx(p) for p in possible)
        # What is kept is bounded: there is no other way to see it.
        assert len(meter._seen) <= 10.0 / 0.25 + 3


# ---- records ---------------------------------------------------------------------------------------------------------------


def test_a_record_goes_there_and_back() -> None:
    assert WorkerRecord.from_json(_RECORD.to_json()) == _RECORD


def test_a_layout_that_says_more_is_refused() -> None:
    """It may change what the bytes of the KV mean."""
    raw = json.loads(_RECORD.to_json())
    raw["layout"]["interleaved"] = True
    with pytest.raises(InvalidRequest, match="interleaved"):
        WorkerRecord.from_json(json.dumps(raw))


@pytest.mark.parametrize("text", ["3", "[]", "null", '"d0"', "{}"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        WorkerRecord.from_json(text)
    for part in ("load", "curve"):
        with pytest.raises(InvalidRequest):
            WorkerRecord.from_json(json.dumps(json.loads(_RECORD.to_json()) | {part: json.loads(text) or 3}))


# ---- of real workers -------------------------------------------------------------------------------------------------------


async def test_heartbeats_tell_what_was_computed_found_and_fetched(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever all this takes, it is in the window.
    monkeypatch.setattr("twostep.worker.telemetry.RateMeter", partial(RateMeter, window_s=10 * WAIT_S))
    async with started(redis_url) as pair, routed(pair) as router:
        for name in ("a", "b"):
            await router.generate(name, prompt_of(41), 20)
        await pair.settled()
        prefill, decode = pair.prefill_worker.record().load, pair.decode_worker.record().load
        assert prefill.tokens_per_s > 0
        # The second prompt's first 40 of 41 tokens were cached, and those of both were looked up.
        assert prefill.hit_tokens_per_s == pytest.approx(prefill.queried_tokens_per_s * 40 / 82)
        assert prefill.fetched_bytes_per_s == 0
        assert decode.tokens_per_s > 0
        block_bytes = make_runner().kv_shape.block_bytes
        # Of the first prompt all 11 blocks, of the second the last one, in the same time as 38 tokens were decoded.
        assert decode.fetched_bytes_per_s == pytest.approx(decode.tokens_per_s * 12 * block_bytes / 38)
