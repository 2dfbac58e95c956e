"""How long a decode worker's event loop, and with it the tokens of everybody else, waits for a prompt that comes in.

    PYTHONPATH=. python benchmarks/long_prompts.py

What the worker does with a prompt on its event loop or beside it: the request is read and its blocks are hashed, blocks are reserved, the
hand-over is committed. Meanwhile something else asks for its turn all the time; what is printed is the longest that it waited.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner
from twostep.rpc import event_loop
from twostep.rpc.convert import sampling_to_proto
from twostep.rpc.v1 import decode_pb2
from twostep.sampling_params import SamplingParams
from twostep.worker.grammars import Grammars
from twostep.worker.model import ServedModel, layout_of
from twostep.worker.requests import RequestReader

BLOCK_SIZE = 16
VOCAB = 128_256
REPEATS = 9
SIZES = (1024, 8192, 32_768, 131_072)


class Watch:
    """Of an event loop: the longest that it had no turn for somebody who always wants one."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.perf_counter() - asked)


def new_runner() -> FakeRunner:
    return FakeRunner(num_blocks=2 * max(SIZES) // BLOCK_SIZE, block_size=BLOCK_SIZE, vocab_size=VOCAB, max_model_len=2 * max(SIZES))


async def take_in(reader: RequestReader, wire: bytes) -> float:
    """Seconds of the longest wait."""
    engine = Engine(new_runner(), EngineConfig(max_num_batched_tokens=8192, max_num_seqs=8, max_waiting=8))
    watch = Watch()
    watching = asyncio.create_task(watch.run())
    await asyncio.sleep(0.01)
    watch.longest_s = 0.0
    request = await reader.read(decode_pb2.ReserveRequest.FromString(wire))
    engine.reserve(request)
    await asyncio.sleep(0)  # the KV comes
    engine.commit(request.seq_id, [1])
    await asyncio.sleep(0.01)
    watching.cancel()
    return watch.longest_s


async def main() -> None:
    sys.setswitchinterval(0.0005)  # as a worker has it
    runner = new_runner()
    model = ServedModel(name="m", runner=runner, layout=layout_of(runner.kv_shape, "benchmark"), eos_token_ids=frozenset())
    grammars = Grammars(model.grammar_compiler())
    reader = RequestReader(secret=b"sixteen bytes or more", layout=model.layout, eos_token_ids=frozenset(), grammars=grammars)
    rng = random.Random(0)
    print(f"{'tokens':>8} {'longest wait, ms':>17}   median of {REPEATS}")
    for size in SIZES:
        sampling = sampling_to_proto(SamplingParams(max_tokens=4))
        ids = [rng.randrange(VOCAB) for _ in range(size)]
        proto = decode_pb2.ReserveRequest(request_id="r", attempt=1, token_ids=ids, num_prompt_tokens=size, sampling=sampling, tenant="t")
        wire = proto.SerializeToString()
        print(f"{size:8d} {1e3 * statistics.median([await take_in(reader, wire) for _ in range(REPEATS)]):17.2f}", flush=True)


if __name__ == "__main__":
    event_loop.run(main())
