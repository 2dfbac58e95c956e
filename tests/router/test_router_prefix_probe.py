"""A long prompt is asked for in two trips: whatever a worker holds of it, they find what one question for every unit would find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.workers.prefix_index import CachedPrefix, PrefixProbe, WorkerLife

UNIT = 64
LIFE = WorkerLife("a", 1)


def ask(probe: PrefixProbe, pool: list[bool], host: list[bool], stride: int) -> int:
    """Both trips; returns how many units were asked for."""
    num_asked = 0
    for trip in (probe.first, probe.rest):
        indices = trip()
        units = [(i + 1) * stride - 1 for i in indices]
        probe.learn(indices, [pool[u] for u in units], [host[u] for u in units])
        num_asked += len(units)
    return num_asked


# Mostly held from the start on, as prefixes are, with gaps; or anything.
flags = st.one_of(
    st.builds(
        lambda held, more, gaps: [i < held and i not in gaps for i in range(held + more)],
        *[st.integers(0, 150)] * 2,
        st.sets(st.integers(0, 150), max_size=2),
    ),
    st.lists(st.booleans(), max_size=100),
)


@settings(max_examples=500)
@given(flags, flags, st.booleans(), st.integers(1, 5))
def test_two_trips_find_what_one_question_for_all_would(pool: list[bool], host: list[bool], tiered: bool, stride: int) -> None:
    size = max(len(pool), len(host))
    pool, host = pool + [False] * (size - len(pool)), host + [False] * (size - len(host))
    if not tiered:
        host = pool
    probe = PrefixProbe(LIFE, [bytes([i % 256]) for i in range(size)], stride, tiered=tiered)
    ask(probe, pool, host, stride)
    asked = range(stride - 1, size, stride)
    in_pool = next((k for k, i in enumerate(asked) if not pool[i]), len(asked))
    in_either = next((k for k, i in enumerate(asked) if not (pool[i] or host[i])), len(asked))
    assert probe.held(UNIT) == CachedPrefix(in_pool * stride * UNIT, (in_either - in_pool) * stride * UNIT)


def test_a_worker_that_holds_nothing_is_asked_little() -> None:
    probe = PrefixProbe(LIFE, [b""] * 1000, 1, tiered=False)
    assert ask(probe, [False] * 1000, [False] * 1000, 1) == 10
    assert probe.held(UNIT) == CachedPrefix(0)
