"""A storm of hand-overs: a thousand requests in flight, some given up by their clients, a worker killed every few seconds.

    python benchmarks/hand_over_storm.py                        1000 in flight, 5 % aborts, a kill every 10 s, for 3 minutes
    make storm STORM_FLAGS="--seconds 20 --concurrency 200"
    make bench-gpu BENCH=hand_over_storm BENCH_FLAGS="--device auto --both-roles --seconds 45 --concurrency 200 --kill-every 8"

`twostep up` on this machine with a small random model in float32: two prefill and two decode workers, on its CPU, where KV goes through
Ray, or shared out to its GPUs. With `--both-roles` any of them may compute a prompt and go on with it. Every answer is compared with the
single-process engine's, token for token, or must have failed with a clear status. In the end nothing may be held: no block, lease or object
in any worker, no object in Ray's store, no file in shared memory, no process. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostep import AsyncClient, SamplingOptions
from twostep.errors import TwostepError, status_of
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser

if TYPE_CHECKING:
    from oracle import Oracle
    from running import System

_ROOT = Path(__file__).resolve().parents[1]
# Requests are drawn from so many; each has a cache salt of its own, so that its KV is computed and moved all the same.
_NUM_CASES = 96
_PROMPT_TOKENS = (8, 160)
_ANSWER_TOKENS = (4, 32)
_TIMEOUT_S = 120.0
_CPU_MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# Heads of a size that GPUs' kernels are made for.
_GPU_MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_RETRY_S = (0.5, 1.5)


@dataclass(frozen=True)
class StormCase:
    """A request and the engine's answer to it."""

    prompt: list[int]
    options: SamplingOptions
    expected: list[int]


@dataclass
class StormTally:
    """Outcomes of the requests. `wrong` holds the cases that did not give the engine's tokens, with what they gave."""

    ended: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[StormCase, list[int]]] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    moved_bytes: int = 0
    num_moved: int = 0
    num_tokens: int = 0
    num_begun_again: int = 0
    in_flight: int = 0
    most_in_flight: int = 0


def main() -> int:
    args = _parse()
    # The helpers of the system's tests are what starts, asks and judges it here.
    sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "tests" / "system")]
    from oracle import Oracle  # noqa: PLC0415
    from running import running  # noqa: PLC0415
    from tiny_models import save_tiny_model  # noqa: PLC0415

    _allow_files(8 * args.concurrency + 1024)
    os.environ |= {"TWOSTEP_MAX_INFLIGHT": str(args.concurrency + 100), "TWOSTEP_MAX_WAITING": str(args.concurrency + 100)}
    with tempfile.TemporaryDirectory(prefix="storm-") as scratch:
        model = save_tiny_model(Path(scratch) / "model", **(_CPU_MODEL if args.device == "cpu" else _GPU_MODEL))
        judge = Oracle(model)
        cases = _make_cases(judge)
        flags: tuple[str, ...] = (
            "--dtype",
            "float32",
            "--device",
            args.device,
            "--max-num-seqs",
            str(args.concurrency),
            "--cpu-threads",
            "1",
        )
        flags += ("--kv-cache-memory-bytes", str(256 << 20), "--max-num-batched-tokens", "1024")
        flags += ("--engine-process", "on", "--cpu-threads", "1")
        left: list[str] = []
        began = time.monotonic()
        try:
            numbers = {"prefill": args.prefill, "decode": args.decode}
            with running(model, Path(scratch) / "run", **numbers, local_prefill=args.both_roles, extra=flags) as system:
                print(f"up after {time.monotonic() - began:.0f} s", flush=True)
                tally, killed, seconds = asyncio.run(_storm(args, system, cases))
                left = _leftovers(system, args)
        except AssertionError as error:  # processes that outlived it
            left.append(str(error))
    left += _unused_rings()
    near_ties, wrong = _judge(judge, tally)
    _print(args, tally, killed, seconds, near_ties, wrong, left)
    clear = not (tally.ended["DEADLINE_EXCEEDED"] or tally.ended["INTERNAL"])
    return 0 if clear and not wrong and not left else 1


