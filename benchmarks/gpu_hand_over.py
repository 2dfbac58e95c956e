"""What a client waits for after its first token while the KV goes from a prefill to a decode worker: real processes, one request at a time.

    PYTHONPATH=. python benchmarks/gpu_hand_over.py                        # Llama-3.1-8B's shape, prefill on GPU 0, decode on GPU 1, by Ray
    PYTHONPATH=. python benchmarks/gpu_hand_over.py --kv-transfer cuda_ipc # another transport
    PYTHONPATH=. python benchmarks/gpu_hand_over.py --load 64              # while so many sequences decode there
    PYTHONPATH=. python benchmarks/gpu_hand_over.py --tiny                 # a dry run on the CPU

Weights are random. This process plays the router. Median, 99th percentile and worst in ms:

    prefill      the prompt's steps, on the prefill worker
    publish      from the first token to the last chunk published, on the prefill worker
    fetch        from the word that all is published to the last block in place, on the decode worker
    committed    from the first token to the word that decoding begins, at the router
    second       from the first token to the second, at the router: what the client sees
    step         from the second token to the last, for each: the decode worker's own pace meanwhile
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from local_ray import LocalRay

from kv_transfer.ray.head import free_port
from twostep.keys.secret import load_secret
from twostep.lab.bench.shapes import LLAMA_8B
from twostep.local.redis_server import server_argv, server_binary, socket_path
from twostep.rpc import event_loop
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.channel import open_channel
from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from twostep.sampling_params import SamplingParams

BLOCK_SIZE = 16
START_S = 150.0
# Tokens of each sequence that is there as load: more than it has time for.
LOAD_OUTPUT = 8192
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "torch_dtype": "float32",
}


def start(role: str, address: str, directory: Path, ray: LocalRay, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    device = "cpu" if arguments.tiny else f"cuda:{0 if role == 'prefill' else arguments.decode_gpu}"
    flags = {
        "--model": directory / "model",
        "--load-format": "dummy",
        "--runner": "model",
        "--device": device,
        "--worker-id": role,
        "--port": address.rpartition(":")[2],
        "--health-port": free_port(),
        "--metrics-port": free_port(),
        "--secret-file": directory / "secret",
        "--redis-url": f"unix://{socket_path(directory)}",
        "--ray-address": ray.address,
        "--kv-transfer": arguments.kv_transfer,
        "--block-size": BLOCK_SIZE,
        "--num-blocks": 4 * -(-arguments.tokens // BLOCK_SIZE) + arguments.load * -(-(arguments.load_tokens + LOAD_OUTPUT) // BLOCK_SIZE),
        "--max-model-len": max(4096, arguments.tokens + 64, arguments.load_tokens + LOAD_OUTPUT),
        "--max-num-batched-tokens": max(4096, arguments.tokens),
        "--max-num-seqs": 8 + arguments.load,
    }
    if role == "prefill":
        flags["--chunk-bytes"] = arguments.chunk_mib << 20
    words = [sys.executable, "-P", "-m", f"{role}_worker", *(str(word) for pair in flags.items() for word in pair)]
    with (directory / f"{role}.log").open("ab") as log:
        return subprocess.Popen(words, env=ray.head.env(os.environ), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def _end_of(log: Path) -> str:
    return log.read_text("utf-8", "replace")[-3000:]


async def ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    give_up = time.monotonic() + START_S
    async with open_channel(address) as channel:
        while True:
            if process.poll() is not None or time.monotonic() > give_up:
                raise SystemExit(f"a worker did not start:\n{_end_of(log)}")
            try:
                check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=2)
                if check.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(0.1)


class Router:
    def __init__(self, to_prefill: Any, to_decode: Any, vocab_size: int) -> None:
        self._prefill, self._decode = prefill_pb2_grpc.PrefillStub(to_prefill), decode_pb2_grpc.DecodeStub(to_decode)
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(1)
        self._names = 0

    async def run(self, num_tokens: int, max_tokens: int, *, started: asyncio.Event | None = None) -> dict[str, float]:
        """One request, on a stream of its own. `started` is set with its second token."""
        self._names += 1
        name = f"q{self._names}"
        request = {
            "request_id": name,
            "attempt": 1,
            "token_ids": self._rng.integers(0, self._vocab_size, num_tokens).tolist(),
            "num_prompt_tokens": num_tokens,
            "sampling": sampling_to_proto(SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)),
            "tenant": "t",
        }
        stream = self._decode.Stream(decode_pb2.StreamRequest(router_id=name))
        await stream.initial_metadata()
        await self._decode.Reserve(decode_pb2.ReserveRequest(router_id=name, **request), timeout=60)
        watching = asyncio.create_task(self._watch(stream, name, started))
        result: dict[str, float] = {}
        first_at = 0.0
        try:
            async for event in self._prefill.Run(prefill_pb2.PrefillRequest(**request), timeout=120):
                if event.HasField("accepted"):
                    await self._decode.Attach(
                        decode_pb2.AttachRequest(request_id=name, attempt=1, ticket=event.accepted.ticket), timeout=60
                    )
                elif event.HasField("first_token"):
                    first_at = time.perf_counter()
                    result["prefill"] = event.first_token.prefill_s * 1e3
                else:
                    result |= {"publish": event.done.publish_s * 1e3, "chunks": event.done.chunks, "MB": event.done.bytes / 1e6}
            times = await asyncio.wait_for(watching, None if started else 60)
        finally:
            watching.cancel()
            stream.cancel()
        return result | {
            "fetch": times["fetch"],
            "committed": (times["committed"] - first_at) * 1e3,
            "second": (times["second"] - first_at) * 1e3,
            "step": (times["last"] - times["second"]) * 1e3 / max(1, max_tokens - 2),
        }

    async def _watch(self, stream: Any, name: str, started: asyncio.Event | None) -> dict[str, float]:
        seen: dict[str, float] = {}
        async for message in stream:
            for event in message.events:
                if event.request_id != name:
                    continue
                if event.HasField("failed"):
                    raise SystemExit(f"the hand-over failed: {event.failed.message}")
                if event.HasField("committed"):
                    seen |= {"committed": time.perf_counter(), "fetch": event.committed.fetch_s * 1e3}
                elif event.HasField("token"):
                    seen.setdefault("second", time.perf_counter())
                    if started is not None:
                        started.set()
                    if event.token.finish_reason:
                        return seen | {"last": time.perf_counter()}
        raise SystemExit("the decode worker ended its stream")


@asynccontextmanager
async def workers(ray: LocalRay, directory: Path, arguments: argparse.Namespace) -> AsyncIterator[tuple[str, str]]:
    redis = await asyncio.create_subprocess_exec(*server_argv(server_binary(), directory), stdout=subprocess.DEVNULL)
    addresses = {role: f"127.0.0.1:{free_port()}" for role in ("prefill", "decode")}
    processes = {role: start(role, address, directory, ray, arguments) for role, address in addresses.items()}
    try:
        await asyncio.gather(*(ready(processes[role], address, directory / f"{role}.log") for role, address in addresses.items()))
        yield addresses["prefill"], addresses["decode"]
    finally:
        for process in processes.values():
            process.terminate()
        for role, process in processes.items():
            try:
                await asyncio.to_thread(process.wait, 40)
            except subprocess.TimeoutExpired:
                process.kill()
            if arguments.logs:
                print(f"--- {role}\n{_end_of(directory / f'{role}.log')}", file=sys.stderr)
        redis.kill()
        await redis.wait()


async def measure(ray: LocalRay, directory: Path, arguments: argparse.Namespace, vocab_size: int) -> None:
    secret = load_secret(directory / "secret")
    async with (
        workers(ray, directory, arguments) as (prefill, decode),
        channel_to_worker(prefill, secret, caller="benchmark") as to_prefill,
        channel_to_worker(decode, secret, caller="benchmark") as to_decode,
    ):
        router = Router(to_prefill, to_decode, vocab_size)
        for _ in range(3):
            await router.run(arguments.tokens, 6)
        load = await begin_load(router, arguments)
        try:
            results = [await router.run(arguments.tokens, 6) for _ in range(arguments.rounds)]
            if any(task.done() for task in load):
                raise SystemExit("the load ended before the measurement; ask for fewer --rounds")
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
    megabytes, chunks = results[-1]["MB"], results[-1]["chunks"]
    print(
        f"{arguments.kv_transfer}, {arguments.load} others decoding: {arguments.tokens} tokens, {megabytes:.0f} MB in {chunks:.0f} chunks"
    )
    for name in ("prefill", "publish", "fetch", "committed", "second", "step"):
        median, late, worst = np.percentile([result[name] for result in results], [50, 99, 100])
        print(f"  {name:<10} {median:8.2f} {late:8.2f} {worst:8.2f} ms", flush=True)


async def begin_load(router: Router, arguments: argparse.Namespace) -> list[asyncio.Task[dict[str, float]]]:
    """Sequences that decode from now on until they are cancelled."""
    tasks: list[asyncio.Task[dict[str, float]]] = []
    for _ in range(arguments.load):
        started = asyncio.Event()
        tasks.append(asyncio.create_task(router.run(arguments.load_tokens, LOAD_OUTPUT, started=started)))
        await asyncio.wait_for(started.wait(), 60)
    return tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--tokens", type=int, default=2600)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--load", type=int, default=0, help="sequences that decode meanwhile")
    parser.add_argument("--load-tokens", type=int, default=1024, help="tokens of each one's prompt")
    parser.add_argument("--chunk-mib", type=int, default=0, help="of a published chunk; 0: what suits the transport")
    parser.add_argument("--kv-transfer", default="ray")
    parser.add_argument("--decode-gpu", type=int, default=1)
    parser.add_argument("--logs", action="store_true", help="print the ends of the workers' logs")
    arguments = parser.parse_args()
    config = TINY if arguments.tiny else LLAMA_8B
    with LocalRay(object_store_bytes=256 << 20 if arguments.tiny else 4 << 30) as ray, tempfile.TemporaryDirectory(prefix="ts-") as name:
        directory = Path(name)
        (directory / "model").mkdir()
        (directory / "model" / "config.json").write_text(json.dumps(config))
        (directory / "secret").write_bytes(b"sixteen bytes or more")
        event_loop.run(measure(ray, directory, arguments, config["vocab_size"]))


if __name__ == "__main__":
    main()
