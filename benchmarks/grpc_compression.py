"""gzip on gRPC: what it saves on the wire and what it costs in time, for prompts and for answers.

    PYTHONPATH=. python benchmarks/grpc_compression.py

A server process that answers at once, the SDK in this one, over loopback. The prompt is 30 kB of this project's documentation; the answer
is 256 pieces of one token each. Bytes are counted by a proxy in between, times are taken without it: the median over rounds in which both
ways take turns. The break-even bandwidth is bytes saved over time lost: on a faster link gzip only costs.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from twostep import AsyncClient
from twostep.rpc.channel import compression_of, open_channel
from twostep.rpc.server import GrpcServer, ServerConfig
from twostep.rpc.v1 import decode_pb2, decode_pb2_grpc
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import inference_pb2_grpc as pb_grpc

_PROMPT_BYTES = 30_000
_NUM_PIECES = 256
_WAYS = ("none", "gzip")


class Answers(pb_grpc.InferenceServicer, decode_pb2_grpc.DecodeServicer):
    """As many pieces of documentation as max_tokens says."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        for n in range(request.sampling.max_tokens):
            yield pb.GenerateResponse(piece=pb.Piece(text=self._words[n], token_ids=[1000 + 37 * n], position=n))
        yield pb.GenerateResponse(end=pb.End(finish_reason=pb.FINISH_REASON_LENGTH))

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        return decode_pb2.ReserveResponse()


def documentation() -> str:
    root = Path(__file__).resolve().parent.parent
    text = "".join(path.read_text() for path in sorted(root.glob("docs/*.md")))
    return text.encode()[:_PROMPT_BYTES].decode(errors="ignore")


def serve(way: str, pipe: Any) -> None:
    async def run() -> None:
        server = GrpcServer(ServerConfig(compression=compression_of(way), health_port=-1))
        # What it lacks, the generated classes answer with UNIMPLEMENTED; only their stubs call it abstract.
        answers = Answers([word + " " for word in documentation().split(" ")])  # type: ignore[abstract]
        server.add(answers, pb_grpc.add_InferenceServicer_to_server, "twostep.v1.Inference")
        server.add(answers, decode_pb2_grpc.add_DecodeServicer_to_server, "twostep.v1.Decode")
        pipe.send(await server.start())
        await server.wait()

    asyncio.run(run())


class Counter:
    """Bytes through a proxy, to the server and back."""

    def __init__(self) -> None:
        self.up = self.down = 0


@asynccontextmanager
async def counting(port: int) -> AsyncIterator[tuple[int, Counter]]:
    counter = Counter()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        while data := await reader.read(1 << 16):
            setattr(counter, way, getattr(counter, way) + len(data))
            writer.write(data)
            await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, other_writer, "up"), pump(other_reader, writer, "down"))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], counter
    finally:
        server.close()


async def chat(client: AsyncClient, prompt: str, num_pieces: int) -> float:
    started = time.perf_counter()
    await client.chat([{"role": "user", "content": prompt}], max_tokens=num_pieces).result()
    return time.perf_counter() - started


async def reserve(stub: decode_pb2_grpc.DecodeAsyncStub, token_ids: list[int]) -> float:
    started = time.perf_counter()
    await stub.Reserve(decode_pb2.ReserveRequest(request_id="r", attempt=1, token_ids=token_ids), timeout=10)
    return time.perf_counter() - started


async def measure(ports: dict[str, int], rounds: int) -> None:
    prompt = documentation()
    # About what a tokenizer makes of it: a token for four characters, ids all over a vocabulary of 128 k.
    token_ids = [(n * 2654435761) % 128_000 for n in range(len(prompt) // 4)]

    async def bytes_of(way: str, kind: str) -> tuple[int, int]:
        async with counting(ports[way]) as (port, counter):
            await run(way, kind, port)
            await asyncio.sleep(0.1)
            return counter.up, counter.down

    async def run(way: str, kind: str, port: int, times: int = 1) -> list[float]:
        if kind == "token ids":
            async with open_channel(f"127.0.0.1:{port}", compression=compression_of(way)) as channel:
                stub = decode_pb2_grpc.DecodeStub(channel)
                return [await reserve(stub, token_ids) for _ in range(times)]
        async with AsyncClient(f"127.0.0.1:{port}", compression="gzip" if way == "gzip" else "none") as client:
            return [await chat(client, *((prompt, 1) if kind == "prompt" else ("hi", _NUM_PIECES))) for _ in range(times)]

    print("| | bytes to the server | bytes back | median, ms | break-even, Mbit/s |")
    print("|---|---|---|---|---|")
    for kind in ("prompt", "token ids", "answer"):
        taken: dict[str, list[float]] = {way: [] for way in _WAYS}
        for _ in range(rounds):
            for way in _WAYS:
                # The first one of a connection pays for the connection.
                taken[way] += (await run(way, kind, ports[way], 11))[1:]
        sizes = {way: await bytes_of(way, kind) for way in _WAYS}
        medians = {way: statistics.median(taken[way]) for way in _WAYS}
        saved, lost = sum(sizes["none"]) - sum(sizes["gzip"]), medians["gzip"] - medians["none"]
        nothing = saved < 0.01 * sum(sizes["none"])
        even = {"none": "", "gzip": "saves nothing" if nothing else "any" if lost <= 0 else f"{saved * 8 / 1e6 / lost:.0f}"}
        for way in _WAYS:
            up, down = sizes[way]
            print(f"| {kind}, {way} | {up:,} | {down:,} | {1000 * medians[way]:.2f} | {even[way]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of ten requests each")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    servers, ports = [], {}
    for way in _WAYS:
        here, there = context.Pipe()
        servers.append(context.Process(target=serve, args=(way, there), daemon=True))
        servers[-1].start()
        ports[way] = here.recv()
    try:
        asyncio.run(measure(ports, args.rounds))
    finally:
        for server in servers:
            server.terminate()
            server.join()


if __name__ == "__main__":
    main()
