"""A whole deployment on hosts of its own: Redis, a Ray of four nodes, two routers, two prefill and two decode workers.

    redis   head (GCS, a raylet that nobody uses)   router-0   router-1
    prefill (raylet, prefill-0)   decode (raylet, decode-0)   spare (raylet, prefill-1, decode-1)

Processes that end are started again after half a second, as in a real deployment.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import redis.asyncio
from components import Component
from gates import Gates
from namespaces import Host, Network, Plane

from kv_transfer.ray.head import RayHead, ray_env
from twostep import AsyncClient
from twostep.cluster.records import worker_key
from twostep.errors import TwostepError
from twostep.keys.secret import load_secret
from twostep.local.redis_server import server_binary
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc

START_S = 120.0
_ASK_S = 30.0
_NUM_RAYLETS = 4
BLOCK_SIZE = 16
_STORE_BYTES = 160 << 20
# Where an object's owner has died, the raylet of a process that asked for it may keep the error's number in its place.
_MARKER_BYTES = 2
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """All that an idle system still holds, over all its workers and raylets; all zero if it is as it should be."""

    blocks: int = 0
    leases: int = 0
    objects: int = 0
    bytes: int = 0
    files: int = 0
    """Our files in the hosts' /dev/shm."""
    strays: int = 0
    """KV agents' processes beyond one helper and one actor for each worker."""
    markers: int = 0
    """Ray's own, of objects that died with their owner: a byte or two each, no KV."""
    integrity: str = ""
    unknown: str = ""
    """Processes that could not be asked, and why."""

    @property
    def nothing(self) -> bool:
        return replace(self, markers=0) == Held()


