"""The socket between a worker's two processes: both ends in one, on one event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_harness import WAIT_S

from twostep.engine.batch import TopToken
from twostep.engine.types import (
    FailureKind,
    FinishReason,
    PooledPrompt,
    PrefillProgress,
    PromptScores,
    SequenceFailure,
    StepOutput,
    StepTokens,
    TokenOutput,
)
from twostep.errors import ContextExceeded, InvalidRequest, ResourceExhausted, Unavailable
from twostep.step_curve import StepWorkload
from twostep.worker.link import STEP, Link
from twostep.worker.serialization import pack, unpack
from twostep.worker.step_record import decode, encode


@asynccontextmanager
async def ends(**calls: Any) -> AsyncIterator[tuple[Link, Link, list[Any]]]:
    """Two ends; the second one answers `calls`, and keeps what it is told."""
    ours, theirs = (Link(each) for each in socket.socketpair())
    told: list[Any] = []
    theirs.start(
        tells={"tell": told.append}, calls=calls, on_end=lambda: told.append("end"), on_step=lambda record: told.append(int(record))
    )
    ours.start(tells={}, calls={}, on_end=lambda: None)
    yield ours, theirs, told
    ours.close()
    theirs.close()


async def test_nothing_is_lost_or_overtaken_behind_an_end_that_does_not_read() -> None:
    ours, theirs = (Link(each) for each in socket.socketpair())
    ours.start(tells={}, calls={}, on_end=lambda: None)
    waiting, told, steps = threading.Event(), list[Any](), 3000

    def stopped() -> bool:
        waiting.set()
        return False

    def send() -> None:
        for step in range(steps):
            ours.send_bounded(STEP, b"%2000d" % step, stopped)
            if step % 100 == 0:
                ours.tell("tell", f"after {step}")

    sender = threading.Thread(target=send)
    sender.start()
    await asyncio.to_thread(waiting.wait, WAIT_S)
    assert sender.is_alive(), "it goes on without bound"
    done = asyncio.Event()

    def step_came(record: bytes) -> None:
        told.append(int(record))
        if told[-1] == steps - 1:
            done.set()

    theirs.start(tells={"tell": told.append}, calls={}, on_end=lambda: None, on_step=step_came)
    await asyncio.wait_for(done.wait(), WAIT_S)
    await asyncio.to_thread(sender.join, WAIT_S)
    assert told == [each for step in range(steps) for each in ([step, f"after {step}"] if step % 100 == 0 else [step])]
    ours.close()
    theirs.close()


async def test_errors_arrive_as_what_they_are() -> None:
    errors = [
        InvalidRequest("no"),
        ResourceExhausted("full", retry_after_s=0.5),
        ContextExceeded("long", prompt_tokens=9, max_tokens=None, max_model_len=8),
    ]

    async def fail(number: int) -> None:
        raise errors[number]

    async with ends(fail=fail) as (ours, _, _):
        for number, error in enumerate(errors):
            with pytest.raises(type(error)) as caught:
                await ours.call("fail", number)
            assert (caught.value.args, vars(caught.value)) == (error.args, vars(error))


@pytest.mark.parametrize("settle", [False, True])
async def test_what_is_given_up_is_cancelled_there(settle: bool) -> None:
    began, freed, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            # As a copy that cannot be called back.
            await freed.wait()
            ended.append("there")

    async with ends(work=work) as (ours, _, _):
        asking = asyncio.create_task(ours.call("work", settle=settle))
        await began.wait()
        asking.cancel()
        if settle:
            await asyncio.wait([asking], timeout=0)
            asking.cancel()
            freed.set()
            await asyncio.wait([asking])
            assert ended == ["there"], "it is over here before it is over there"
        else:
            await asyncio.wait([asking])
            assert not ended
            freed.set()
        with pytest.raises(Unavailable):
            await ours.call("work", deadline=time.monotonic(), settle=settle)


async def test_an_answer_that_comes_in_the_moment_of_giving_up_is_enough() -> None:
    async def work(number: int) -> int:
        return number

    async with ends(work=work) as (ours, _, _):
        for turns in range(40):
            asking = asyncio.create_task(ours.call("work", turns, settle=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            done, _ = await asyncio.wait([asking], timeout=WAIT_S)
            assert done, f"given up after {turns} turns of the loop, it waits for ever"


async def test_the_end_of_one_ends_what_the_other_waits_for() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async with ends(never=never) as (ours, theirs, _):
        asked = [asyncio.create_task(ours.call("never", settle=settle)) for settle in (False, True)]
        await asyncio.sleep(0)
        ours.tell("tell", "last words")
        theirs.close()
        assert all(isinstance(each, Unavailable) for each in await asyncio.gather(*asked, return_exceptions=True))
        with pytest.raises(Unavailable):
            await ours.call("never")
        ours.tell("tell", "to nobody")


# ---- what travels ------------------------------------------------------------------------------------------------------------

names = [f"s{i}" for i in range(6)]
small = st.integers(0, 2**31 - 1)
token_outputs = st.builds(
    TokenOutput,
    seq_id=st.sampled_from(names),
    token_id=small,
    position=small,
    logprob=st.none() | st.floats(-9, 0),
    top_logprobs=st.lists(st.builds(TopToken, small, st.floats(-9, 0)), max_size=2).map(tuple),
    finish_reason=st.sampled_from([None, *FinishReason]),
)
scores = st.integers(1, 3).map(lambda n: PromptScores(seq_id="s1", first=n, values=np.arange(2.0 * n).reshape(n, 2)))
pooled = st.sampled_from(["s1", "s2"]).map(lambda name: PooledPrompt(seq_id=name, vector=np.arange(3, dtype=np.float32)))
outputs = st.builds(
    StepOutput,
    step=st.integers(0, 2**40),
    tokens=st.lists(token_outputs, max_size=6).map(StepTokens.of),
    progress=st.lists(
        st.builds(
            PrefillProgress,
            seq_id=st.sampled_from(names),
            num_computed_tokens=small,
            num_cached_tokens=small,
            first_scheduled=st.booleans(),
        ),
        max_size=3,
    ),
    failures=st.lists(
        st.builds(SequenceFailure, seq_id=st.sampled_from(names), message=st.text(), kind=st.sampled_from(FailureKind)), max_size=3
    ),
    scores=st.lists(scores, max_size=2),
    pooled=st.lists(pooled, max_size=2),
    workload=st.builds(StepWorkload, prompt_tokens=small, pairs=st.floats(0, 1e9), decodes=small, context=st.integers(0, 2**40)),
    duration_s=st.floats(0, 9),
    ended_at=st.floats(0, 1e9),
    timed=st.booleans(),
    launch_s=st.floats(0, 9),
)


@given(output=outputs, known=st.sets(st.sampled_from(names)))
def test_a_step_is_told_as_it_was_of_the_sequences_that_are_known(output: StepOutput, known: set[str]) -> None:
    handles = {name: number for number, name in enumerate(names, 1) if name in known}
    told = decode(encode(output, handles), {number: name for name, number in handles.items()})
    assert [token for token in told.tokens if token.seq_id] == [token for token in output.tokens if token.seq_id in known]
    assert len(told.tokens) == len(output.tokens)
    for kind in ("progress", "failures"):
        assert getattr(told, kind) == [each for each in getattr(output, kind) if each.seq_id in known]
    found = [(each.first, each.values.tolist()) for each in told.scores]
    assert found == [(each.first, each.values.tolist()) for each in output.scores if each.seq_id in known]
    vectors = [(each.seq_id, each.vector.tolist()) for each in told.pooled]
    assert vectors == [(each.seq_id, each.vector.tolist()) for each in output.pooled if each.seq_id in known]
    for each in ("step", "workload", "duration_s", "ended_at", "timed", "launch_s"):
        assert getattr(told, each) == getattr(output, each)


def test_what_nobody_has_named_does_not_travel() -> None:
    with pytest.raises(TypeError):
        pack(object())
    assert unpack(pack(1, "a", (1, 2), [b"c"], None)) == [1, "a", (1, 2), (b"c",), None]