def _leftovers(system: System, args: argparse.Namespace) -> list[str]:
    """Returns what the idle system holds, once it is whole; empty if nothing."""
    from running import wait_until  # noqa: PLC0415

    left = []
    looks: tuple[Callable[[], object], ...] = (
        lambda: wait_until(lambda: system.serves(args.prefill, args.decode), timeout_s=90, what="all workers are back"),
        lambda: system.check_empty(timeout_s=90),
        lambda: system.check_store_empty(timeout_s=60),
    )
    for look in looks:
        try:
            look()
        except AssertionError as error:
            left.append(str(error))
    return left


async def _storm(args: argparse.Namespace, system: System, cases: Sequence[StormCase]) -> tuple[StormTally, Counter[str], float]:
    """Returns when the last request has ended."""
    tally, killed = StormTally(), Counter[str]()
    begin = time.monotonic()
    end = begin + args.seconds
    async with AsyncClient(system.target) as client:
        killer = asyncio.create_task(_kill(args, system, killed))
        streams = (_stream(client, cases, tally, args.aborts, end, random.Random(f"{args.seed}/{n}"), n) for n in range(args.concurrency))
        await asyncio.gather(*streams)
        killer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killer
    return tally, killed, time.monotonic() - begin


async def _stream(
    client: AsyncClient, cases: Sequence[StormCase], tally: StormTally, aborts: float, end: float, rng: random.Random, n: int
) -> None:
    """One request after the other until the time is up."""
    # Not all in the first instant.
    await asyncio.sleep(rng.uniform(0, 2))
    number = 0
    while time.monotonic() < end:
        number += 1
        tally.in_flight += 1
        tally.most_in_flight = max(tally.most_in_flight, tally.in_flight)
        give_up_s = rng.uniform(0, 10) if rng.random() < aborts else None
        ended = await _ask(client, rng.choice(cases), tally, f"{n}/{number}", give_up_s)
        tally.in_flight -= 1
        tally.ended[ended] += 1
        if ended not in ("OK", "aborted"):
            await asyncio.sleep(rng.uniform(*_RETRY_S))


async def _ask(client: AsyncClient, case: StormCase, tally: StormTally, salt: str, give_up_s: float | None) -> str:
    """Returns the end of a request: OK, aborted, or a status. Tokens are compared whatever the end."""
    begin = time.monotonic()
    got: list[int] = []
    try:
        answer = client.generate(token_ids=case.prompt, timeout=_TIMEOUT_S, cache_salt=salt, **case.options)
        async with asyncio.timeout(give_up_s):
            async for piece in answer:
                if not got:
                    tally.ttft_s.append(time.monotonic() - begin)
                got += piece.token_ids
            done = await answer.result()
    except TimeoutError:
        ended = "aborted"
    except TwostepError as error:
        ended = status_of(error).grpc
        tally.messages[f"{ended}: {error.message.partition(':')[0][:100]}"] += 1
    else:
        ended = "OK"
        tally.total_s.append(time.monotonic() - begin)
        tally.num_moved += done.transfer.blocks_moved > 0
        tally.moved_bytes += done.transfer.bytes
        tally.num_begun_again += done.attempts > 1
    tally.num_tokens += len(got)
    if got != case.expected[: len(got)] or (ended == "OK" and len(got) != len(case.expected)):
        tally.wrong.append((case, got))
    return ended


async def _kill(args: argparse.Namespace, system: System, killed: Counter[str]) -> None:
    """The workers in turn, a prefill and a decode worker alternately, once its own process and once its engine's, the other one's of the
    two the next time; one that is not back yet is passed over."""
    numbers = {"prefill_worker": args.prefill, "decode_worker": args.decode}
    each = [(n, module) for n in range(max(numbers.values())) for module, number in numbers.items() if n < number]
    parts = ("worker", "engine")
    turns = itertools.cycle((parts[(i + lap) % 2], n, module) for lap in range(2) for i, (n, module) in enumerate(each))
    ports = {module: sorted(worker.address for worker in system.workers(module)) for module in numbers}
    while True:
        await asyncio.sleep(args.kill_every)
        part, n, module = next(turns)
        for worker in await asyncio.to_thread(system.workers, module):
            if worker.address == ports[module][n]:
                killed[f"{module}'s engine" if part == "engine" else module] += 1
                with contextlib.suppress(ProcessLookupError):
                    (worker.kill_engine if part == "engine" else worker.kill)()


