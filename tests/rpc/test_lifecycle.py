"""A process whose event loop hangs ends by itself, so that its supervisor starts it again; one that is idle, busy or stopped does not."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.rpc.lifecycle import Silence

LIMIT_S = 30.0
LOOK_S = 1.0


@given(st.lists(st.floats(LOOK_S, 3600.0), max_size=3))
def test_only_time_in_which_the_process_ran_counts(stops: list[float]) -> None:
    silence, now, looks = Silence(LIMIT_S, 0.0), 0.0, 0
    for stop in (*stops, *([LOOK_S] * 200)):
        now += stop
        looks += 1
        if silence.look(now, turned=False):
            break
    # A stop, however long, is as good as two looks.
    assert LIMIT_S / LOOK_S - len(stops) <= looks <= LIMIT_S / LOOK_S


@given(st.lists(st.integers(1, 29), min_size=1, max_size=20))
def test_a_loop_that_turns_now_and_then_is_left_alone(gaps: list[int]) -> None:
    silence, now = Silence(LIMIT_S, 0.0), 0.0
    for gap in gaps:
        for second in range(gap):
            now += LOOK_S
            assert not silence.look(now, turned=second == gap - 1)


HANGS = {
    "in Python": "while True: pass",
    "in a call of the system": "time.sleep(1000)",
    "with the interpreter's lock": "re.match('(a+)+$', 'a' * 60 + 'b')",
    "with its log full": "os.write(2, b'x' * (1 << 20))",
    "as good as dead": "ALIVE.clear(); await asyncio.sleep(1000)",
}
SCRIPT = """
import asyncio, os, re, signal, time
from twostep.rpc import event_loop
from twostep.rpc.lifecycle import stop_event, watch_loop

ALIVE = [1]

async def main():
    stop = stop_event(30.0)
    watching = asyncio.create_task(watch_loop(stop, 0.3, lambda: bool(ALIVE)))
    await asyncio.sleep(0)
    {then}

event_loop.run(main())
"""


def _ran(then: str) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(SCRIPT).format(then=then)
    process = subprocess.Popen([sys.executable, "-P", "-c", script], stderr=subprocess.PIPE, text=True)
    # Nobody reads the log meanwhile.
    status = process.wait(60)
    return subprocess.CompletedProcess(script, status, stderr=process.communicate()[1])


@pytest.mark.system
@pytest.mark.smoke
@pytest.mark.parametrize("then", HANGS.values(), ids=HANGS)
def test_a_hung_process_ends_and_shows_where(then: str) -> None:
    ended = _ran(then)
    assert ended.returncode == 1
    assert "in main" in ended.stderr or "xxx" in ended.stderr or "await" in then, ended.stderr


@pytest.mark.system
def test_a_process_that_drains_is_left_alone() -> None:
    # Longer than the loop may hang while it serves.
    drained = _ran("os.kill(os.getpid(), signal.SIGTERM); await stop.wait(); time.sleep(1.2); os._exit(7)")
    assert drained.returncode == 7
