"""Which prefixes the host keeps: against plain LRU where documents are read once, and rule by rule."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from twostep.engine.reuse import ONCE_SHARE, ReuseOrder


@functools.cache
def digest(number: int) -> bytes:
    """Returns a hash as spread out as an HMAC."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def fill(order: ReuseOrder, numbers: Iterable[int], *, reused: bool) -> None:
    for number in numbers:
        order.put(digest(number), reused=reused)


def test_a_block_asked_for_twice_within_a_while_is_a_reused_one() -> None:
    order = ReuseOrder(10)
    order.asked([digest(1), digest(2)])
    order.asked([digest(2)])
    assert [order.reused(digest(i)) for i in (1, 2, 3)] == [False, True, False]
    order.asked([digest(i) for i in range(100, 140)])
    order.asked([digest(1)])
    assert order.reused(digest(1))
    assert order.reused(digest(2)), "remembered through the next generation"
    for start in (200, 300):
        order.asked([digest(start + i) for i in range(50)])
    assert not order.reused(digest(1))
    assert not order.reused(digest(2))


def test_what_is_asked_for_once_pushes_out_only_its_like() -> None:
    order = ReuseOrder(20)
    fill(order, range(17), reused=True)
    fill(order, range(100, 103), reused=False)
    assert next(iter(order.victims(reused=False))) == digest(100)
    assert next(iter(order.victims(reused=True))) == digest(100), "more than their share: they make room for what is reused"
    order.drop(digest(100))
    fill(order, [17], reused=True)
    assert next(iter(order.victims(reused=True))) == digest(0), "a tenth is theirs"
    assert next(iter(order.victims(reused=False))) == digest(101)
    order.drop(digest(101))
    fill(order, [18], reused=True)
    assert next(iter(order.victims(reused=False))) == digest(0)
    assert int(20 * ONCE_SHARE) == 2


def test_what_is_used_is_the_last_to_go_its_head_after_its_tail() -> None:
    order = ReuseOrder(8)
    fill(order, range(4), reused=True)
    fill(order, [10, 11], reused=False)
    order.used([digest(10), digest(1)])
    assert list(order) == [digest(n) for n in (11, 0, 2, 3, 1, 10)]


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=200), st.integers(1, 12))
def test_it_never_holds_more_than_it_may_nor_twice(events: list[tuple[int, bool]], capacity: int) -> None:
    order = ReuseOrder(capacity)
    for number, asked in events:
        found = digest(number)
        if asked:
            order.asked([found])
        if found in order:
            order.used([found])
            continue
        reused = order.reused(found)
        if len(order) == capacity:
            order.drop(next(iter(order.victims(reused=reused))))
        order.put(found, reused=reused)
        held = list(order)
        assert len(held) == len(set(held)) == len(order) <= capacity
        assert set(order.victims(reused=reused)) == set(held)
