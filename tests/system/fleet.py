"""Routers and workers as processes of their own, as Kubernetes or an operator keeps them: each started, drained and replaced by itself.

Redis (append-only file)   Ray (one node)   router-0, router-1, ...   prefill-0, ...   decode-0, ...
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from local_ray import LocalRay

from twostep import AsyncClient
from twostep.errors import TwostepError
from twostep.keys.secret import DeploymentSecret, load_secret
from twostep.local import redis_server
from twostep.local.ports import free_ports
from twostep.local.probes import Probes
from twostep.local.supervisor import Process, tail
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc

START_S = 400.0
STOP_S = 60.0
BLOCK_SIZE = 16
_POLL_S = 0.05


@dataclass(eq=False)
class Member:
    """A router or a worker that runs. Its name and port outlive its process in a restart in place."""

    name: str
    address: str
    drain_s: float
    process: Process
    rings: frozenset[Path] = frozenset()
    """Files of shared memory that its processes had when they were last looked at."""

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]


class Fleet:
    """`async with Fleet(...)` has Redis and Ray; start() adds what its names say, as in "decode-0". Nothing outlives the block. `flags` are
    for all workers, `router_flags` for all routers. `api_key`: what opens the routers, where they ask for keys."""

    def __init__(
        self,
        model_dir: Path,
        *,
        flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
        routers: Sequence[str] = ("router-0", "router-1"),
    ) -> None:
        # In a short place, because of unix sockets.
        self.directory = Path(tempfile.mkdtemp(prefix="ts-", dir="/tmp"))
        self.members: dict[str, Member] = {}
        # A checkout that what starts next is taken from; None: this one.
        self.tree: Path | None = None
        self._ray = LocalRay()
        self._model_dir = model_dir
        self._flags, self._router_flags = tuple(flags), tuple(router_flags)
        self.api_key: str | None = None
        # Clients know all routers there will ever be, whether or not they run.
        self._ports = dict(zip(routers, free_ports(len(routers)), strict=True))
        # What starts next gets these.
        self._secret = self._new_secret()
        self._former: Path | None = None
        self._redis_dir = self.directory / "redis"
        self._redis_dir.mkdir()
        self.redis_url = redis_server.server_url(self._redis_dir)
        self._redis: Process | None = None
        self._probes = Probes()

    @property
    def targets(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self._ports.values()]

    async def __aenter__(self) -> Fleet:
        try:
            await asyncio.gather(asyncio.to_thread(self._ray.start), self.start_redis())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        processes = [member.process for member in self.members.values()] + ([self._redis] if self._redis else [])
        await asyncio.gather(*(process.stop(STOP_S) for process in processes if process.running))
        await self._probes.close()
        await asyncio.to_thread(self._ray.stop)
        shutil.rmtree(self.directory, ignore_errors=True)

    # ---- its members ----------------------------------------------------------------------------------------------------

    async def start(self, drains_s: Mapping[str, float]) -> None:
        """Names, and how long each will drain at most. Returns when all of them are ready and all routers list all workers."""
        await asyncio.gather(*(self._launch(name, self._port(name), drain_s) for name, drain_s in drains_s.items()))
        await self.until_whole()

    async def drain(self, name: str) -> float:
        """SIGTERM, as every supervisor does it, and seconds until it was gone, with status 0 and no ring left behind."""
        member = self.members.pop(name)
        member.rings |= self._rings(member)
        begun = time.monotonic()
        assert await member.process.stop(member.drain_s + STOP_S), f"{name} had to be killed:\n{self.log_tail(name)}"
        took = time.monotonic() - begun
        assert await member.process.wait() == 0, self.log_tail(name)
        left = [path for path in member.rings if path.exists()]
        assert not left, f"{name} left {left}"
        return took

    async def restart(self, *names: str) -> None:
        """In place and together: the same names and ports, other lives."""
        members = [self.members[name] for name in names]
        await asyncio.gather(*map(self.drain, names))
        await asyncio.gather(*(self._launch(each.name, int(each.address.rpartition(":")[2]), each.drain_s) for each in members))
        await self.until_whole()

    async def until_whole(self) -> None:
        """Every member is ready, and every router lists every worker and no other."""
        await self._until(self._missing)

    async def stats(self, name: str) -> worker_pb2.WorkerStats:
        """Returns the stats of a worker."""
        async with channel_to_worker(self.members[name].address, self.secret, caller="test") as channel:
            stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
            return await stub.Stats(worker_pb2.WorkerStatsRequest(check_integrity=True), timeout=30)

    async def until_busy(self, name: str, num_sequences: int) -> None:
        """A worker has so many sequences."""

        async def missing() -> str:
            held = (await self.stats(name)).num_sequences
            return f"{name} has {held} sequences of {num_sequences}" if held < num_sequences else ""

        await self._until(missing)

    async def until_empty(self) -> None:
        """No worker holds a block, a sequence, a lease or an object, and Ray's store holds nothing."""

        async def held() -> str:
            workers = [m for m in self.members.values() if m.role != "router"]
            states = {m.name: await self._probes.worker(m.address, self.secret) for m in workers}
            found = {name: "no answer" if state is None else state.held for name, state in states.items()}
            return "; ".join(f"{name} holds {what}" for name, what in found.items() if what)

        await self._until(held)
        usage = await asyncio.to_thread(self._ray.store_usage, empty_within_s=STOP_S)
        assert usage.num_objects == 0, usage

    def log_tail(self, name: str) -> str:
        return "\n".join(tail(self._log(name), 40))

    # ---- the deployment's secret -------------------------------------------------------------------------------------------

    @property
    def secret(self) -> DeploymentSecret:
        return load_secret(self._secret, former=self._former)

    def change_secret(self) -> None:
        """Gives a new secret to processes started from now on; they accept the former one too."""
        self._secret, self._former = self._new_secret(), self._secret

    def forget_former_secret(self) -> None:
        """Gives the new secret alone to processes started from now on."""
        self._former = None

    def _new_secret(self) -> Path:
        path = self.directory / f"secret-{secrets.token_hex(4)}"
        path.write_text(secrets.token_hex(32))
        return path

    # ---- Redis ----------------------------------------------------------------------------------------------------------

    async def start_redis(self) -> None:
        self._redis = await self._process("redis", redis_server.server_argv(redis_server.server_binary(), self._redis_dir))
        await self._until(lambda: redis_server.answers(self.redis_url))

    async def stop_redis(self) -> None:
        assert self._redis is not None
        assert await self._redis.stop(STOP_S), self.log_tail("redis")

    # ---- how it is done -------------------------------------------------------------------------------------------------

    async def _launch(self, name: str, port: int, drain_s: float) -> None:
        role = name.partition("-")[0]
        words = ["--model", str(self._model_dir), "--served-model-name", "m", "--redis-url", self.redis_url]
        words += ["--secret-file", str(self._secret), "--host", "127.0.0.1", "--grpc-port", str(port), "--drain-timeout", f"{drain_s:g}"]
        words += ["--former-secret-file", str(self._former)] if self._former is not None else []
        # Only the port that others know is used twice: another process may have got its neighbours meanwhile.
        words += ["--health-port", "-1", "--metrics-port", "0"]
        if role == "router":
            module, words = "router", [*words, "--port", "-1", "--router-id", name, *self._router_flags]
        else:
            module = f"{role}_worker"
            words += ["--worker-id", name, "--ray-address", self._ray.address, "--kv-transfer", "ray", "--no-local-prefill"]
            words += ["--run-dir", str(self.directory / name), "--cpu-threads", "1", "--no-calibrate", *self._flags]
        process = await self._process(name, (sys.executable, "-P", "-m", module, *words))
        self.members[name] = Member(name, f"127.0.0.1:{port}", drain_s, process)

    async def _process(self, name: str, argv: tuple[str, ...]) -> Process:
        env = {**os.environ, **self._ray.environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if self.tree is not None:
            env |= {"PYTHONPATH": f"{self.tree}:{Path(__file__).parent}", "RAY_RUNTIME_ENV_HOOK": "tree_in_ray.as_here"}
        return await Process.start(argv, env=env, log=self._log(name), pid_file=self.directory / f"{name}.pid", cwd=self.directory)

    def _port(self, name: str) -> int:
        return self._ports[name] if name in self._ports else free_ports(1)[0]

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    async def _missing(self) -> str:
        for member in self.members.values():
            if not member.process.running:
                status = await member.process.wait()
                raise AssertionError(f"{member.name} has ended with status {status}:\n{self.log_tail(member.name)}")
            if not await self._probes.healthy(member.address, "readiness"):
                return f"{member.name} is not ready:\n{self.log_tail(member.name)}"
            member.rings |= self._rings(member)
        wanted = tuple(sum(member.role == role for member in self.members.values()) for role in ("prefill", "decode"))
        for member in self.members.values():
            if member.role == "router" and (listed := await self._listed(member)) != wanted:
                return f"{member.name} lists {listed} workers of {wanted}"
        return ""

    async def _listed(self, router: Member) -> tuple[int, int]:
        try:
            async with AsyncClient(router.address, max_retries=0, api_key=self.api_key) as client:
                (model,) = await client.models(timeout=10)
        except TwostepError:
            return 0, 0
        return model.prefill_workers, model.decode_workers

    def _rings(self, member: Member) -> frozenset[Path]:
        try:
            maps = Path(f"/proc/{member.process.pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return frozenset()
        return frozenset(Path(line.split()[-1]) for line in maps.splitlines() if line.endswith(".ring"))

    async def _until(self, missing: Callable[[], Awaitable[str]], timeout_s: float = START_S) -> None:
        give_up = time.monotonic() + timeout_s
        while why := await missing():
            assert time.monotonic() < give_up, f"after {timeout_s:g} s: {why}"
            await asyncio.sleep(_POLL_S)
