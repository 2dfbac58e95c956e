"""Which router a request goes to, without any router."""

from __future__ import annotations

import random
from collections import Counter

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostep import Client
from twostep.client._channel import compression_for, key_metadata, options_for, routers_of, trace_of
from twostep.client._pool import RENEW_NAMES_AFTER_S, STREAMS_PER_CONNECTION, ConnectionLease, HealthProbe, Pool, RouterEndpoint, choose
from twostep.errors import InvalidRequest, SetupError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_pool(*targets: str, max_connections: int = 4, names: bool = False) -> tuple[Pool[str], Clock, Counter[str]]:
    """A pool whose connections are named target#n."""
    opened: Counter[str] = Counter()

    def open_wire(target: str) -> str:
        opened[target] += 1
        return f"{target}#{opened[target]}"

    clock = Clock()
    routers: list[RouterEndpoint[str]] = [RouterEndpoint(target, is_name=names) for target in targets]
    return Pool(routers, open_wire, max_connections=max_connections, clock=clock, draw=random.Random(1)), clock, opened


def test_requests_are_spread_evenly() -> None:
    pool, _, _ = make_pool("a", "b", "c")
    leases = [pool.take() for _ in range(9)]
    assert Counter(lease.target for lease in leases) == {"a": 3, "b": 3, "c": 3}
    for lease in leases[:6]:
        lease.release()
        lease.release()
    assert sum(state.num_open for state in pool.states()) == 3


def test_one_after_the_other_goes_to_all() -> None:
    pool, _, _ = make_pool("a", "b")
    seen = set()
    for _ in range(32):
        lease = pool.take()
        seen.add(lease.target)
        lease.release()
    assert seen == {"a", "b"}


def test_a_failed_router_gets_nothing_until_it_says_that_it_is_well() -> None:
    pool, clock, _ = make_pool("a", "b")
    lease = next(lease for lease in iter(pool.take, None) if lease.target == "a")
    lease.failed()
    lease.release()
    assert {pool.take().target for _ in range(8)} == {"b"}
    (probe,) = pool.due()
    assert probe.router.target == "a"
    assert pool.due() == [], "one question at a time"
    pool.probed(probe, well=False)
    assert pool.due() == [], "and not at once again"
    clock.now += 2.0
    (probe,) = pool.due()
    pool.probed(probe, well=True)
    assert pool.take().target == "a", "it has the fewest requests"
    assert pool.due() == []


def test_an_answer_to_a_question_from_before_the_last_failure_does_not_count() -> None:
    pool, _, _ = make_pool("a", "b")
    early = next(lease for lease in iter(pool.take, None) if lease.target == "a")
    pool.take(avoid=["b"]).failed()
    (probe,) = pool.due()
    early.failed()
    pool.probed(probe, well=True)
    assert not pool.states()[0].well
    (again,) = pool.due()
    pool.probed(again, well=True)
    assert pool.states()[0].well


def test_answers_begun_before_a_router_drained_do_not_make_it_well() -> None:
    pool, _, _ = make_pool("a", "b")
    before = next(lease for lease in iter(pool.take, None) if lease.target == "a")
    pool.take(avoid=["b"]).failed()
    before.answered()
    assert not pool.states()[0].well


def test_if_none_is_well_the_one_that_failed_first_is_tried_and_may_prove_well() -> None:
    pool, clock, _ = make_pool("a", "b")
    for avoid in ("b", "a"):
        clock.now += 1.0
        pool.take(avoid=[avoid]).failed()
    assert not pool.elsewhere([])
    lease = pool.take()
    assert lease.target == "a"
    assert pool.take(avoid=["a"]).target == "b"
    lease.answered()
    assert [state.well for state in pool.states()] == [True, False]
    assert pool.elsewhere(["b"])
    assert not pool.elsewhere(["a"])


def test_one_router_alone_is_asked_nothing() -> None:
    pool, _, _ = make_pool("a")
    pool.take().failed()
    assert pool.due() == []
    assert pool.take().target == "a"


def test_more_connections_for_more_streams_up_to_a_bound() -> None:
    pool, _, opened = make_pool("a", max_connections=2)
    leases = [pool.take() for _ in range(STREAMS_PER_CONNECTION)]
    assert opened["a"] == 1
    leases += [pool.take() for _ in range(2 * STREAMS_PER_CONNECTION)]
    assert opened["a"] == 2
    counts = Counter(lease.wire for lease in leases)
    assert sorted(counts.values()) == [150, 150]


def test_an_abandoned_connection_gets_no_more_calls() -> None:
    pool, _, opened = make_pool("a")
    first, second = pool.take(), pool.take()
    assert first.wire == second.wire == "a#1"
    first.abandon()
    first.abandon()
    second.abandon()
    assert pool.take().wire == "a#2"
    assert (opened["a"], pool.wires(), pool.states()[0].num_open) == (2, ["a#2"], 1)


def test_connections_to_a_name_are_renewed_and_the_old_ones_closed_when_nobody_uses_them() -> None:
    pool, clock, _ = make_pool("a", names=True)
    old = pool.take()
    clock.now += RENEW_NAMES_AFTER_S - 1
    assert pool.take().wire == old.wire
    clock.now += 2
    assert pool.take().wire == "a#2"
    assert pool.worn() == []
    assert set(pool.wires()) == {"a#1", "a#2"}
    for lease in (old, *(pool.take() for _ in range(0))):
        lease.release()
    # The second request on the old connection is still open.
    assert pool.worn() == []
    fixed, clock, _ = make_pool("a")
    first = fixed.take().wire
    clock.now += 10 * RENEW_NAMES_AFTER_S
    assert fixed.take().wire == first, "an address means the same for ever"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 7)),
        st.tuples(st.just("release"), st.integers(0, 50)),
        st.tuples(st.just("fail"), st.integers(0, 50)),
        st.tuples(st.just("answer"), st.integers(0, 50)),
        st.tuples(st.just("ask"), st.integers(0, 3)),
        st.tuples(st.just("tell"), st.integers(0, 1)),
        st.tuples(st.just("wait"), st.integers(0, 400)),
    ),
    max_size=120,
)


