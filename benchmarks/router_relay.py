"""Measures what one router process relays over gRPC or HTTP, and what it adds to the time to the first token.

    python benchmarks/router_relay.py                        500 streams over gRPC, a token each every 40 ms
    python benchmarks/router_relay.py --http --no-ttft       and beside them as server-sent events over HTTP, a connection each
    python benchmarks/router_relay.py --streams 500 --step-ms 25 --decode 2 --connections 8 --tokenizer DIR/tokenizer.json

Relay: tokens a second while all streams run, and tokens for each second of the router's own CPU time, all its threads. The router has
the first core to itself and everything else shares the last one; where that is not fast enough to keep the router busy, the second figure
is what one core would relay. TTFT: prompts of random tokens one after the other, which no worker has, by the router's own clock.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from router_helper import BenchHelper
from router_place import encode_request, fresh_prompt
from router_rig import Pace, Rig, RouterProcess, busy, free_port, open_client, rig, tokens_for

from twostep.rpc import event_loop
from twostep.settings.reading import FlagParser


async def relay(rig_: Rig, client: BenchHelper, router: RouterProcess, step_s: float, seconds: float, *, what: str, **load: object) -> None:
    async with rig_.streams([(client, load | {"num_tokens": tokens_for(seconds, step_s)})]) as replies:
        cpu = router.cpu_s()
        await asyncio.sleep(seconds)
        cpu = router.cpu_s() - cpu
    (reply,) = replies
    streams, wall = int(str(load["streams"])), reply["wall_s"]
    print(
        f"{what}: {streams} streams: {reply['tokens'] / wall:,.0f} of {streams / step_s:,.0f} tokens/s with {cpu / wall:.0%} of a core, "
        f"{reply['tokens'] / cpu:,.0f} tokens per CPU second ({1e6 * cpu / reply['tokens']:.1f} us a token, "
        f"{reply['tokens'] / reply['pieces']:.2f} tokens a piece), {busy()}",
        flush=True,
    )


async def ttft(rig_: Rig, router: RouterProcess, *, length: int, rounds: int) -> None:
    vocab_size = rig_.place.tokenizer().get_vocab_size()
    route, own, at_client, direct = [], [], [], []
    idle_from, cpu_before = time.monotonic(), router.cpu_s()
    await asyncio.sleep(3.0)
    idle = (router.cpu_s() - cpu_before) / (time.monotonic() - idle_from)
    cpu = elapsed = 0.0
    async with open_client(router.port) as client, rig_.open_workers() as workers:
        # In turns: what else runs on the machine is the same to both.
        for i in range(rounds + 1):
            direct.append(await workers.first_token_s(fresh_prompt(vocab_size, length)))
            before, cpu_before = time.monotonic(), router.cpu_s()
            stream = await client.ask(encode_request(fresh_prompt(vocab_size, length), num_tokens=2))
            phases = stream.responses()[-1].end.phases
            if i:  # the first one makes connections
                cpu, elapsed = cpu + router.cpu_s() - cpu_before, elapsed + time.monotonic() - before
                route.append(phases.route_s)
                own.append(phases.ttft_s - phases.queue_s - phases.prefill_s)
                at_client.append(stream.first_at - stream.sent_at)
    added = 1e3 * (statistics.median(at_client) - statistics.median(direct[1:]))
    print(
        f"ttft: {length} tokens: at the client, p50: {_ms(direct[1:])} from the workers, {_ms(at_client)} through the router, which adds "
        f"{added:.2f} ms; by its own clock {_ms(own)} to the first token less what the prefill worker says, "
        f"{_ms(route)} to the accepted Run; {1e3 * (cpu - idle * elapsed) / rounds:.2f} ms of CPU a request, {busy()}"
    )


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f} ms"


async def main(arguments: argparse.Namespace) -> None:
    step_s, http_port = arguments.step_ms / 1e3, free_port()
    async with rig(Pace(num_decode=arguments.decode, step_s=step_s), tokenizer=arguments.tokenizer) as rig_:
        router = await rig_.add_router("--port", str(http_port) if arguments.http else "-1")
        if arguments.pid:
            print(f"router: pid {router.pid}", flush=True)
        if not arguments.no_ttft:
            for length in arguments.lengths:
                await ttft(rig_, router, length=length, rounds=arguments.rounds)
        grpc_load = {"ports": [router.port], "connections": arguments.connections, "streams": arguments.streams}
        loads = [("gRPC", "router_load.py", grpc_load)]
        if arguments.http:
            loads.append(("HTTP", "http_load.py", {"port": http_port, "streams": arguments.streams}))
        clients = [(what, await rig_.add_client(script), load) for what, script, load in loads]
        for _ in range(arguments.repeat):
            for what, client, load in clients:
                await relay(rig_, client, router, step_s, arguments.seconds, what=what, **load)


if __name__ == "__main__":
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=6.0, help="to measure, once all streams run")
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--connections", type=int, default=8, help="that the client spreads its streams over")
    parser.add_argument("--tokenizer", type=Path, default=None, help="a tokenizer.json; without: one of 4,096 tokens is made")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2600], help="of prompts, in tokens")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--no-ttft", action="store_true")
    parser.add_argument("--http", action="store_true", help="relay over HTTP as well")
    parser.add_argument("--pid", action="store_true", help="print the router's, for a profiler")
    event_loop.run(main(parser.parse_args()))
