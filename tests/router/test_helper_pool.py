"""Processes that may die of what they are asked, and the pool that keeps them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop

from router.prompting.helper_pool import MEMORY, TIME, Helper, HelperPool, HelperProcess, Lost
from router.waiting.turns import Turns
from twostep.errors import ResourceExhausted, SetupError

# Answers with its number and what it was asked, or does as it is told.
MODULE = """
import os, time
from twostep.errors import SetupError
from twostep.process.helper_service import serve

def begin(setup):
    if setup == b"broken":
        raise SetupError("no such setup")
    if setup.startswith(b"die once, "):
        first = not os.path.exists(setup[10:])
        open(setup[10:], "w").close()
        if first:
            os._exit(3)
    if setup == b"die":
        os._exit(3)
    def answer(asked):
        if asked == b"die":
            os._exit(1)
        while asked == b"compute":
            pass
        if asked == b"block":
            time.sleep(3600)
        if asked.startswith(b"compute for "):
            until = time.process_time() + float(asked[12:])
            while time.process_time() < until:
                pass
        if asked.startswith(b"wait for "):
            while not os.path.exists(asked[9:]):
                time.sleep(0.01)
        return b"%d %s" % (os.getpid(), asked)
    return answer

serve(begin)
"""


@pytest.fixture
async def pool_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., HelperPool]]:
    (tmp_path / "helper_of_the_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    made: list[HelperPool] = []

    def of(setup: bytes = b"", *, num_processes: int = 2) -> HelperPool:
        made.append(HelperPool(Helper(module="helper_of_the_test", setup=setup, purpose="be tested"), num_processes))
        return made[-1]

    yield of
    for pool in made:
        await pool.close()


def turns(*, most: int = 64, at_once: int = 2, each: int = 2) -> Turns:
    return Turns("questions wait", most=most, at_once=at_once, each=each)


async def test_one_that_is_lost_is_replaced_and_says_of_what(pool_of: Callable[..., HelperPool]) -> None:
    pool = pool_of(num_processes=1)
    first = await pool.ask(turns(), "caller", b"a", b"b", cpu_s=0.0)
    assert first.endswith(b" ab")
    assert await pool.ask(turns(), "caller", b"ab", cpu_s=0.0) == first, "it is the same process"
    for question, of in ((b"die", MEMORY), (b"compute", TIME)):
        with pytest.raises(Lost) as lost:
            await pool.ask(turns(), "caller", question, cpu_s=0.1)
        assert lost.value.args == (of,)
        assert (await pool.ask(turns(), "caller", b"ab", cpu_s=0.0)) != first


async def test_a_queue_has_an_end_and_leaves_room_for_another(pool_of: Callable[..., HelperPool], tmp_path: Path) -> None:
    pool, long, short = pool_of(), turns(most=4, at_once=1), turns()
    gate = b"wait for %s/gate" % os.fsencode(tmp_path)
    working = [asyncio.create_task(pool.ask(long, "caller", gate, cpu_s=0.0)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted):
        await pool.ask(long, "caller", b"a", cpu_s=0.0)
    assert (await pool.ask(short, "caller", b"a", cpu_s=0.0)).endswith(b" a")
    assert not any(task.done() for task in working)
    # A caller that leaves takes neither the process nor the place of the other with it.
    working[0].cancel()
    (tmp_path / "gate").touch()
    assert (await working[1]).endswith(b"gate")
    assert (await pool.ask(long, "caller", b"a", cpu_s=0.0)).endswith(b" a")


async def test_one_that_computes_waits_as_long_as_it_takes_and_one_that_is_stuck_does_not(
    pool_of: Callable[..., HelperPool], tmp_path: Path
) -> None:
    """The clock on the wall ends nobody's question: a busy machine is nobody's fault."""
    pool_of()
    process = await HelperProcess.start("helper_of_the_test")
    await process.ask(b"", cpu_s=0.0)
    with pytest.raises(Lost) as lost:
        await process.ask(b"compute", cpu_s=0.3, stuck_s=0.1)
    assert lost.value.args == (TIME,)
    process = await HelperProcess.start("helper_of_the_test")
    await process.ask(b"", cpu_s=0.0)
    with pytest.raises(TimeoutError):
        await process.ask(b"block", cpu_s=0.0, stuck_s=0.1)
    await process.end()


async def test_what_an_answer_took_of_the_processor_is_told(pool_of: Callable[..., HelperPool]) -> None:
    pool_of()
    process = await HelperProcess.start("helper_of_the_test")
    await process.ask(b"", cpu_s=0.0)
    answers = [await process.ask(b"compute for 0.05", cpu_s=60.0), await process.ask(b"a", cpu_s=60.0)]
    assert answers[0].cpu_s >= 0.05 > answers[1].cpu_s
    await process.end()


async def test_what_cannot_be_set_up_is_said_each_time(pool_of: Callable[..., HelperPool]) -> None:
    pool = pool_of(b"broken")
    for _ in range(2):
        with pytest.raises(SetupError, match="no such setup"):
            await pool.ask(turns(), "caller", b"a", cpu_s=0.0)
    with pytest.raises(SetupError):
        await pool.start()


async def test_one_that_dies_at_its_start_is_started_once_more(pool_of: Callable[..., HelperPool], tmp_path: Path) -> None:
    pool = pool_of(b"die once, %s/started" % os.fsencode(tmp_path))
    assert (await pool.ask(turns(), "caller", b"a", cpu_s=0.0)).endswith(b" a")
    with pytest.raises(SetupError, match="status 3"):
        await pool_of(b"die").start()


async def test_nothing_is_left_of_a_closed_pool(pool_of: Callable[..., HelperPool], tmp_path: Path) -> None:
    pool = pool_of()
    pids = {int((await pool.ask(turns(), "caller", b"a", cpu_s=0.0)).split()[0])}
    abandoned = asyncio.create_task(pool.ask(turns(), "caller", b"wait for %s/never" % os.fsencode(tmp_path), cpu_s=0.0))
    await asyncio.sleep(0)
    abandoned.cancel()
    await pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def test_an_interrupt_at_the_terminal_does_not_reach_them(pool_of: Callable[..., HelperPool]) -> None:
    pool = pool_of(num_processes=1)
    first = await pool.ask(turns(), "caller", b"a", cpu_s=0.0)
    os.kill(int(first.split()[0]), signal.SIGINT)
    assert await pool.ask(turns(), "caller", b"a", cpu_s=0.0) == first


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_one_that_has_ended_is_lost(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def ask() -> None:
        process = await HelperProcess.start("json")
        await process.end()
        with pytest.raises(Lost):
            await process.ask(b"anything", cpu_s=0.0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(ask())
