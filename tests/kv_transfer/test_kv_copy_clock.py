"""The clock of copies that overlap, against intervals added up by hand."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer import telemetry
from kv_transfer.telemetry import CopyClock

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15)).map(lambda t: (t[0], t[0] + t[1])), max_size=8)


@given(intervals=INTERVALS)
def test_it_adds_up_chunks_and_the_time_they_cover(intervals: list[tuple[int, int]]) -> None:
    now = 0.0
    clock = CopyClock()
    open_chunks: dict[int, ExitStack] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry.time, "monotonic", lambda: now)
        # One that ends at an instant ends before one that begins there: the sum is the same either way.
        moments = sorted([(end, 0, i) for i, (_, end) in enumerate(intervals)] + [(start, 1, i) for i, (start, _) in enumerate(intervals)])
        for moment, begins, i in moments:
            now = float(moment)
            if begins:
                open_chunks[i] = ExitStack()
                open_chunks[i].enter_context(clock.running())
            else:
                open_chunks.pop(i).close()
    assert clock.summed_s == sum(end - start for start, end in intervals)
    assert clock.busy_s == len({instant for start, end in intervals for instant in range(start, end)})


def test_a_copy_that_fails_counts() -> None:
    clock = CopyClock()
    with pytest.raises(ValueError, match="damaged"), clock.running():
        raise ValueError("damaged")
    assert clock.summed_s == clock.busy_s > 0
