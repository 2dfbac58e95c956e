"""Continuous, dynamic and static batching of the same requests, by the real engine and scheduler, on a device that is a step curve.

    PYTHONPATH=. python benchmarks/batching_rules.py

Nothing is computed and nobody sleeps: a clock is put forward by what the curve says of each step, so that the figures are the rules' own
and the same everywhere. On a real device: `twostep bench engine --batching continuous dynamic static`.
"""

from __future__ import annotations

import argparse

from twostep.engine.batch import Batch, Sampled
from twostep.engine.fake import FakeRunner
from twostep.lab.bench.batching import Batching, Load, Rule, run_load
from twostep.step_curve import StepCurve, StepWorkload, chunk_pairs

# An 8B model on a GPU that reads its weights in 4 ms and computes 48,000 tokens/s; 131,072 bytes of KV a token at 4.4 TB/s.
CURVE = StepCurve(fixed_s=4e-3, per_row_s=20.8e-6, knee=190, per_pair_s=5e-10, per_sequence_s=5e-6, per_context_s=3e-8)


class CurveRunner(FakeRunner):
    """Its steps take what the curve says, of its own clock."""

    now = 0.0

    def run(self, batch: Batch) -> Sampled:
        counts = (batch.query_start[1:] - batch.query_start[:-1]).tolist()
        lens = batch.seq_lens.tolist()
        prompts = [(count, length - count) for count, length in zip(counts, lens, strict=True) if count > 1]
        decodes = [length for count, length in zip(counts, lens, strict=True) if count == 1]
        pairs = sum(chunk_pairs(count, before) for count, before in prompts)
        tokens = sum(count for count, _ in prompts)
        self.now += CURVE.step_s(StepWorkload(prompt_tokens=tokens, pairs=pairs, decodes=len(decodes), context=sum(decodes)))
        return super().run(batch)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, nargs="+", default=[2, 12, 40])
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--budget", type=int, default=1024)
    args = parser.parse_args()
    print("| requests/s | batching | tokens/s | TTFT p50 / p99 ms | whole answer p50 / p99 ms | longest gap p99 ms |")
    print("|---|---|---|---|---|---|")
    for rate in args.rate:
        load = Load(num_requests=args.requests, rate=rate, prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens)
        for batching in Batching:
            runner = CurveRunner(num_blocks=args.batch * 128, block_size=16)
            rule = Rule(batching=batching, batch=args.batch)
            result = run_load(runner, load, rule, args.budget, clock=lambda runner=runner: runner.now, sleep=runner.sleep)  # type: ignore[misc]
            shown = [sorted(getattr(times, name) for times in result.times) for name in ("ttft_s", "latency_s", "longest_gap_s")]
            ttft, latency, gap = ([1e3 * o[len(o) // 2], 1e3 * o[min(len(o) - 1, int(len(o) * 0.99))]] for o in shown)
            print(
                f"| {rate:g} | {batching.value} | {result.tokens_per_s:,.0f} | {ttft[0]:,.0f} / {ttft[1]:,.0f} | "
                f"{latency[0]:,.0f} / {latency[1]:,.0f} | {gap[1]:,.0f} |"
            )


if __name__ == "__main__":
    main()
