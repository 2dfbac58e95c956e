"""Whether router replicas cost each other anything: CPU time of a token with 1, 2 and 4 router processes, below saturation.

    python benchmarks/router_scale.py                                  100 streams for each of 1, 2, 4 routers, a token each every 40 ms
    python benchmarks/router_scale.py --streams 400 --total            400 streams, over 1, 2, 4 routers
    python benchmarks/router_scale.py --routers 1 2 4 8 --decode 16    on a machine with many cores

What routers share (Redis, heartbeats, usage of tenants) and repeat (polls, a stream from every decode worker) shows as CPU seconds for each
1,000 tokens. With --total a decode worker's step also comes to n routers in n messages, each with an n-th of the tokens. Routers are spread
over all cores but the last one, which workers, Redis and clients have. Rounds alternate, so that other work on the machine hits all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence

from router_rig import CORES, Pace, Rig, RouterProcess, Stream, busy, encode_request, open_client, rig, tokens_in, until

from twostep.rpc import event_loop


async def measure(rig_: Rig, routers: Sequence[RouterProcess], *, streams: int, num_tokens: int) -> tuple[float, float]:
    """CPU seconds of these routers for 1,000 tokens, and tokens a second."""
    answer, tokenizer = rig_.place.answer(), rig_.place.tokenizer()
    request = encode_request(answer[:16], num_tokens=num_tokens)
    all_of_them = [Stream() for _ in range(streams)]
    async with contextlib.AsyncExitStack() as stack:
        clients = [[await stack.enter_async_context(open_client(router.port)) for _ in range(8 // len(routers) or 1)] for router in routers]
        calls = []
        for i, stream in enumerate(all_of_them):
            of_router = clients[i % len(routers)]
            calls.append(asyncio.create_task(of_router[i // len(routers) % len(of_router)].ask(request, stream)))
        await until(lambda: all(len(stream.messages) > num_tokens // 10 for stream in all_of_them))
        begins, wall = [len(stream.messages) for stream in all_of_them], time.monotonic()
        cpu = sum(router.cpu_s() for router in routers)
        await until(lambda: any(len(stream.messages) >= num_tokens * 9 // 10 for stream in all_of_them))
        cpu, wall = sum(router.cpu_s() for router in routers) - cpu, time.monotonic() - wall
        ends = [len(stream.messages) for stream in all_of_them]
        await asyncio.gather(*calls)
    for stream in all_of_them:
        stream.check(answer, num_tokens, tokenizer)
    tokens = sum(tokens_in(stream.messages[begin:end]) for stream, begin, end in zip(all_of_them, begins, ends, strict=True))
    return 1e3 * cpu / tokens, tokens / wall


async def main(arguments: argparse.Namespace) -> None:
    async with rig(Pace(num_decode=arguments.decode, step_s=arguments.step_ms / 1e3)) as rig_:
        for i in range(max(arguments.routers)):
            await rig_.add_router(core=CORES[i % max(1, len(CORES) - 1)])
        results: dict[int, list[float]] = {num: [] for num in arguments.routers}
        for _ in range(arguments.rounds):
            for num, costs in results.items():
                streams = arguments.streams * (1 if arguments.total else num)
                cost, rate = await measure(rig_, rig_.routers[:num], streams=streams, num_tokens=arguments.tokens)
                costs.append(cost)
                print(f"{num} routers: {cost:.4f} CPU s for 1,000 tokens, at {rate:,.0f} tokens/s, {busy()}", flush=True)
    base = statistics.median(results[arguments.routers[0]])
    for num, costs in results.items():
        median = statistics.median(costs)
        print(
            f"{num} routers: median {median:.4f} CPU s for 1,000 tokens ({min(costs):.4f} to {max(costs):.4f}), "
            f"{median / base - 1:+.1%} of {arguments.routers[0]}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--streams", type=int, default=100, help="of each router")
    parser.add_argument("--total", action="store_true", help="--streams are those of all routers together")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=40.0)
    parser.add_argument("--rounds", type=int, default=3)
    event_loop.run(main(parser.parse_args()))
