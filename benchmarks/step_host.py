"""What a decode step costs the host besides the device: plan, batch, settle, for sequences of 1024 tokens and more.

    PYTHONPATH=. python benchmarks/step_host.py            # --profile: where it goes

The runner computes nothing and answers at once, so that a step is the engine's own time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Sequence

import numpy as np

from twostep.engine.batch import Batch, FinishedStep, InFlight, Sampled
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.fake import FakeRunner
from twostep.engine.types import EngineRequest
from twostep.sampling_params import SamplingParams


class NoDevice(FakeRunner):
    """Samples token 5, whatever came before."""

    overlaps = True

    def launch(self, batch: Batch) -> InFlight:
        rows = len(batch.sample_rows)
        return FinishedStep(Sampled(token_ids=[5] * rows, logprobs=[None] * rows, top_logprobs=[()] * rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for batch in args.batch:
        engine = started(batch, args.steps)
        profile = cProfile.Profile()
        if args.profile:
            profile.enable()
        times = sorted(step_seconds(engine, batch, args.steps))
        profile.disable()
        print(f"{batch:4} sequences: {statistics.median(times) * 1e3:.3f} ms a step, 95 % under {times[int(len(times) * 0.95)] * 1e3:.3f}")
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(20)


def started(batch: int, steps: int) -> Engine:
    """An engine whose sequences all decode."""
    blocks = batch * ((1024 + batch + steps + 64) // 16 + 2)
    engine = Engine(NoDevice(num_blocks=blocks, block_size=16), EngineConfig(max_num_batched_tokens=8192, max_num_seqs=batch))
    rng = np.random.default_rng(0)
    for i in range(batch):
        params = SamplingParams(max_tokens=steps + batch + 64, temperature=0.0)
        tokens = rng.integers(0, 1000, 1024).tolist()
        engine.submit(
            EngineRequest(
                seq_id=f"{i}", token_ids=tokens, num_prompt_tokens=1024, sampling=params, prefix_key=b"k", eos_token_ids=frozenset({2})
            )
        )
    for _ in range(batch + 8):
        engine.step()
    return engine


def step_seconds(engine: Engine, batch: int, steps: int) -> Sequence[float]:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        output = engine.step()
        times.append(time.perf_counter() - start)
        assert len(output.tokens) == batch
    return times


if __name__ == "__main__":
    main()