def _make_cases(judge: Oracle) -> list[StormCase]:
    cases = []
    for n in range(_NUM_CASES):
        rng = random.Random(n)
        prompt = [rng.randrange(3, judge.vocab_size) for _ in range(rng.randint(*_PROMPT_TOKENS))]
        params = SamplingParams(max_tokens=rng.randint(*_ANSWER_TOKENS), temperature=rng.choice((0.0, 0.8)), seed=n, ignore_eos=True)
        options = SamplingOptions(max_tokens=params.max_tokens, temperature=params.temperature, seed=n, ignore_eos=True)
        # Options left out would take the model's own defaults.
        options |= {"top_p": params.top_p, "top_k": params.top_k}
        cases.append(StormCase(prompt, options, judge.answer(prompt, params)))
    return cases


def _judge(judge: Oracle, tally: StormTally) -> tuple[int, int]:
    """Answers that differ where the engine itself stands within 1e-4 of another token, and those that are wrong."""
    near_ties = wrong = 0
    for case, got in tally.wrong:
        try:
            near_ties += bool(judge.compare(case.prompt, case.options, got))
        except AssertionError as error:
            wrong += 1
            print(f"wrong: {error}", file=sys.stderr)
    return near_ties, wrong


def _unused_rings() -> list[str]:
    """Files of workers in shared memory that no process has mapped, now and some seconds ago: others on this machine come and go."""
    looks = []
    for pause in (0.0, 10.0):
        time.sleep(pause)
        used = "".join(_maps(process) for process in Path("/proc").iterdir() if process.name.isdecimal())
        looks.append({path.name for path in Path("/dev/shm").glob("twostep-*") if path.name not in used})
        if not looks[-1]:
            break
    return sorted(set.intersection(*looks))


def _maps(process: Path) -> str:
    try:
        return (process / "maps").read_text()
    except OSError:  # it has ended, or is somebody else's
        return ""


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count)), hard))


def _print(
    args: argparse.Namespace, tally: StormTally, killed: Counter[str], seconds: float, near_ties: int, wrong: int, left: Sequence[str]
) -> None:
    ended = tally.ended
    ttft, total = (statistics.quantiles(times or [0.0, 0.0], n=100) for times in (tally.ttft_s, tally.total_s))
    print(f"{args.concurrency} streams (most in flight {tally.most_in_flight}), {seconds:.0f} s, {os.cpu_count()} cores")
    print(f"killed: {', '.join(f'{count} {module}' for module, count in killed.items())}")
    print(f"requests: {sum(ended.values())}; " + ", ".join(f"{name} {count}" for name, count in ended.most_common()))
    for message, count in tally.messages.most_common(8):
        print(f"  {count} × {message}")
    rates = f"{ended['OK'] / seconds:.0f} requests/s, {tally.num_tokens / seconds:.0f} tokens/s"
    print(f"answered: {rates}, {tally.num_begun_again} of them begun again on other workers")
    kept = f"; {ended['OK'] - tally.num_moved} answered without one" if args.both_roles else ""
    print(f"hand-overs: {tally.num_moved} ({tally.num_moved / seconds:.0f}/s), {tally.moved_bytes / 1e6:.0f} MB{kept}")
    print(f"TTFT p50 {ttft[49]:.2f} s, p99 {ttft[98]:.2f} s; whole answer p50 {total[49]:.2f} s, p99 {total[98]:.2f} s")
    print(f"wrong answers: {wrong} (near-ties: {near_ties}); left over: {'; '.join(left) or 'nothing'}")
    if args.json:
        counts = {"ended": ended, "wrong": wrong, "near_ties": near_ties, "seconds": seconds, "killed": killed, "left": left}
        args.json.write_text(json.dumps(counts))


def _parse() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=1000, help="requests in flight")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long new ones are begun")
    parser.add_argument("--aborts", type=float, default=0.05, help="share of requests that their client gives up, within 10 s")
    parser.add_argument("--kill-every", type=float, default=10.0, help="seconds between kills")
    parser.add_argument("--device", default="cpu", help="of the workers; auto: GPUs where there are some")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    parser.add_argument("--both-roles", action="store_true", help="any worker may compute a prompt, and keep it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the counts there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
