"""Several workers as processes of one container: who gets what, and real workers under one process that looks after them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis.asyncio import Redis

from twostep.errors import SetupError
from twostep.local import redis_server
from twostep.local.pod import Pod, PodSettings, check_workers, parse_pod, pod_workers
from twostep.local.ports import STRIDE, free_ports
from twostep.local.probes import Probes
from twostep.rpc.health import READINESS

DEADLINE_S = 240.0


def test_each_worker_has_gpus_and_ports_of_its_own() -> None:
    config = PodSettings(prefill=1, decode=2, gpus_per_worker=2, pod_name="p", grpc_port=50101, decode_flags=("--prefix-cache-space=9",))
    workers = pod_workers(config)
    assert [(w.name, w.role, w.port) for w in workers] == [
        ("p-prefill-0", "prefill", 50101),
        ("p-decode-0", "decode", 50111),
        ("p-decode-1", "decode", 50121),
    ]
    assert [w.flags[:2] for w in workers] == [("--tensor-parallel-size=2", f"--device=cuda:{n}") for n in (0, 2, 4)]
    assert ["--prefix-cache-space=9" in w.argv for w in workers] == [False, True, True]
    assert "--health-port=50112" in workers[1].argv
    assert "--metrics-port=50113" in workers[1].argv


def test_workers_without_gpus_run_where_their_own_flag_says() -> None:
    (decode,) = pod_workers(PodSettings(prefill=0, gpus_per_worker=0))
    assert decode.flags == ()


def test_flags_of_one_role_come_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_PREFILL_FLAGS", '{"max-num-seqs": 64, "calibrate": false, "local-prefill": true}')
    assert parse_pod([]).prefill_flags == ("--max-num-seqs=64", "--no-calibrate", "--local-prefill")


@pytest.mark.parametrize("wrong", ["[1]", "max-num-seqs=64"])
def test_flags_that_are_no_object_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_pod(["--decode-flags", wrong])
    assert "is no JSON object" in capsys.readouterr().err


def test_what_a_worker_would_refuse_its_pod_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    config = PodSettings(prefill=0, decode=2, gpus_per_worker=0, decode_flags=("--max-num-seqs=0", "--drain-timeout=99"))
    with pytest.raises(SystemExit):
        check_workers(config, {"TWOSTEP_RUNNER": "fake"})
    assert "--max-num-seqs" in capsys.readouterr().err
    with pytest.raises(SetupError, match="--drain-timeout"):
        check_workers(replace(config, decode_flags=("--drain-timeout=99",)), {"TWOSTEP_RUNNER": "fake"})
    check_workers(replace(config, decode_flags=()), {"TWOSTEP_RUNNER": "fake"})


def test_a_pod_s_own_port_is_none_of_its_workers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_pod(["--health-port", "50111"])
    assert "--health-port 50111 is among the workers' ports from --grpc-port 50101" in capsys.readouterr().err


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    directory = tmp_path / "redis"
    directory.mkdir()
    with subprocess.Popen(redis_server.server_argv(redis_server.server_binary(), directory), stdout=subprocess.DEVNULL) as server:
        yield redis_server.server_url(directory)
        server.terminate()


@contextlib.asynccontextmanager
async def running_pod(tmp_path: Path, **flags: object) -> AsyncIterator[subprocess.Popen[bytes]]:
    (tmp_path / "secret").write_text("0123456789abcdef")
    env = {name: value for name, value in os.environ.items() if not name.startswith("TWOSTEP_")}
    env |= {f"TWOSTEP_{name.upper()}": str(value) for name, value in flags.items()}
    env |= {"TWOSTEP_SECRET_FILE": str(tmp_path / "secret"), "TWOSTEP_RUNNER": "fake", "TWOSTEP_KV_TRANSFER": "none"}
    process = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-P", "-m", "twostep.local.pod"], env=env)
    try:
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def until(what: str, met: Callable[[], object], pod: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not await _call(met):
        assert pod.poll() is None, f"the pod has ended with {pod.returncode} before this: {what}"
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        await asyncio.sleep(0.1)


async def _call(met: Callable[[], object]) -> object:
    result = met()
    return await result if asyncio.iscoroutine(result) else result


def first_port_for(num_workers: int) -> int:
    """One from which on the ports of that many workers are free, and this process's."""
    num_slots = -(-10 * num_workers // STRIDE)
    for _ in range(64):
        free = free_ports(num_slots)
        if free[-1] - free[0] == STRIDE * (num_slots - 1):
            return free[0]
    raise AssertionError("no free ports beside each other")


async def registered(redis: Redis) -> Mapping[str, Mapping[str, Any]]:
    """Records of the workers by their names."""
    found = {}
    async for key in redis.scan_iter(match="*worker*"):
        # A record may expire while it is asked for.
        if await redis.type(key) == b"string" and (text := await redis.get(key)) is not None:
            record = json.loads(text)
            found[record["worker_id"]] = record
    return found


async def test_it_is_not_ready_from_a_death_on(tmp_path: Path) -> None:
    pod = Pod(PodSettings(prefill=1, decode=1, gpus_per_worker=0, pod_name="p"), {}, tmp_path)
    pod.board.set(READINESS, True)
    pod.ready("p-prefill-0", 1.0)
    pod.died("p-prefill-0", "exited with status 1", 0.5)
    assert not pod.board.serving(READINESS), "though it may be back before the next look"
    await pod.stop()


async def test_one_that_dies_while_another_comes_up_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = Pod(PodSettings(prefill=1, decode=1, gpus_per_worker=0, pod_name="p"), {}, tmp_path)

    async def start() -> None:
        pod.ready("p-prefill-0", 1.0)
        pod.died("p-prefill-0", "exited with status 1", 0.5)
        pod.ready("p-decode-0", 2.0)

    monkeypatch.setattr(pod.supervisor, "start", start)
    await pod.start()
    assert not pod.board.serving(READINESS), "the look after its return says so"
    await pod.stop()


@pytest.mark.system
@pytest.mark.parametrize(
    ("engine_process", "struck"), [pytest.param("off", "worker", marks=pytest.mark.exhaustive), ("on", "edge"), ("on", "engine")]
)
async def test_one_that_dies_comes_back_while_the_other_goes_on(tmp_path: Path, redis_url: str, engine_process: str, struck: str) -> None:
    """Either process of a worker that has two is struck: both begin again."""
    first, (health,) = first_port_for(2), free_ports(1)
    flags = {"prefill": 0, "decode": 2, "gpus_per_worker": 0, "pod_name": "pod-a", "host": "127.0.0.1", "engine_process": engine_process}
    pod_health, probes = f"127.0.0.1:{health}", Probes()
    async with (
        contextlib.AsyncExitStack() as stack,
        Redis.from_url(redis_url) as redis,
        running_pod(tmp_path, **flags, grpc_port=first, health_port=health, redis_url=redis_url) as pod,
    ):
        stack.push_async_callback(probes.close)
        await until("the pod is ready", lambda: probes.healthy(pod_health, "readiness"), pod)
        before: dict[str, Mapping[str, Any]] = {}

        async def both() -> bool:
            before.update(await registered(redis))
            return set(before) == {"pod-a-decode-0", "pod-a-decode-1"}

        await until("both are registered", both, pod)

        children = psutil.Process(pod.pid).children(recursive=True)
        edge = next(child for child in children if "--worker-id=pod-a-decode-0" in child.cmdline())
        engine_pid = before["pod-a-decode-0"]["engine_pid"]
        assert (engine_pid in {child.pid for child in edge.children()}) == (engine_process == "on")
        both_of_it = [edge, *edge.children()]
        (psutil.Process(engine_pid) if struck == "engine" else edge).kill()
        ended, _ = await asyncio.to_thread(psutil.wait_procs, both_of_it, DEADLINE_S)
        assert len(ended) == len(both_of_it), "what one process of a worker dies of, the other does not outlive"

        async def back() -> bool:
            record = (await registered(redis)).get("pod-a-decode-0")
            return record is not None and record["epoch"] > before["pod-a-decode-0"]["epoch"]

        async def other() -> Mapping[str, Any] | None:
            return (await registered(redis)).get("pod-a-decode-1")

        await until("it is back, in a new life with a new epoch", back, pod)
        await until("the pod is ready again", lambda: probes.healthy(pod_health, "readiness"), pod)
        await until("a pod is not restarted for one of its workers", lambda: probes.healthy(pod_health, "liveness"), pod)
        # Its record may have expired while a busy machine held it up.
        await until("the other worker is registered", other, pod)
        record = await other()
        assert record is not None
        assert record["epoch"] == before["pod-a-decode-1"]["epoch"], "the other worker's life went on"

        pod.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(pod.wait, DEADLINE_S) == 0
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.system
async def test_a_worker_that_cannot_start_ends_the_pod(tmp_path: Path, redis_url: str) -> None:
    first, (health,) = first_port_for(1), free_ports(1)
    flags = {"prefill": 0, "decode": 1, "gpus_per_worker": 0, "host": "127.0.0.1", "decode_flags": '{"block-size": 7}'}
    async with running_pod(tmp_path, **flags, grpc_port=first, health_port=health, redis_url=redis_url) as pod:
        assert await asyncio.to_thread(pod.wait, DEADLINE_S) == 2
