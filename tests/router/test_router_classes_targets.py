"""Whether a promise can be kept, and when to come again: pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from placement_simulation import worker_record

from router.placing.placement import Placement
from router.request.targets import Reason, Targets, refusal, retry_after
from router.waiting.queues import QueueRate
from twostep.errors import status_of

WORKER = worker_record("d0")
SECONDS = st.floats(0.0, 100.0)


def choice(targets: Targets, waited_s: float, ttft_s: float, tpot_s: float, gap_s: float, retry_s: float = 0.0) -> Placement:
    """Returns a placement whose targets are checked as placement does: against what is left of the time."""
    late = targets.ttft_s is not None and ttft_s > max(0.0, targets.ttft_s - waited_s)
    slow = (targets.tpot_s is not None and tpot_s > targets.tpot_s) or (targets.gap_s is not None and gap_s > targets.gap_s)
    return Placement(
        prefill=None,
        decode=WORKER,
        cost=0.0,
        reason="",
        predicted_ttft_s=ttft_s,
        predicted_tpot_s=tpot_s,
        predicted_gap_s=gap_s,
        meets_targets=not late and not slow,
        retry_after_s=retry_s if late or slow else 0.0,
    )


@example(targets=Targets(ttft_s=0.01), waited=1.0, queue=0.0, ttft=0.0, tpot=0.0, gap=0.0, attainable=True)
@given(
    st.builds(
        Targets,
        ttft_s=st.none() | st.floats(0.01, 10.0),
        tpot_s=st.none() | st.floats(0.001, 1.0),
        gap_s=st.none() | st.floats(0.001, 1.0),
    ),
    SECONDS,
    SECONDS,
    SECONDS,
    SECONDS,
    SECONDS,
    st.booleans(),
)
def test_exactly_what_cannot_be_kept_is_refused(
    targets: Targets, waited: float, queue: float, ttft: float, tpot: float, gap: float, attainable: bool
) -> None:
    target_ttft = targets.ttft_s
    placed = choice(targets, waited, ttft, tpot, gap, retry_s=3.0)
    refused = refusal(targets, waited_s=waited, queue_s=queue, placed=placed, attainable=attainable)
    # Sums in another order may round to the other side of a target.
    margin = 1e-9
    if target_ttft is not None and abs(waited + queue + ttft - target_ttft) < margin:
        return
    late = target_ttft is not None and waited + queue + ttft > target_ttft
    slow = targets.tpot_s is not None and tpot > targets.tpot_s
    far = targets.gap_s is not None and gap > targets.gap_s
    assert (refused is not None) == (late or slow or far)
    if refused is None:
        return
    assert status_of(refused).grpc == "RESOURCE_EXHAUSTED"
    assert refused.reason is (Reason.TARGET_TPOT if slow else Reason.TARGET_GAP if far else Reason.TARGET_TTFT)
    assert ("idle workers would not" in refused.message) == (not attainable)
    if not attainable:
        assert refused.retry_after_s is None
        return
    assert refused.retry_after_s is not None
    assert 0.1 <= refused.retry_after_s <= 30.0
    if refused.reason is Reason.TARGET_TTFT and target_ttft is not None:
        assert refused.retry_after_s >= min(30.0, ttft + queue - target_ttft), "by then what is too much is gone"


@given(st.floats(0.0, 1e9))
def test_nobody_is_told_to_come_at_once_or_never(seconds: float) -> None:
    assert 0.1 <= retry_after(seconds) <= 30.0
    if 0.1 <= seconds <= 30.0:
        assert retry_after(seconds) == seconds


def test_a_promise_is_kept_or_missed_part_by_part() -> None:
    some = Targets(ttft_s=0.5, tpot_s=0.01, gap_s=0.03)
    assert some.missed(0.5, 0.01, 0.03) == frozenset()
    assert some.missed(0.51, 0.01, 0.03) == {Reason.TARGET_TTFT}
    assert some.missed(0.4, 0.02, 0.02) == {Reason.TARGET_TPOT}
    assert some.missed(0.4, 0.01, 0.04) == {Reason.TARGET_GAP}
    assert some.missed(None, None, 0.0) == {Reason.TARGET_TTFT}, "no token came"
    assert some.missed(0.1, None, 0.0) == frozenset(), "there was but one"
    assert Targets().missed(None, None, 9.0) == frozenset()
    assert not Targets()
    assert Targets(tpot_s=0.1)
    assert Targets(gap_s=0.1)


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.01, 1.0)), min_size=3, max_size=60), st.floats(1.0, 1e6))
def test_a_queues_pace_is_within_what_was_seen(turns: list[tuple[int, float]], idle_s: float) -> None:
    pace, now = QueueRate(), 0.0
    assert pace.seconds(1000) == 0.0, "nobody is refused for what is not known"
    pace.begins(now)
    for tokens, span in turns:
        now += span
        pace.served(tokens, now, waiting=True)
    rates = [tokens / span for tokens, span in turns]
    learnt = 1000 / pace.seconds(1000)
    assert 0.99 * min(rates) <= learnt <= 1.01 * max(rates)
    # Time in which nobody waits says nothing of how fast a queue moves.
    pace.served(10, now, waiting=False)
    before = pace.seconds(1000)
    now += idle_s
    pace.served(10, now, waiting=False)
    pace.begins(now)
    assert pace.seconds(1000) == before


def test_a_pace_follows_what_changes() -> None:
    pace, now = QueueRate(), 0.0
    pace.begins(now)
    for rate in (1000, 100):
        for _ in range(500):
            now += 0.1
            pace.served(rate // 10, now, waiting=True)
        assert pace.seconds(rate) == pytest.approx(1.0, rel=0.05)
