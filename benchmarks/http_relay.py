"""What one router process relays over HTTP, as server-sent events, beside what it relays over gRPC.

    python benchmarks/http_relay.py                          500 streams, a token each every 40 ms, over either
    python benchmarks/http_relay.py --streams 500 --step-ms 25 --decode 2 --tokenizer DIR/tokenizer.json

Tokens a second while all streams run, and tokens for each second of the router's own CPU time, all its threads. As in router_relay.py the
router has the first core to itself and everything else shares the last one; where that is not fast enough to keep the router busy, the
second figure is what one core would relay. Streams over HTTP have a connection each, those over gRPC share eight. Every answer is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import time
from pathlib import Path

from router_helper import Helper, Reply
from router_rig import LAST_CORE, Pace, Rig, RouterProcess, busy, rig, tokens_for

from twostep.rpc import event_loop

_SETTLE_S = 0.5
_CONNECTIONS = 8


async def over_grpc(rig_: Rig, router: RouterProcess, *, streams: int, seconds: float, step_s: float) -> tuple[Reply, float]:
    num_tokens = tokens_for(seconds, step_s)
    async with rig_.streams(1, streams=streams, connections=_CONNECTIONS, num_tokens=num_tokens) as replies:
        cpu = router.cpu_s()
        await asyncio.sleep(seconds)
        cpu = router.cpu_s() - cpu
    return replies[0], cpu


async def over_http(
    rig_: Rig, client: Helper, router: RouterProcess, port: int, *, streams: int, seconds: float, step_s: float
) -> tuple[Reply, float]:
    num_tokens = tokens_for(seconds, step_s)
    await rig_.tell(rig_.workers, "hold", held=True)
    await client.ask("start", port=port, streams=streams, num_tokens=num_tokens)
    await rig_.tell(rig_.workers, "hold", held=False)
    await asyncio.sleep(_SETTLE_S)
    await client.ask("mark")
    cpu = router.cpu_s()
    await asyncio.sleep(seconds)
    cpu = router.cpu_s() - cpu
    mark = await client.ask("mark")
    assert not mark["ended"], "answers ended while they were measured; more tokens for each"
    return await client.ask("finish"), cpu


def told(what: str, reply: Reply, cpu: float, *, streams: int, step_s: float) -> None:
    rate, wall = reply["tokens"] / reply["wall_s"], reply["wall_s"]
    print(
        f"{what}: {streams} streams: {rate:,.0f} of {streams / step_s:,.0f} tokens/s with {cpu / wall:.0%} of a core, "
        f"{reply['tokens'] / cpu:,.0f} tokens per CPU second ({1e6 * cpu / reply['tokens']:.1f} us a token, "
        f"{reply['tokens'] / reply['pieces']:.2f} tokens a piece), {busy()}",
        flush=True,
    )


async def main(arguments: argparse.Namespace) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    step_s = arguments.step_ms / 1e3
    async with rig(Pace(num_decode=arguments.decode, step_s=step_s), tokenizer=arguments.tokenizer) as rig_:
        router = await rig_.add_router("--http-port", str(port))
        if arguments.pid:
            print(f"router: pid {router.pid}", flush=True)
        client = await Helper.start("http client", "http_load.py", str(rig_.place.directory), core=LAST_CORE)
        try:
            began = time.monotonic()
            for _ in range(arguments.repeat):
                pace = {"streams": arguments.streams, "seconds": arguments.seconds, "step_s": step_s}
                told("HTTP", *await over_http(rig_, client, router, port, **pace), streams=arguments.streams, step_s=step_s)
                if not arguments.no_grpc:
                    told("gRPC", *await over_grpc(rig_, router, **pace), streams=arguments.streams, step_s=step_s)
            print(f"{time.monotonic() - began:.0f} s in all")
        finally:
            await client.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=6.0, help="to measure, once all streams run")
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--tokenizer", type=Path, default=None, help="a tokenizer.json; without: one of 4,096 tokens is made")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--no-grpc", action="store_true")
    parser.add_argument("--pid", action="store_true", help="print the router's, for a profiler")
    event_loop.run(main(parser.parse_args()))
