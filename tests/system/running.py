"""A whole system as a user starts it, `twostep up` in its own process, and what tests ask of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import redis
from local_ray import store_usage

from kv_transfer.ray.head import ray_env
from twostep import Client
from twostep.cluster.records import WORKERS_KEY, WorkerRecord, worker_key
from twostep.errors import TwostepError
from twostep.keys.secret import load_secret
from twostep.local.ports import free_ports
from twostep.rpc.call_signing import CallSigner, challenge_in
from twostep.rpc.channel import Signature
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc

START_TIMEOUT_S = 300.0
_ASK_S = 30.0


def wait_until(condition: Callable[[], Any], *, timeout_s: float, what: str) -> Any:
    """The first true value of `condition`, asked ten times a second."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.1)


@dataclass(frozen=True)
class Worker:
    """A worker process found under the supervisor."""

    module: str
    pid: int
    address: str
    secret_file: Path

    def signature(self, channel: grpc.Channel) -> Signature:
        """For calls to the life of it that is there now."""
        with pytest.raises(grpc.RpcError) as refused:
            worker_pb2_grpc.WorkerStub(channel).Stats(worker_pb2.WorkerStatsRequest(), timeout=_ASK_S)
        life = challenge_in(refused.value.trailing_metadata())
        if life is None:
            raise refused.value
        return CallSigner(load_secret(self.secret_file), "test").sign(*life)

    def kill_engine(self) -> None:
        """Kills the engine's process, if it has one."""
        for child in psutil.Process(self.pid).children():
            if "kv_transfer.engine_process" in child.cmdline():
                child.kill()

    def stats(self, *, check_integrity: bool = False) -> worker_pb2.WorkerStats:
        with grpc.insecure_channel(self.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            request = worker_pb2.WorkerStatsRequest(check_integrity=check_integrity)
            return stub.Stats(request, timeout=_ASK_S, metadata=self.signature(channel))

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class System:
    """One running `twostep up`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, http_port: int, log: Path, api_key: str | None = None) -> None:
        self.process = process
        self._api_key = api_key
        self.target = f"127.0.0.1:{port}"
        self.http_url = f"http://127.0.0.1:{http_port}"
        self.log = log

    def client(self, **options: Any) -> Client:
        return Client(self.target, **{"api_key": self._api_key, **options})

    def _children(self, module: str) -> Iterator[tuple[psutil.Process, list[str]]]:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                words = child.cmdline()
            except psutil.Error:
                continue
            if module in words:
                yield child, words

    def told(self, module: str, flag: str) -> str:
        """The value of a flag on the command line of one process."""
        _, words = next(self._children(module))
        return words[words.index(flag) + 1]

    def pids(self, module: str) -> list[int]:
        return [child.pid for child, _ in self._children(module)]

    def pids_of_program(self, name: str) -> list[int]:
        """Live descendants whose executable's file name starts with `name`, or the one they were started by: Debian's redis-server is a
        link to redis-check-rdb."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                # A process that says what it does has all of it in one word.
                started_by = " ".join(child.cmdline()).partition(" ")[0]
                if any(Path(path).name.startswith(name) for path in (child.exe(), started_by)):
                    found.append(child.pid)
            except psutil.Error:
                continue
        return found

    def workers(self, module: str) -> list[Worker]:
        """Live workers of one role ("prefill_worker" or "decode_worker"), by their --grpc-port."""
        return [
            Worker(module, child.pid, f"127.0.0.1:{words[words.index('--grpc-port') + 1]}", Path(words[words.index("--secret-file") + 1]))
            for child, words in self._children(module)
        ]

    def all_workers(self) -> list[Worker]:
        return self.workers("prefill_worker") + self.workers("decode_worker")

    def serves(self, num_prefill: int, num_decode: int) -> bool:
        """A router answers and knows so many workers."""
        try:
            with self.client(max_retries=0) as client:
                models = client.models(timeout=_ASK_S)
        except TwostepError:
            return False
        return bool(models) and (models[0].prefill_workers, models[0].decode_workers) == (num_prefill, num_decode)

    def is_whole(self, num_prefill: int, num_decode: int) -> bool:
        """It serves, and every worker can hand KV over if there is anybody to take it."""
        if not self.serves(num_prefill, num_decode):
            return False
        try:
            transports = [worker.stats().transports for worker in self.all_workers()]
        except grpc.RpcError:  # starting again
            return False
        ready = [not num_prefill or any(transport.ready for transport in each) for each in transports]
        return len(ready) == num_prefill + num_decode and all(ready)

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Whatever ends meanwhile is started again only afterwards: `twostep up` stands still."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def wait_until_told(self, *, timeout_s: float = 120.0) -> None:
        """Until every worker has told twice that it is idle, what it holds being told as well, and the router has looked since: on a busy
        machine both come late."""
        with redis.Redis.from_url(self.told("router", "--redis-url")) as store:
            names = [name.decode() for name in store.smembers(WORKERS_KEY)]
            left, told = {name: store.pttl(worker_key(name)) for name in names}, dict.fromkeys(names, 0)

            def twice() -> bool:
                for name in names:
                    # Each heartbeat lets the record live on.
                    before, left[name] = left[name], store.pttl(worker_key(name))
                    raw = store.get(worker_key(name))
                    if raw is not None and left[name] > before:
                        load = WorkerRecord.from_json(raw).load
                        told[name] = 0 if load.num_running or load.num_waiting or load.num_queued_tokens else told[name] + 1
                return bool(told) and min(told.values()) >= 2

            wait_until(twice, timeout_s=timeout_s, what="all workers say that they are idle")
            # A look has one SRANDMEMBER, and nobody else asks so: the first may have begun before, and the second begins after its end.
            looks = _num_looks(store)
            wait_until(lambda: _num_looks(store) >= looks + 2, timeout_s=timeout_s, what="the router looks at the workers' records")

    def check_empty(self, *, timeout_s: float = 60.0) -> None:
        """Every worker comes to hold nothing: no sequence, no lease, no object; and its pool adds up."""

        def leftover() -> str:
            for worker in self.all_workers():
                try:
                    stats = worker.stats(check_integrity=True)
                except grpc.RpcError as error:  # starting again
                    return f"{worker}: {error}"
                assert not stats.integrity_error, stats.integrity_error
                held = [stats.num_running, stats.num_waiting, stats.num_reserved, stats.num_held, stats.num_leases, stats.num_sequences]
                objects = [(t.num_leases, t.num_objects, t.stored_bytes) for t in stats.transports]
                if any(held) or any(any(o) for o in objects) or stats.num_free_blocks + stats.num_cached_blocks != stats.num_blocks:
                    return f"{worker}: {stats}"
            return ""

        deadline = time.monotonic() + timeout_s
        while (left := leftover()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, left

    def check_store_empty(self, *, timeout_s: float = 60.0) -> None:
        """Ray itself counts no object any more."""
        address = self.told("decode_worker", "--ray-address")
        token = Path(self.told("decode_worker", "--run-dir")).parent / "ray" / "token"
        env = {**os.environ, **ray_env(token)}
        usage = store_usage(address, env, empty_within_s=timeout_s)
        assert usage.num_objects == 0, usage

    def log_text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace"))

    def log_tail(self, num_chars: int = 4000) -> str:
        return self.log_text()[-num_chars:]


def _num_looks(store: redis.Redis) -> int:
    return int(store.info("commandstats").get("cmdstat_srandmember", {}).get("calls", 0))


@contextmanager
def running(
    model: Path,
    tmp: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    local_prefill: bool = False,
    extra: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    api_key: str | None = None,
) -> Iterator[System]:
    """Starts `twostep up` and waits until it serves; stops it like Ctrl-C does, and checks that it leaves no process behind. Without
    `prefill` workers it is aggregated; with them, decode workers compute prompts only with `local_prefill`. `env`: beside this process's
    own. `api_key`: what its clients show, where `extra` makes it ask for one."""
    port, http_port = free_ports(2)
    tmp.mkdir(parents=True, exist_ok=True)
    log = tmp / "up.log"
    words = [sys.executable, "-P", "-m", "twostep.cli", "up", "--model", str(model), "--decode", str(decode)]
    words += ["--prefill", str(prefill)] if prefill else ["--aggregated"]
    words += ["--no-local-prefill"] if prefill and not local_prefill else []
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*words, "--port", str(http_port), "--grpc-port", str(port), "--verbose", *extra],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=tmp,
            env={**os.environ, **(env or {})},
        )
    system = System(process, port, http_port, log, api_key)
    family: list[psutil.Process] = []
    try:

        def up() -> bool:
            assert process.poll() is None, f"twostep up ended with {process.returncode}:\n{system.log_tail()}"
            return system.is_whole(prefill, decode)

        wait_until(up, timeout_s=START_TIMEOUT_S, what=f"the system is up\n{system.log_tail()}")
        yield system
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=180) == 0, system.log_tail()
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive, f"left behind: {alive}"
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for orphan in family:
            if orphan.is_running():
                orphan.kill()