@settings(max_examples=150)
@given(STEPS, st.booleans())
def test_whatever_happens_the_counts_are_right_and_the_unwell_are_left_alone(steps: list[tuple[str, int]], names: bool) -> None:
    targets = ("a", "b", "c")
    pool, clock, opened = make_pool(*targets, max_connections=2, names=names)
    held: list[ConnectionLease[str]] = []
    asked: list[HealthProbe[str]] = []
    closed: list[str] = []
    for what, number in steps:
        states = {state.target: state for state in pool.states()}
        if what == "take":
            avoid = [target for bit, target in enumerate(targets) if number >> bit & 1]
            lease = pool.take(avoid)
            well = [target for target in targets if states[target].well]
            allowed = [target for target in well if target not in avoid] or well or targets
            assert lease.target in allowed
            if well:
                assert states[lease.target].num_open == min(states[target].num_open for target in allowed)
            assert lease.wire not in closed
            held.append(lease)
        elif what == "ask":
            due = pool.due()
            assert all(not states[probe.router.target].well for probe in due)
            asked += due
            assert len({probe.router.target for probe in asked}) == len(asked)
        elif what == "tell" and asked:
            pool.probed(asked.pop(), well=bool(number))
        elif what == "wait":
            clock.now += number
            closed += pool.worn()
        elif held and what == "release":
            held.pop(number % len(held)).release()
        elif held and what == "fail":
            held[number % len(held)].failed()
        elif held and what == "answer":
            held[number % len(held)].answered()
    for state in pool.states():
        assert state.num_open == sum(lease.target == state.target for lease in held)
        assert state.num_connections <= 2
    assert not set(closed) & {lease.wire for lease in held}, "nothing in use is closed"
    for lease in held:
        lease.release()
    closed += pool.worn()
    assert sorted([*closed, *pool.wires()]) == sorted(f"{target}#{n + 1}" for target in opened for n in range(opened[target]))


def test_choosing_is_fair_among_equals() -> None:
    routers: list[RouterEndpoint[str]] = [RouterEndpoint(target) for target in "abcd"]
    draw = random.Random(7)
    counts = Counter(choose(routers, (), draw).target for _ in range(4000))
    assert all(850 < counts[target] < 1150 for target in "abcd")


@pytest.mark.parametrize(
    ("target", "is_name"),
    [
        ("localhost:1", False),
        ("127.0.0.1:1", False),
        ("[::1]:1", False),
        ("unix:/tmp/socket", False),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", False),
        ("router.namespace.svc:50051", True),
        ("dns:///router:50051", True),
    ],
)
def test_what_is_a_name(target: str, is_name: bool) -> None:
    routers: list[RouterEndpoint[str]] = routers_of(target)
    assert [router.is_name for router in routers] == [is_name]


def test_behind_a_name_calls_go_to_all_addresses() -> None:
    assert "round_robin" in str(dict(options_for("router:50051"))["grpc.service_config"])
    assert "grpc.service_config" not in dict(options_for("localhost:50051"))
    assert dict(options_for("localhost:50051"))["grpc.enable_http_proxy"] == 0


def test_the_key_is_shown_and_never_told() -> None:
    assert key_metadata("sk-1", ["localhost:1"], tls=False) == (("authorization", "Bearer sk-1"),)
    assert key_metadata("sk-1", ["router:1"], tls=True) == (("authorization", "Bearer sk-1"),)
    assert key_metadata(None, ["router:1"], tls=False) == ()
    assert key_metadata("", ["router:1"], tls=False) == ()
    with pytest.warns(UserWarning, match="to router:1 unencrypted") as told:
        key_metadata("sk-secret", ["localhost:1", "router:1"], tls=False)
    assert "secret" not in str(told[0].message)
    for bad in ("sk-secret\n", "sk secret", "sk-sécret", "x" * 513, 7):
        with pytest.raises(InvalidRequest, match="api_key") as refused:
            key_metadata(bad, ["localhost:1"], tls=False)  # type: ignore[arg-type]
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("bad", ["x", "00-0-0-00", f"00-{'0' * 32}-{'1' * 16}-01", f"ff-{'1' * 32}-{'1' * 16}-01", 5])
def test_a_trace_context_that_is_none(bad: str) -> None:
    with pytest.raises(InvalidRequest, match="traceparent"):
        trace_of(bad)


@pytest.mark.parametrize("target", ["", "localhost", "http://localhost:50051", "localhost:http"])
def test_bad_target(target: str) -> None:
    with pytest.raises(InvalidRequest, match="host:port"):
        routers_of(target)


def test_tls_files() -> None:
    with pytest.raises(SetupError, match="/does/not/exist"):
        Client("localhost:1", tls_ca="/does/not/exist")
    with pytest.raises(SetupError, match="go together"):
        Client("localhost:1", tls_cert="/c.pem")


def test_short_requests_are_not_compressed() -> None:
    gzip = grpc.Compression.Gzip
    assert [compression_for(size, gzip) for size in (100, 1023, 1024, 1 << 20)] == [None, None, gzip, gzip]
    assert compression_for(1 << 20, None) is None
