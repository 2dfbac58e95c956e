"""A worker over two ranks changes its role: the ranks stay, with the weights and the KV that they hold. They end with its drain, and it
ends with exit code 1 when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import psutil
import pytest
from bare_deployment import RedisServer
from tiny_models import save_tiny_model
from worker_harness import SECRET

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.local.ports import free_ports
from twostep.model.runner.model_runner import ModelRunner
from twostep.rpc.call_signing import channel_to_worker
from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostep.rpc.worker_role import switch_role
from twostep.sampling_params import SamplingParams

# As python -m decode_worker, but for the transport: Ray takes longer to start than all the rest.
_WORKER = """
import sys
from kv_transfer.local.transport import LocalHub
from kv_transfer.remote import transports_of
from worker_harness import edges_of_both_roles, EDGES
from twostep.worker.edge import edge_maker
from twostep.worker.process import run_worker
local = edges_of_both_roles(LocalHub())
remote = edge_maker(EDGES, transports_of)
make_edge = remote if "--engine-process=on" in sys.argv else local
sys.exit(run_worker("decode", sys.argv[1:], lambda: make_edge, "engine_with_local_kv"))
"""
START_S = 120.0
WAIT_S = 60.0
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


async def answer_of_decode(channel: grpc.aio.Channel, name: str, prompt: Sequence[int]) -> list[int]:
    """Computed by the worker alone."""
    stub = decode_pb2_grpc.DecodeStub(channel)
    stream = stub.Stream(decode_pb2.StreamRequest(router_id=name))
    await stream.initial_metadata()
    request = decode_pb2.ReserveRequest(request_id=name, attempt=1, router_id=name, token_ids=prompt, num_prompt_tokens=len(prompt))
    request.sampling.CopyFrom(sampling_to_proto(PARAMS))
    request.prefill_here = True
    await stub.Reserve(request, timeout=WAIT_S)
    tokens: list[int] = []
    async with asyncio.timeout(WAIT_S):
        async for message in stream:
            for event in message.events:
                assert not event.HasField("failed"), event
                token = event.first_token.token if event.HasField("first_token") else event.token
                tokens.append(token.token_id)
                if token.finish_reason:
                    stream.cancel()
                    return tokens
    raise AssertionError(f"the stream ended after {tokens}")


async def first_token_of_prefill(channel: grpc.aio.Channel, name: str, prompt: Sequence[int]) -> tuple[int, int]:
    """And how many of the prompt's tokens were cached."""
    request = prefill_pb2.PrefillRequest(request_id=name, attempt=1, token_ids=prompt, num_prompt_tokens=len(prompt))
    request.sampling.CopyFrom(sampling_to_proto(PARAMS))
    call = prefill_pb2_grpc.PrefillStub(channel).Run(request, timeout=WAIT_S)
    async for event in call:
        if event.HasField("first_token"):
            call.cancel()
            return event.first_token.token.token_id, event.first_token.cached_tokens
    raise AssertionError("no first token")


async def settled(channel: grpc.aio.Channel) -> worker_pb2.WorkerStats:
    """Returns its statistics once it holds nothing."""
    give_up = time.monotonic() + WAIT_S
    while True:
        request = worker_pb2.WorkerStatsRequest(check_integrity=True)
        stats: worker_pb2.WorkerStats = await worker_pb2_grpc.WorkerStub(channel).Stats(request, timeout=WAIT_S)
        assert not stats.integrity_error
        held = stats.num_running, stats.num_waiting, stats.num_held, stats.num_leases, stats.num_sequences
        if not any(held):
            return stats
        assert time.monotonic() < give_up, held
        await asyncio.sleep(0.05)


async def switch(channel: grpc.aio.Channel, role: str) -> None:
    change = await switch_role(channel, SECRET, role=role, drain_timeout_s=WAIT_S, worker=await settled(channel))
    assert change.role == role


@pytest.fixture(params=["off", "on"])
def form(request: pytest.FixtureRequest) -> str:
    """Whether the engine has a process of its own."""
    return str(request.param)


@contextmanager
def worker(
    model_dir: Path, redis: RedisServer, directory: Path, form: str
) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process, str, Path]]:
    """A ready decode worker over two ranks, the rank that is not the worker itself, its address and its log."""
    (directory / "secret").write_bytes(SECRET.own)
    log, port = directory / "log", free_ports(1)[0]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-c", _WORKER, "--model", str(model_dir), "--device", "cpu", "-tp", "2", "--dtype", "float32"),
                *("--grpc-port", str(port), "--health-port", str(free_ports(1)[0]), "--redis-url", redis.url),
                *("--secret-file", str(directory / "secret"), "--num-blocks", "64", "--cpu-threads", "1"),
                f"--engine-process={form}",
            ],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        give_up = time.monotonic() + START_S
        while "ready: decode" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        (rank,) = (
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "twostep.model.runner.parallel_rank" in child.cmdline()
        )
        yield process, rank, f"127.0.0.1:{port}", log
    finally:
        process.kill()
        process.wait()


@pytest.mark.system
async def test_ranks_outlive_a_switch_and_end_with_the_drain(model_dir: Path, redis: RedisServer, tmp_path: Path, form: str) -> None:
    with worker(model_dir, redis, tmp_path, form) as (process, rank, address, log):
        alone = Engine(ModelRunner(model_dir, dtype="float32", num_blocks=64, block_size=16, num_threads=1), EngineConfig())
        vocab_size = alone.runner.vocab_size
        for turn in range(2):
            prompt = [3 + (7 * i + turn) % (vocab_size - 3) for i in range(70)]
            request = EngineRequest(
                seq_id=f"{turn}", token_ids=prompt, num_prompt_tokens=len(prompt), sampling=PARAMS, eos_token_ids=frozenset()
            )
            expected = [token.token_id for token in generate(alone, [request])[0]]
            async with channel_to_worker(address, SECRET, caller="test") as channel:
                assert await answer_of_decode(channel, f"d{turn}", prompt) == expected
                await switch(channel, "prefill")
            # Another life of it. What both ranks computed before is still in their pools.
            async with channel_to_worker(address, SECRET, caller="test") as channel:
                assert await first_token_of_prefill(channel, f"p{turn}", prompt) == (expected[0], 64)
                await switch(channel, "decode")
        assert rank.is_running()
        # A terminal's Ctrl-C reaches all of them: the ranks leave it to the worker.
        rank.send_signal(signal.SIGINT)
        process.terminate()
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0, log.read_text()
        assert not rank.is_running()


@pytest.mark.system
def test_it_ends_when_a_rank_dies(model_dir: Path, redis: RedisServer, tmp_path: Path, form: str) -> None:
    with worker(model_dir, redis, tmp_path, form) as (process, rank, _, log):
        rank.kill()
        assert process.wait(WAIT_S) == 1, log.read_text()
        assert "rank 1 was ended by SIGKILL" in log.read_text(), "what an operator looks for"
