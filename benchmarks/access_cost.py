"""What API keys and the hold-back hook cost the router's event loop: CPU microseconds, best of 5.

python benchmarks/access_cost.py
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

from router.access.account import Account
from router.access.identity import Identity
from router.serving.hold_back import HoldBack
from twostep.hold_back import Held, HeldRequest, Verdict
from twostep.keys.api_keys import KeyTable, Limits, make_key
from twostep.rpc.v1 import inference_pb2

NUM_KEYS = 10_000
LIMITS = Limits(requests_per_minute=10**9, tokens_per_minute=10**12, tokens_per_day=10**12, max_concurrent=100)


def cpu_us(work: Callable[[], object], times: int = 20_000) -> float:
    best = float("inf")
    for _ in range(5):
        begun = time.process_time()
        for _ in range(times):
            work()
        best = min(best, (time.process_time() - begun) / times)
    return best * 1e6


def serve(identity: Identity) -> None:
    with identity.calling(), identity.spending(100) as spending:
        spending.placed, spending.num_output = True, 50


async def allow(held: Held) -> Verdict:
    return None


async def pieces(num_pieces: int, hold_back: HoldBack) -> None:
    async def write(response: inference_pb2.GenerateResponse) -> None:
        pass

    request = HeldRequest(request_id="r", model="m", tenant="t", key_id="k", request_class="standard")
    answer = hold_back.begin(request, write)
    for i in range(num_pieces):
        piece = inference_pb2.Piece(text=" word", token_ids=[i], position=i)
        await answer.push(inference_pb2.GenerateResponse(piece=piece), last=i == num_pieces - 1)


def answer(num_pieces: int, hold_back: HoldBack) -> None:
    asyncio.run(pieces(num_pieces, hold_back))


def main() -> None:
    made = [make_key(limits=LIMITS) for _ in range(NUM_KEYS)]
    table = KeyTable(key for _, key in made)
    told, key = made[77]
    known, nobody = Identity(account=Account(key)), Identity()
    print(f"a key found among {NUM_KEYS}: {cpu_us(lambda: table.find(told)):.1f} us")
    with_limits, without = cpu_us(lambda: serve(known)), cpu_us(lambda: serve(nobody))
    print(f"a request with all limits, taken and settled: {with_limits:.1f} us; without keys: {without:.1f} us")
    print(f"the x-ratelimit headers of an answer: {cpu_us(known.headers):.1f} us")
    for num_pieces in (500, 4000):
        hold_back = HoldBack(allow, window=64, timeout_s=1.0, fail_open=False)
        each = cpu_us(functools.partial(answer, num_pieces, hold_back), times=2) / num_pieces
        print(f"the hold-back hook that allows everything, each of {num_pieces} pieces: {each:.1f} us")


if __name__ == "__main__":
    main()
