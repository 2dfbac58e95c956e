"""Admission, the queue for room, the output buffer, clean-ups: bounds that hold, and order that is kept."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission import Admission
from router.cleanup import Cleanup
from router.output import Output
from router.room import Room
from twostep.errors import InternalError, InvalidRequest, ResourceExhausted, Unavailable
from twostep.rpc.v1 import prefill_pb2


async def enter(admission: Admission, num_tokens: int, log: list[int], hold: asyncio.Event) -> None:
    async with admission.slot(num_tokens):
        log.append(num_tokens)
        await hold.wait()


async def test_admission_keeps_both_bounds_and_the_order() -> None:
    admission = Admission(max_inflight=2, max_waiting=3, max_prompt_tokens=100)
    hold, log = asyncio.Event(), []
    tasks = [asyncio.create_task(enter(admission, n, log, hold)) for n in (60, 41, 1)]
    await asyncio.sleep(0)
    # 41 does not fit beside 60, and 1, which would, stays behind it.
    assert (log, admission.num_inflight, admission.num_waiting) == ([60], 1, 2)
    hold.set()
    await asyncio.gather(*tasks)
    assert log == [60, 41, 1]
    assert (admission.num_inflight, admission.num_waiting) == (0, 0)


async def test_admission_refuses_what_can_never_fit_what_is_too_much_and_everything_once_closed() -> None:
    admission = Admission(max_inflight=1, max_waiting=1, max_prompt_tokens=100)
    hold, log = asyncio.Event(), []
    with pytest.raises(InvalidRequest, match="101"):
        await enter(admission, 101, log, hold)
    tasks = [asyncio.create_task(enter(admission, n, log, hold)) for n in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted, match="max-waiting"):
        await enter(admission, 3, log, hold)
    admission.close()
    with pytest.raises(Unavailable, match="draining"):
        await tasks[1]
    with pytest.raises(Unavailable, match="draining"):
        await enter(admission, 3, log, hold)
    hold.set()
    await tasks[0]
    assert log == [1]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_admission_loses_no_place_whoever_is_cancelled_when(plan: list[tuple[int, int, int]]) -> None:
    async def run() -> None:
        admission = Admission(max_inflight=2, max_waiting=20, max_prompt_tokens=100)

        async def one(num_tokens: int, held_turns: int) -> None:
            async with admission.slot(num_tokens):
                for _ in range(held_turns):
                    await asyncio.sleep(0)

        tasks = [asyncio.create_task(one(tokens, held)) for tokens, held, _ in plan]
        for turn in range(4):
            await asyncio.sleep(0)
            assert admission.num_inflight <= 2
            for task, (_, _, cancelled_at) in zip(tasks, plan, strict=True):
                if cancelled_at == turn and turn:
                    task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError)
        assert (admission.num_inflight, admission.num_waiting) == (0, 0)
        async with admission.slot(100):
            pass

    asyncio.run(run())


async def test_room_lets_one_try_at_a_time_and_a_release_wakes_it() -> None:
    room = Room(retry_s=5.0)
    order: list[int] = []
    free = 0

    async def wanting(i: int) -> None:
        nonlocal free
        async with room.turn():
            while not free:
                await room.wait()
            free -= 1
            order.append(i)

    tasks = [asyncio.create_task(wanting(i)) for i in range(4)]
    await asyncio.sleep(0.01)
    assert room.num_queued == 4
    tasks[1].cancel()
    for _ in range(3):
        free += 1
        room.release()
        await asyncio.sleep(0.01)
    await asyncio.wait(tasks, timeout=1)
    assert order == [0, 2, 3]
    assert room.num_queued == 0


def token(position: int) -> prefill_pb2.Token:
    return prefill_pb2.Token(token_id=100 + position, position=position)


async def test_output_hands_over_what_there_is_and_then_the_end_or_the_error() -> None:
    output = Output(max_buffered=10, on_cut=lambda: None)
    taking = asyncio.create_task(output.take())
    await asyncio.sleep(0)
    for i in range(3):
        output.push(token(i))
    batch = await taking
    assert ([t.token_id for t in batch.tokens], batch.last) == ([100, 101, 102], False)
    output.push(token(3))
    output.fail(InternalError("broken"))
    output.push(token(4))
    assert [t.position for t in (await output.take()).tokens] == [3]
    with pytest.raises(InternalError, match="broken"):
        await output.take()
    assert output.token_ids == [100, 101, 102, 103]
    ended = Output(max_buffered=10, on_cut=lambda: None)
    ended.push(token(0))
    ended.end()
    ended.fail(InternalError("too late"))
    assert (await ended.take()).last


async def test_output_cuts_who_is_too_far_behind_or_away_too_long() -> None:
    cuts: list[str] = []
    output = Output(max_buffered=5, on_cut=lambda: cuts.append("behind"))
    for _ in range(9):
        output.push(token(output.next_position))
    assert cuts == ["behind"]
    assert output.cut is not None
    waiting = Output(max_buffered=5, on_cut=lambda: cuts.append("away"))
    waiting.cut_if_stuck(0.0)
    taking = asyncio.create_task(waiting.take())
    await asyncio.sleep(0.01)
    waiting.cut_if_stuck(0.0)
    assert cuts == ["behind"], "who waits for tokens is not stuck"
    waiting.push(token(0))
    await taking
    await asyncio.sleep(0.01)
    waiting.cut_if_stuck(0.001)
    assert cuts == ["behind", "away"]


async def test_cleanups_are_bounded_and_their_failures_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.cleanup._MAX_PENDING", 2)
    cleanup = Cleanup()
    done: list[int] = []
    hold = asyncio.Event()

    async def work(i: int) -> None:
        await hold.wait()
        done.append(i)
        if i == 1:
            raise RuntimeError("a bug")

    for i in range(3):
        cleanup.spawn(work(i))
    assert len(cleanup) == 2
    await asyncio.sleep(0)
    hold.set()
    await cleanup.drain(1.0)
    assert done == [0, 1]
    assert len(cleanup) == 0
    assert any("clean-up failed" in r.message for r in caplog.records)
    hold.clear()
    cleanup.spawn(work(5))
    await asyncio.sleep(0)
    with contextlib.suppress(asyncio.CancelledError):
        await cleanup.drain(0.01)
    assert len(cleanup) == 0
