"""The supervisor over trivial processes: restart, order, failures, and nobody outlives it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from twostep.errors import SetupError
from twostep.local import ports
from twostep.local.ports import free_ports
from twostep.local.run import LogFollower
from twostep.local.supervisor import Component, ComponentFailed, Observer, Process, Supervisor, tail, until_interrupted
from twostep.process.ending import how_it_ended, oom_kills
from twostep.process.ports import check_free

# Real processes and real pauses: two of them are in the first tier.
pytestmark = pytest.mark.system


class Journal:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def starting(self, name: str) -> None:
        self.events.append(f"starting {name}")

    def ready(self, name: str, seconds: float) -> None:
        self.events.append(f"ready {name}")

    def died(self, name: str, how: str, pause_s: float) -> None:
        self.events.append(f"died {name} {how} {pause_s:g}")

    def stopping(self, names: Sequence[str]) -> None:
        self.events.append(f"stopping {' '.join(sorted(names))}")

    def killed(self, name: str) -> None:
        self.events.append(f"killed {name}")

    def failed(self, name: str, why: str) -> None:
        self.events.append(f"failed {name}: {why.partition('.')[0]}")


def component(tmp: Path, name: str, script: str = "", **more: object) -> Component:
    """A process that runs `script`, says that it is ready by a file, and waits for a signal."""
    sign = tmp / f"{name}.up"
    body = f"import pathlib, time, sys, os, signal\n{textwrap.dedent(script)}\npathlib.Path({str(sign)!r}).touch()\ntime.sleep(1000)"

    async def ready() -> bool:
        return await asyncio.to_thread(sign.exists)

    return Component(
        name=name,
        argv=(sys.executable, "-I", "-S", "-c", body),
        env=dict(os.environ),
        ready=ready,
        prepare=lambda: sign.unlink(missing_ok=True),
        **more,  # type: ignore[arg-type]
    )


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  other processes do not set events
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.smoke
async def test_starts_in_order_and_stops_in_order(tmp_path: Path) -> None:
    journal = Journal()
    parts = [
        component(tmp_path, "front", stop_order=0, stop_grace_s=60, after=("store",)),
        component(tmp_path, "worker", stop_order=1, stop_grace_s=60, after=("store",)),
        component(tmp_path, "store", stop_order=2),
    ]
    supervisor = Supervisor(parts, run_dir=tmp_path, observer=journal)
    await supervisor.start()
    pids = [supervisor.pid_of(name) for name in ("front", "worker", "store")]
    assert all(pid is not None and alive(pid) for pid in pids)
    await supervisor.stop()
    assert journal.events[:2] == ["starting store", "ready store"]
    assert [e for e in journal.events if e.startswith("stopping")] == ["stopping front", "stopping worker", "stopping store"]
    assert not any(pid is not None and alive(pid) for pid in pids)
    await supervisor.stop()


async def test_a_crash_is_reported_and_mended_with_growing_pauses(tmp_path: Path) -> None:
    journal = Journal()
    supervisor = Supervisor([component(tmp_path, "worker")], run_dir=tmp_path, observer=journal)
    await supervisor.start()
    try:
        first = supervisor.pid_of("worker")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: journal.events.count("ready worker") == 2)
        second = supervisor.pid_of("worker")
        assert second is not None
        assert second != first
        os.kill(second, signal.SIGSEGV)
        await until(lambda: journal.events.count("ready worker") == 3)
        assert [e for e in journal.events if e.startswith("died")] == [
            f"died worker {how_it_ended(137, oom_kills_before=oom_kills())} 0.5",
            f"died worker {how_it_ended(139)} 1",
        ]
        assert supervisor.num_restarts == 2
    finally:
        await supervisor.stop()


async def test_the_first_failure_ends_the_start_with_the_end_of_the_log(tmp_path: Path) -> None:
    parts = [
        component(tmp_path, "good"),
        component(tmp_path, "bad", "print('weights are truncated: copy them again'); sys.exit(3)", hint="Try another model."),
    ]
    supervisor = Supervisor(parts, run_dir=tmp_path, observer=Journal())
    with pytest.raises(ComponentFailed, match=r"(?s)bad exited with status 3, at its start.*weights are truncated.*Try another model"):
        await supervisor.start()
    pid = supervisor.pid_of("good")
    await supervisor.stop()
    assert pid is None or not alive(pid)


@pytest.mark.parametrize("recovers", [True, False])
async def test_a_start_that_may_be_tried_again_is(tmp_path: Path, recovers: bool) -> None:
    journal = Journal()
    mark = tmp_path / "tried"
    script = f"tried = pathlib.Path({str(mark)!r})\nagain = tried.exists()\ntried.touch()\nif not (again and {recovers}): sys.exit(5)"
    supervisor = Supervisor([component(tmp_path, "slow", script, start_attempts=2)], run_dir=tmp_path, observer=journal)
    if recovers:
        await supervisor.start()
    else:
        with pytest.raises(ComponentFailed, match="slow exited with status 5"):
            await supervisor.start()
    await supervisor.stop()
    begun = ["starting slow", "died slow exited with status 5 0.5", "starting slow"]
    assert journal.events[:4] == ([*begun, "ready slow"] if recovers else begun)


async def test_what_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    slow = component(tmp_path, "slow", "time.sleep(60)", ready_timeout_s=0.3)
    supervisor = Supervisor([slow], run_dir=tmp_path, observer=Journal())
    with pytest.raises(ComponentFailed, match=r"slow was not ready after 0\.3 s"):
        await supervisor.start()
    await supervisor.stop()


async def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    missing = Component(name="no", argv=("/does/not/exist",), env={}, ready=never)
    supervisor = Supervisor([missing], run_dir=tmp_path, observer=Journal())
    with pytest.raises(ComponentFailed, match="cannot start /does/not/exist: No such file"):
        await supervisor.start()
    await supervisor.stop()


async def test_who_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    journal = Journal()
    deaf = component(tmp_path, "deaf", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", stop_grace_s=0.3)
    supervisor = Supervisor([deaf], run_dir=tmp_path, observer=journal)
    await supervisor.start()
    pid = supervisor.pid_of("deaf")
    await supervisor.stop()
    assert pid is not None
    assert not alive(pid)
    assert journal.events[-1] == "killed deaf"


async def test_kill_during_a_slow_drain(tmp_path: Path) -> None:
    journal = Journal()
    deaf = component(tmp_path, "deaf", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", stop_grace_s=1000)
    supervisor = Supervisor([deaf], run_dir=tmp_path, observer=journal)
    await supervisor.start()
    stopping = asyncio.create_task(supervisor.stop())
    await until(lambda: journal.events[-1:] == ["stopping deaf"])
    supervisor.kill()
    await asyncio.wait_for(stopping, 60)


async def test_stop_during_the_start(tmp_path: Path) -> None:
    supervisor = Supervisor([component(tmp_path, "slow", "time.sleep(60)")], run_dir=tmp_path, observer=Journal())
    starting = asyncio.create_task(supervisor.start())
    await until(lambda: supervisor.pid_of("slow"))
    pid = supervisor.pid_of("slow")
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await supervisor.stop()
    assert pid is not None
    assert not alive(pid)


async def test_components_come_and_go_while_the_others_run(tmp_path: Path) -> None:
    journal = Journal()
    supervisor = Supervisor([component(tmp_path, "a"), component(tmp_path, "b")], run_dir=tmp_path, observer=journal)
    await supervisor.start()
    waiting = asyncio.create_task(supervisor.wait())
    supervisor.add(component(tmp_path, "c"))
    supervisor.add(component(tmp_path, "broken", "sys.exit(3)"))
    await until(lambda: supervisor.is_ready("c") and "failed broken: broken exited with status 3, at its start" in journal.events)
    assert supervisor.names == ("a", "b", "c")
    gone = supervisor.pid_of("a")
    assert gone is not None
    await asyncio.gather(supervisor.retire("a"), supervisor.retire("a"), supervisor.retire("broken"))
    assert not alive(gone)
    assert supervisor.names == ("b", "c")
    # The others are kept running, and the name may be used again.
    supervisor.kill_one("c")
    await until(lambda: journal.events.count("ready c") == 2)
    supervisor.add(component(tmp_path, "a"))
    await until(lambda: supervisor.is_ready("a"))
    assert not waiting.done()
    await supervisor.stop()
    assert journal.events.count("starting a") == 2
    assert not any(event.startswith("killed") for event in journal.events)
    await asyncio.wait_for(waiting, 30)


async def test_a_stop_waits_for_a_drain_that_has_begun_and_asks_for_it_once(tmp_path: Path) -> None:
    """A second SIGTERM would cut it short."""
    journal, asked = Journal(), tmp_path / "asked"
    script = f"""
    def slowly(*_):
        with open({str(asked)!r}, "a") as file:
            file.write("x")
        time.sleep(1)
        sys.exit(0)
    signal.signal(signal.SIGTERM, slowly)
    """
    supervisor = Supervisor([component(tmp_path, "a", script, stop_grace_s=60)], run_dir=tmp_path, observer=journal)
    await supervisor.start()
    retiring = asyncio.create_task(supervisor.retire("a"))
    await until(asked.exists)
    # The task that waited for it has gone too.
    retiring.cancel()
    await asyncio.wait([retiring])
    await supervisor.stop()
    assert asked.read_text() == "x"
    assert supervisor.pid_of("a") is None
    assert "killed a" not in journal.events


@pytest.mark.smoke
async def test_the_first_signal_ends_the_work_and_the_second_kills() -> None:
    killed = asyncio.Event()

    async def work(seconds: float) -> int:
        if seconds:
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(seconds)
        return 3

    try:
        assert await until_interrupted(work(0.0), killed.set) == 3
        assert await until_interrupted(work(1000.0), killed.set) is None
        assert not killed.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(killed.wait(), 60)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)


async def test_what_a_process_leaves_behind_goes_with_it(tmp_path: Path) -> None:
    """A daemon of its own session, as Ray starts them, dies though its parent did not end it."""
    pid_file = tmp_path / "daemon"
    script = f"""
        import subprocess
        daemon = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"], start_new_session=True)
        pathlib.Path({str(pid_file)!r}).write_text(str(daemon.pid))
    """
    supervisor = Supervisor([component(tmp_path, "parent", script)], run_dir=tmp_path, observer=Journal())
    await supervisor.start()
    daemon = int(pid_file.read_text())
    assert alive(daemon)
    await supervisor.stop()
    assert not alive(daemon)


@pytest.mark.smoke
@pytest.mark.parametrize("victim", ["supervisor", "guardian"])
def test_nobody_outlives_a_killed_supervisor(tmp_path: Path, victim: str) -> None:
    """SIGKILL leaves no time for anything: pipes and the kernel must do it."""
    script = f"""
        import asyncio, os, sys, time
        from pathlib import Path
        from twostep.local.supervisor import Process
        async def main():
            command = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)")
            tmp = Path({str(tmp_path)!r})
            process = await Process.start(command, env={{}}, log=tmp / "log", pid_file=tmp / "pid", cwd=tmp)
            while process.pid is None:
                await asyncio.sleep(0.01)
            print(process.pid, flush=True)
            await process.wait()
        asyncio.run(main())
    """
    with subprocess.Popen([sys.executable, "-P", "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert alive(pid)
        guardian = psutil.Process(pid).ppid()
        assert guardian != supervisor.pid
        os.kill(supervisor.pid if victim == "supervisor" else guardian, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while alive(pid) or alive(guardian):
            assert time.monotonic() < deadline
            time.sleep(0.02)


async def test_the_guardians_command_line_does_not_look_like_the_commands(tmp_path: Path) -> None:
    command = (sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)", "marker-of-the-command")
    process = await Process.start(command, env={}, log=tmp_path / "log", pid_file=tmp_path / "pid", cwd=tmp_path)
    await until(lambda: process.pid)
    assert process.pid is not None
    guardian = psutil.Process(process.pid).parent()
    assert guardian is not None
    assert "marker-of-the-command" not in guardian.cmdline()
    assert await process.stop(60)


def test_ports() -> None:
    free = free_ports(20)
    assert len(set(free)) == 20
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"127.0.0.1:{port} .*choose another port with --port"):
            check_free("127.0.0.1", port, "--port")
    check_free("127.0.0.1", free[0], "--port")


@pytest.mark.skipif(sys.platform != "linux", reason="claims are Linux'")
def test_ports_of_a_living_process_are_given_to_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from twostep.local.ports import free_ports; print(*free_ports(9), flush=True); input()"
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = [int(word) for word in other.stdout.readline().split()]

        def ask() -> list[int]:
            """Asks for ports from where the other process began."""
            monkeypatch.setattr(ports, "_turns", itertools.count((theirs[0] - ports._LOW) // ports.STRIDE))
            return free_ports(9)

        assert len(theirs) == 9
        assert not set(ask()) & set(theirs)
        other.communicate("\n")
    assert set(ask()) & set(theirs), "they can be had again"


def test_report_and_followed_logs(tmp_path: Path) -> None:
    lines: list[str] = []
    report = Observer(lines.append)
    report.starting("ray")
    report.ready("ray", 4.25)
    report.died("ray", "exited with status 3", 0.5)
    report.starting("ray")
    assert lines == ["ray: starting", "ray: ready, took 4.2 s", "ray: exited with status 3; next start in 0.5 s", "ray: starting again"]

    lines.clear()
    follower = LogFollower(tmp_path, lines.append)
    (tmp_path / "router.log").write_text("one\ntwo\nhal")
    follower.poll()
    with (tmp_path / "router.log").open("a") as log:
        log.write("f\n")
    for _ in range(2):
        follower.poll()
    assert lines == ["    router | one", "    router | two", "    router | half"]


def test_no_log_commands_the_terminal(tmp_path: Path) -> None:
    lines: list[str] = []
    follower = LogFollower(tmp_path, lines.append)
    (tmp_path / "router.log").write_bytes(b"\x1b[31mred\x1b[0m\x1b[2J \x1b]0;title\x07 \xc2\x9b1m\r\x00\n" + b"x" * (1 << 18))
    for _ in range(8):
        follower.poll()
    assert lines[0].endswith("| red\u241b[2J \u241b]0;title\u2407 \ufffd1m\u2400")
    assert all(char == "\t" or char.isprintable() for line in lines for char in line)
    assert sum(line.count("x") for line in lines) >= 3 << 16, "a line without end is not kept"
    assert all(char == "\t" or char.isprintable() for line in tail(tmp_path / "router.log", 1) for char in line)