class FaultSystem:
    """start(), then faults; stop() in any case. `model_dir` has a tokenizer and a configuration; no weights are read. `step_ms`: of a
    worker's step at least."""

    def __init__(self, model_dir: Path, *, parent: Path = Path("/tmp"), step_ms: float = 15.0) -> None:
        # In a short place, because of unix sockets.
        self.directory = Path(tempfile.mkdtemp(prefix="f-", dir=parent))
        self.network = Network()
        self.gates = Gates(self.directory / "gates")
        self.hosts = {name: self.network.host(name) for name in ("redis", "head", "router-0", "router-1", "prefill", "decode", "spare")}
        self.components: dict[str, Component] = {}
        self._model_dir = model_dir
        self._step_ms = step_ms
        self._secret = self.directory / "secret"
        self._secret.write_text(secrets.token_hex(32))
        self.ray = RayHead(
            temp_dir=self.directory / "r", port=6379, client_port=10001, object_store_bytes=_STORE_BYTES,
            node_ip=self.hosts["head"].address(Plane.RAY),
        )  # fmt: skip
        self.ray.prepare()
        token = self.directory / "token"
        shutil.copy(self.ray.token_path, token)
        self.environment = {**os.environ, **ray_env(token), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._part_raylets()
        self.redis_url = f"redis://{self.hosts['redis'].address(Plane.SERVICE)}:6379/0"
        self.workers = {"prefill-0": "prefill", "prefill-1": "spare", "decode-0": "decode", "decode-1": "spare"}
        self._redis: redis.asyncio.Redis | None = None
        self._declare()

    def target(self, router: int) -> str:
        """Returns the address at which clients find a router."""
        return f"{self.hosts[f'router-{router}'].address(Plane.SERVICE)}:50051"

    def worker_address(self, worker_id: str) -> str:
        port = 50061 if worker_id.startswith("prefill") else 50071
        return f"{self.hosts[self.workers[worker_id]].address(Plane.SERVICE)}:{port}"

    # ---- its life -------------------------------------------------------------------------------------------------------

    async def start(self, within_s: float = START_S) -> None:
        self._redis = redis.asyncio.Redis.from_url(self.redis_url, socket_timeout=1, socket_connect_timeout=1)
        await self.components["redis"].start()
        await self.start_ray()
        await asyncio.gather(*(c.start() for c in self.components.values() if c.num_lives == 0))
        await self.until_whole(within_s)

    async def start_ray(self) -> None:
        """Starts only Ray: returns when its head is up and the other raylets are on their way."""
        await self.components["head"].start()
        await self._wait(lambda: asyncio.to_thread(self.ray.ready), "Ray's head is up")
        await asyncio.gather(*(c.start() for name, c in self.components.items() if name.startswith("raylet")))

    async def stop(self) -> None:
        for kind in ("router", "prefill-", "decode-", "raylet", "head", "redis"):
            await asyncio.gather(*(c.stop() for name, c in self.components.items() if name.startswith(kind)))
        if self._redis is not None:
            await self._redis.aclose()
        self.network.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    async def until_whole(self, timeout_s: float, *, ask_ray: bool = False) -> None:
        """Until both routers list all workers, all workers' transports are ready and, if it is asked, Ray has all its nodes. Raises
        TimeoutError with who is missing."""
        give_up = time.monotonic() + timeout_s
        while missing := await self._missing() or (await self._missing_nodes() if ask_ray else ""):
            if time.monotonic() > give_up:
                raise TimeoutError(f"after {timeout_s:g} s {missing}")
            await asyncio.sleep(0.2)

    async def _missing_nodes(self) -> str:
        """Agents may go on for a minute with raylets that their own head does not know any more."""
        stores = await self._ask_stores()
        return (
            stores if isinstance(stores, str) else "" if len(stores) == _NUM_RAYLETS else f"Ray has {len(stores)} nodes of {_NUM_RAYLETS}"
        )

    async def _missing(self) -> str:
        for router in (0, 1):
            if await self.listed(router) != (2, 2):
                return f"router {router} lists {await self.listed(router)} workers of (2, 2)"
        for worker_id in self.workers:
            try:
                stats = await self.stats(worker_id)
            except (grpc.RpcError, TwostepError) as error:
                return f"{worker_id} does not answer: {error}"
            if not any(transport.ready for transport in stats.transports):
                return f"{worker_id} has no transport that is ready"
        return ""

    async def listed(self, router: int) -> tuple[int, int]:
        """Prefill and decode workers that a router knows."""
        try:
            async with AsyncClient(self.target(router), max_retries=0) as client:
                models = await client.models(timeout=2)
        except TwostepError:
            return 0, 0
        return (models[0].prefill_workers, models[0].decode_workers) if models else (0, 0)

    async def hide_spare(self) -> None:
        """Until `mend` only prefill-0 and decode-0 are known."""
        self.hosts["spare"].cut(Plane.SERVICE)
        assert self._redis is not None
        await self._redis.delete(worker_key("prefill-1"), worker_key("decode-1"))

        async def hidden() -> bool:
            return await self.listed(0) == (1, 1)

        await self._wait(hidden, "the spare workers are forgotten", timeout_s=60)

    async def show_spare(self) -> None:
        self.hosts["spare"].mend()

        async def shown() -> bool:
            return await self.listed(0) == (2, 2)

        await self._wait(shown, "the spare workers are known again", timeout_s=60)

    # ---- what it holds --------------------------------------------------------------------------------------------------

    async def stats(self, worker_id: str) -> worker_pb2.WorkerStats:
        async with channel_to_worker(self.worker_address(worker_id), load_secret(self._secret), caller="test") as channel:
            stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
            return await stub.Stats(worker_pb2.WorkerStatsRequest(check_integrity=True), timeout=3)

    async def held(self) -> Held:
        """Returns what is held by the workers' own count."""
        blocks = leases = objects = num_bytes = 0
        integrity, unknown = [], []
        for worker_id in self.workers:
            try:
                stats = await self.stats(worker_id)
            except (grpc.RpcError, TwostepError) as error:
                unknown.append(f"{worker_id}: {error}")
                continue
            blocks += stats.num_blocks - stats.num_free_blocks - stats.num_cached_blocks
            leases += stats.num_leases + stats.num_sequences + stats.num_running + stats.num_waiting + stats.num_reserved + stats.num_held
            objects += sum(transport.num_objects + transport.num_leases for transport in stats.transports)
            num_bytes += sum(transport.stored_bytes for transport in stats.transports)
            if stats.integrity_error:
                integrity.append(f"{worker_id}: {stats.integrity_error}")
        return Held(
            blocks=blocks,
            leases=leases,
            objects=objects,
            bytes=num_bytes,
            files=sum(path.name.startswith("twostep-") for host in self.hosts.values() for path in host.shared_memory()),
            strays=self._num_strays(),
            integrity="; ".join(integrity),
            unknown="; ".join(unknown),
        )

    def _num_strays(self) -> int:
        agents = [self._is_helper, self._is_actor]
        return sum(max(0, len(self.pids(host, is_it)) - self._num_workers(host)) for host in self.hosts.values() for is_it in agents)

    def _num_workers(self, host: Host) -> int:
        return sum(self.hosts[name] is host for name in self.workers.values())

    async def until_empty(self, timeout_s: float) -> Held:
        """Waits until nothing is held, by the workers' and by Ray's own count, or for `timeout_s`; returns what still is."""
        give_up = time.monotonic() + timeout_s
        while not (held := await self.held()).nothing:
            if time.monotonic() > give_up:
                return held
            await asyncio.sleep(0.2)
        return await self.until_stores_empty(give_up - time.monotonic())

    async def until_stores_empty(self, timeout_s: float) -> Held:
        """Waits until Ray itself counts nothing. After `timeout_s` returns what stays of it when Ray needs the room."""
        give_up = time.monotonic() + timeout_s
        while True:
            held = await self.stored()
            if held.nothing:
                return held
            if time.monotonic() > give_up:
                return await self.stored("fill", str(_STORE_BYTES))
            await asyncio.sleep(0.2)

    async def stored(self, *how: str) -> Held:
        """Returns what all nodes together hold by Ray's own count."""
        stores = await self._ask_stores(*how)
        if isinstance(stores, str):
            return Held(unknown=stores)
        markers = sum(objects for objects, num_bytes in stores if num_bytes <= _MARKER_BYTES * objects)
        kept = [store for store in stores if store[1] > _MARKER_BYTES * store[0]]
        return Held(objects=sum(objects for objects, _ in kept), bytes=sum(num_bytes for _, num_bytes in kept), markers=markers)

    async def _ask_stores(self, *how: str) -> list[tuple[int, int]] | str:
        """Objects and bytes of every live raylet's store, or why Ray does not tell; takes about 2 s."""
        argv = self.hosts["head"].argv([sys.executable, "-P", str(_HERE / "ask_stores.py"), self.ray.address, *how])
        asking = await asyncio.create_subprocess_exec(
            *argv, env=self.environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(_ASK_S):
                out, error = await asking.communicate()
        except TimeoutError:
            asking.kill()
            await asking.wait()
            return f"Ray did not tell what it stores in {_ASK_S:g} s"
        if asking.returncode:
            return f"Ray did not tell what it stores: {error.decode()[-300:]}"
        stores: list[tuple[int, int]] = json.loads(out.splitlines()[-1])
        return stores

    # ---- who is where ---------------------------------------------------------------------------------------------------

    def pids(self, host: Host, is_it: Callable[[psutil.Process, list[str]], bool]) -> list[int]:
        """Processes on `host` that are what is looked for."""
        return [process.pid for process, words in self._processes(host) if is_it(process, words)]

    def engine(self, worker_id: str) -> list[int]:
        """Returns the engine's process of a worker that is alone on its host."""
        return self.pids(self.hosts[self.workers[worker_id]], lambda _, words: "gated_engine" in words)

    def agent_helper(self, worker_id: str) -> list[int]:
        """Returns the helper processes of a worker that is alone on its host."""
        return self.pids(self.hosts[self.workers[worker_id]], self._is_helper)

    def agent_actor(self, worker_id: str) -> list[int]:
        """Returns the actor processes of a worker that is alone on its host."""
        return self.pids(self.hosts[self.workers[worker_id]], self._is_actor)

    @staticmethod
    def _is_helper(_: psutil.Process, words: list[str]) -> bool:
        return "kv_transfer.ray.agent" in words

    @staticmethod
    def _is_actor(_: psutil.Process, words: list[str]) -> bool:
        return words[0].startswith("ray::KvAgentActor")

    def program(self, host: str, name: str) -> list[int]:
        """`raylet` or `gcs_server`."""
        return self.pids(self.hosts[host], lambda process, _: Path(process.exe()).name == name)

    def _processes(self, host: Host) -> Iterator[tuple[psutil.Process, list[str]]]:
        for process in psutil.process_iter():
            try:
                if os.readlink(f"/proc/{process.pid}/ns/net") == host.namespace and (words := process.cmdline()):
                    yield process, words
            except (psutil.Error, OSError):  # it has ended
                continue

    def log_tails(self) -> str:
        return "\n".join(f"---- {name}\n{component.tail()}" for name, component in self.components.items())

    # ---- its parts ------------------------------------------------------------------------------------------------------

    def _declare(self) -> None:
        self._add("redis", "redis", [str(server_binary()), "--bind", self.hosts["redis"].address(Plane.SERVICE), "--port", "6379",
                                     "--protected-mode", "no", "--save", "", "--dir", str(self.directory)])  # fmt: skip
        self._add("head", "head", self.ray.argv(), prepare=self.ray.prepare)
        for host in ("prefill", "decode", "spare"):
            self._add(f"raylet-{host}", host, self._raylet_argv(self.hosts[host]))
        shared = ["--model", str(self._model_dir), "--served-model-name", "m", "--redis-url", self.redis_url]
        shared += ["--secret-file", str(self._secret), "--drain-timeout", "5"]
        for router in ("router-0", "router-1"):
            host = self.hosts[router]
            flags = ["--host", host.address(Plane.SERVICE), "--grpc-port", "50051", "--router-id", f"{router}-{secrets.token_hex(3)}"]
            self._add(router, router, [sys.executable, "-P", "-m", "router", *shared, *flags])
        for worker_id, name in self.workers.items():
            self._add(worker_id, name, self._worker(worker_id, self.hosts[name], shared))

    def _worker(self, worker_id: str, host: Host, shared: list[str]) -> list[str]:
        role = worker_id.partition("-")[0]
        port = self.worker_address(worker_id).rpartition(":")[2]
        flags = ["--runner", "fake", "--fake-step-ms", f"{self._step_ms:g}", "--num-blocks", "2048", "--block-size", str(BLOCK_SIZE)]
        flags += ["--host", host.address(Plane.SERVICE), "--grpc-port", port, "--worker-id", worker_id, "--ray-address", self.ray.address]
        flags += ["--run-dir", str(self.directory / worker_id), "--kv-transfer", "ray", "--lease-ttl", "8"]
        flags += ["--engine-process", "on", "--fixed-roles"]
        if role == "prefill":
            flags += ["--chunk-bytes", str(128 << 10), "--kv-budget-bytes", str(_STORE_BYTES // 3)]
        else:
            flags.append("--no-local-prefill")  # it is hand-overs that are struck
        return [sys.executable, str(_HERE / "gated_worker.py"), role, str(self.gates.directory), *shared, *flags]

    def _raylet_argv(self, host: Host) -> list[str]:
        flags = [f"--address={self.ray.address}", "--block", f"--node-ip-address={host.address(Plane.RAY)}"]
        flags += [f"--object-store-memory={_STORE_BYTES}", "--num-cpus=0", "--num-gpus=0", "--disable-usage-stats"]
        flags += ["--include-log-monitor=false", "--log-style=record", "--log-color=false", f"--temp-dir={self._ray_dir(host.name)}"]
        return [sys.executable, "-P", "-m", "kv_transfer.ray.head", "start", *flags]

    def _part_raylets(self) -> None:
        """No host sees another one's sockets of Ray."""
        directories = {"head": self.ray.temp_dir} | {name: self._ray_dir(name) for name in ("prefill", "decode", "spare")}
        for name, directory in directories.items():
            directory.mkdir(mode=0o700, exist_ok=True)
            for other in self.hosts.keys() - {name}:
                self.hosts[other].hide(directory)

    def _ray_dir(self, host: str) -> Path:
        return self.directory / f"r-{host}"

    def _add(self, name: str, host: str, argv: list[str], prepare: Callable[[], None] = lambda: None) -> None:
        log = self.directory / f"{name}.log"
        self.components[name] = Component(name, self.hosts[host], argv, env=self.environment, log=log, prepare=prepare)

    async def _wait(self, condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float = START_S) -> None:
        give_up = time.monotonic() + timeout_s
        while not await condition():
            if time.monotonic() > give_up:
                raise TimeoutError(f"not within {timeout_s:g} s: {what}")
            await asyncio.sleep(0.1)
