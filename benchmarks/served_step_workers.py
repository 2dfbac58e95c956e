"""The workers of gpu_served_step.py as production runs them: processes, with Redis and, where KV goes through it, Ray beside them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from served_step_load import SECRET, ServedStepLoad

from twostep.errors import TwostepError
from twostep.local.ports import free_ports
from twostep.local.redis_server import server_argv, server_binary, socket_path
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from local_ray import LocalRay

_ROOT = Path(__file__).resolve().parents[1]
_PLAYER = Path(__file__).with_name("served_step_load.py")
_STORE_BYTES = 8 << 30
_END_S = 20.0


@dataclass(frozen=True, slots=True)
class ServedStepWorkers:
    """Says how the two are started."""

    model: Path
    num_blocks: int
    transport: str
    engine_process: str
    device: str

    def measure(self, load: ServedStepLoad, directory: Path, start_timeout_s: float) -> dict[str, Any]:
        """Returns what the router's part reports. Raises SystemExit with the worker's log if one of them is not ready in time."""
        directory.mkdir(mode=0o700)
        (directory / "secret").write_bytes(SECRET.own)
        vocab_size = int(json.loads((self.model / "config.json").read_text())["vocab_size"])
        with ExitStack() as stack:
            redis = stack.enter_context(_ended(subprocess.Popen(server_argv(server_binary(), directory), stdout=subprocess.DEVNULL)))
            flags, env = self._flags(load, directory), dict(os.environ)
            if self.transport == "ray":
                ray = self._ray(stack)
                flags += ["--ray-address", ray.address]
                env |= ray.environment
            give_up = time.monotonic() + start_timeout_s
            while not socket_path(directory).exists() and redis.poll() is None and time.monotonic() < give_up:
                time.sleep(0.05)
            begun = [self._start(role, directory, flags, env, stack) for role in ("decode", "prefill")]
            decode, prefill = [worker.ready(self.transport, give_up) for worker in begun]
            return play(prefill, decode, load, vocab_size, directory)

    def _ray(self, stack: ExitStack) -> LocalRay:
        sys.path.append(str(_ROOT / "tests"))
        from local_ray import LocalRay  # noqa: PLC0415

        shared = os.statvfs("/dev/shm")
        store_bytes = min(_STORE_BYTES if self.device != "cpu" else 512 << 20, shared.f_bavail * shared.f_frsize // 2)
        return stack.enter_context(LocalRay(object_store_bytes=store_bytes))

    def _flags(self, load: ServedStepLoad, directory: Path) -> list[str]:
        return [
            *("--model", str(self.model), "--load-format", "dummy", "--max-model-len", str(load.prompt + load.most + 8)),
            *("--num-blocks", str(self.num_blocks), "--max-num-seqs", str(load.streams), "--max-waiting", str(2 * load.streams)),
            *("--kv-transfer", self.transport, "--engine-process", self.engine_process, "--drain-timeout", "0", "--metrics-port", "-1"),
            *("--redis-url", f"unix://{socket_path(directory)}", "--secret-file", str(directory / "secret"), "--log-level", "info"),
        ]

    def _start(self, role: str, directory: Path, flags: list[str], env: dict[str, str], stack: ExitStack) -> _WorkerProcess:
        port, health_port = free_ports(2)
        device = self.device if self.device == "cpu" else f"{self.device}:{0 if role == 'decode' else 1}"
        words = [sys.executable, "-P", "-m", f"{role}_worker", *flags, "--device", device, "--run-dir", str(directory / role)]
        words += ["--grpc-port", str(port), "--health-port", str(health_port), "--worker-id", role]
        log = directory / f"{role}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, cwd=_ROOT, env=env)
        stack.enter_context(_ended(process))
        return _WorkerProcess(f"127.0.0.1:{port}", process, log)


@dataclass(frozen=True, slots=True)
class _WorkerProcess:
    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def ready(self, transport: str, give_up: float) -> str:
        """Returns its address once it can hand KV over by this transport."""
        while self.process.poll() is None and time.monotonic() < give_up:
            try:
                stats = asyncio.run(self._stats())
                if any(each.name == transport and each.ready for each in stats.transports):
                    return self.address
            except (TwostepError, grpc.RpcError):
                pass
            time.sleep(0.3)
        raise SystemExit(f"a worker is not ready to hand over by {transport}:\n{self.log.read_text('utf-8', 'replace')[-4000:]}")

    async def _stats(self) -> worker_pb2.WorkerStats:
        async with channel_to_worker(self.address, SECRET, caller="player") as channel:
            stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
            return await stub.Stats(worker_pb2.WorkerStatsRequest(), timeout=5)


def play(prefill: str, decode: str, load: ServedStepLoad, vocab_size: int, directory: Path) -> dict[str, Any]:
    """The router's part, in a process of its own. Raises RuntimeError if it fails."""
    result = directory / "router.json"
    numbers = (load.streams, load.prompt, load.most, vocab_size, load.seconds)
    words = [sys.executable, str(_PLAYER), prefill, decode, str(result), *map(str, numbers)]
    try:
        code = subprocess.run(words, timeout=load.seconds + 60, check=False).returncode
    except subprocess.TimeoutExpired:
        code = 1
    if code:
        raise RuntimeError("the router's part has failed; see above why")
    report: dict[str, Any] = json.loads(result.read_text())
    return report


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
