"""What a shared prefix saves: time to first token, cold and warm, and the bytes that travel.

    twostep up &                                     # or any running system
    python benchmarks/prefix_cache.py --target localhost:50051 --at-least 5

Each round sends one prompt with a prefix never seen before (cold), waits until the workers have announced it, and sends another
prompt with the same prefix and another ending (warm). Nothing else should use the system meanwhile.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass

from twostep import Client, TwostepError

# Workers announce what they hold with their heartbeats, once a second.
ANNOUNCE_S = 1.5


@dataclass(frozen=True)
class Sample:
    ttft_s: float
    prefill_s: float
    cached_tokens: int
    moved_bytes: int


def ask(client: Client, token_ids: list[int]) -> Sample:
    """One short answer; the time to its first piece is the client's own."""
    begin = time.perf_counter()
    answer = client.generate(token_ids=token_ids, max_tokens=4, temperature=0.0, ignore_eos=True)
    ttft = 0.0
    for _ in answer:
        ttft = ttft or time.perf_counter() - begin
    return Sample(ttft, answer.phases.prefill_s, answer.usage.cached_tokens, answer.transfer.bytes)


def main() -> None:
    try:
        run()
    except TwostepError as error:
        sys.exit(error.message)


def run() -> None:
    """Raises TwostepError where a request is not answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="localhost:50051")
    parser.add_argument("--prefix-tokens", type=int, default=1984, help="shared by the two prompts of a round")
    parser.add_argument("--suffix-tokens", type=int, default=16, help="each prompt's own, after those")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=40000, help="token ids are drawn from 1000 up to this")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="RATIO", help="fail if TTFT is not so many times lower")
    args = parser.parse_args()

    rng = random.Random(time.time_ns())

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000, args.vocab) for _ in range(count)]

    cold, warm = [], []
    with Client(args.target) as client:
        ask(client, tokens(args.prefix_tokens))  # warms up threads, channels and the transport
        for _ in range(args.rounds):
            prefix = tokens(args.prefix_tokens)
            cold.append(ask(client, prefix + tokens(args.suffix_tokens)))
            time.sleep(ANNOUNCE_S)
            warm.append(ask(client, prefix + tokens(args.suffix_tokens)))

    print(f"{args.prefix_tokens} shared tokens + {args.suffix_tokens} of its own, {args.rounds} rounds, medians (TTFT: least to most)")
    for name, samples in (("cold", cold), ("warm", warm)):
        times = sorted(s.ttft_s * 1000 for s in samples)
        prefill = statistics.median(s.prefill_s for s in samples) * 1000
        cached = statistics.median(s.cached_tokens for s in samples)
        moved = statistics.median(s.moved_bytes for s in samples) / 1e6
        ttft = f"{statistics.median(times):7.1f} ms ({times[0]:.1f} to {times[-1]:.1f})"
        print(f"  {name}   TTFT {ttft}   prefill {prefill:7.1f} ms   cached tokens {cached:6.0f}   KV moved {moved:7.2f} MB")
    ratios = sorted(c.ttft_s / w.ttft_s for c, w in zip(cold, warm, strict=True))
    ratio = statistics.median(ratios)
    print(f"  TTFT is {ratio:.1f} times lower with the prefix cached (round by round, {ratios[0]:.1f} to {ratios[-1]:.1f})")
    if ratio < args.at_least:
        sys.exit(f"less than the {args.at_least:g} times that were asked for")


if __name__ == "__main__":
    main()
