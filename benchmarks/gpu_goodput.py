"""Goodput of a whole system on the GPUs of one host: `twostep up`, load by `twostep bench serve`, and who met which targets.

    PYTHONPATH=$PWD python -P benchmarks/gpu_goodput.py --prefill 3 --decode 1 --rates 22,32,40 --out disaggregated
    PYTHONPATH=$PWD python -P benchmarks/gpu_goodput.py --aggregated --decode 4 --rates 16,22,32 --out aggregated
    PYTHONPATH=$PWD python -P benchmarks/gpu_goodput.py --rates 20@0,24@2 --out told    requests state the first and the third targets
    PYTHONPATH=$PWD python -P benchmarks/gpu_goodput.py --tiny --prefill 1 --decode 1 --rates 2 --duration 5 --out dry    on a CPU
    PYTHONPATH=$PWD python -P benchmarks/gpu_goodput.py --shape qwen3-30b-a3b --aggregated --decode 1 --rates 16 --out experts \\
        -- --tensor-parallel-size 2 --enable-expert-parallel

Llama-3.1-8B's shape, or another one, with random weights and a vocabulary of invented words; prompts of 2600 and answers of 128 tokens,
each +- 30 %, Poisson. For each rate: the share of requests that met each set of targets, and the latencies. `--out`: a folder for every
request's record, the workers' records with their curves, and the logs. Rates are of the whole system; "per GPU" counts workers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, models, pre_tokenizers

from twostep.lab.bench.serve.metrics import Distribution, LatencyTargets, latency_of
from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.bench.shapes import SHAPES, TINY_LLAMA
from twostep.lab.plan.machine import registered_workers
from twostep.local.ports import free_ports
from twostep.local.redis_server import server_argv, server_binary, server_url
from twostep.settings.reading import FlagParser

TARGETS = ("ttft:500 tpot:10 gap:25", "ttft:500 tpot:10", "ttft:500 tpot:30", "ttft:200 tpot:100")
START_S = 180.0


def make_model(directory: Path, config: Mapping[str, object]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(int(str(config["vocab_size"])))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def add_shape(parser: FlagParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")


@contextmanager
def system(arguments: argparse.Namespace, directory: Path, out: Path) -> Iterator[tuple[str, str]]:
    """Its router's address, once it answers, and its Redis."""
    redis_dir = directory / "redis"
    redis_dir.mkdir(mode=0o700)
    redis = subprocess.Popen(server_argv(server_binary(), redis_dir), stdout=subprocess.DEVNULL)
    port = free_ports(1)[0]
    flags = ["--decode", str(arguments.decode), "--grpc-port", str(port), "--port", "0", "--redis-url", server_url(redis_dir), "--verbose"]
    flags += ["--aggregated"] if arguments.aggregated else ["--prefill", str(arguments.prefill)]
    shape = TINY_LLAMA if arguments.tiny else SHAPES[arguments.shape]
    flags += ["--model", str(make_model(directory / "model", shape)), *arguments.up]
    env = os.environ | {"TWOSTEP_LOAD_FORMAT": "dummy", "TWOSTEP_MAX_MODEL_LEN": "8192", "TWOSTEP_LOG_LEVEL": "info"}
    with (out / "up.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, "-P", "-m", "twostep.cli", "up", *flags], stdout=log, stderr=log, env=env)
    try:
        print(f"up after {wait_ready(f'127.0.0.1:{port}', process, out / 'up.log'):.1f} s", flush=True)
        yield f"127.0.0.1:{port}", server_url(redis_dir)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        redis.kill()
        redis.wait()


def wait_ready(target: str, process: subprocess.Popen[bytes], log: Path) -> float:
    from twostep import Client  # noqa: PLC0415
    from twostep.errors import TwostepError  # noqa: PLC0415

    began = time.monotonic()
    while time.monotonic() - began < START_S and process.poll() is None:
        try:
            with Client(target, max_retries=0) as client:
                client.generate(token_ids=list(range(300, 340)), max_tokens=2, ignore_eos=True, timeout=30).result()
            return time.monotonic() - began
        except TwostepError:
            time.sleep(0.5)
    raise SystemExit(f"it did not start:\n{log.read_text('utf-8', 'replace')[-4000:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`stated`: the targets that requests state, by their place among TARGETS; None: they state none."""

    rate: float
    stated: int | None = None

    @classmethod
    def parse(cls, word: str) -> Run:
        rate, _, stated = word.partition("@")
        return cls(rate=float(rate), stated=int(stated) if stated else None)

    def __str__(self) -> str:
        return f"{self.rate:g}" if self.stated is None else f"{self.rate:g}@{self.stated}"


def load(target: str, run: Run, arguments: argparse.Namespace, out: Path, name: str = "") -> list[RequestRecord]:
    name = name or str(run)
    records = out / f"requests-{name}.jsonl"
    gpus = arguments.decode + (0 if arguments.aggregated else arguments.prefill)
    words = [
        *(sys.executable, "-P", "-m", "twostep.cli", "bench", "serve", "--target", target, "--gpus", str(gpus)),
        *("--workload", "normal", "--input-tokens", str(arguments.input_tokens), "--output-tokens", str(arguments.output_tokens)),
        *("--spread", "30", "--vocab-size", "900" if arguments.tiny else "100000", "--rate", str(run.rate), "--seed", str(arguments.seed)),
        *("--duration", str(arguments.duration), "--warmup", str(arguments.warmup)),
        *(() if run.stated is None else ("--send-targets",)),
        *("--goodput", *TARGETS[run.stated or 0].split(), "--save-requests", str(records), "--output", str(out / f"summary-{name}.json")),
    ]
    with (out / f"bench-{name}.log").open("wb") as log:
        if subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, check=False).returncode:
            print((out / f"bench-{name}.log").read_text()[-2000:])
    saved = [RequestRecord.from_json(json.loads(line)) for line in records.read_text().splitlines()]
    return [record for record in saved if record.measured]


def show(run: Run, records: Sequence[RequestRecord]) -> None:
    latencies = [latency_of(record) for record in records]
    answered = [latency for latency in latencies if latency is not None]
    shares = " ".join(
        f"{sum(not LatencyTargets.parse(words.split()).missed(latency) for latency in latencies) / max(1, len(latencies)):12.3f}"
        for words in TARGETS
    )
    parts = []
    for values in (
        [x.ttft_s for x in answered],
        [x.tpot_s for x in answered if x.tpot_s is not None],
        [x.longest_gap_s for x in answered if x.longest_gap_s is not None],
    ):
        found = Distribution.of(values)
        parts.append(" ".join(f"{1e3 * value:7.1f}" for value in (found.p50, found.p95, found.p99)))
    # A hand-over takes time in one of these.
    phases = [record.phases for record in records if record.phases is not None]
    local = sum(1 for each in phases if not each.get("publish_s") and not each.get("fetch_s"))
    print(f"{run!s:>6} {len(records):6d} {len(records) - len(answered):4d} {local:5d} {shares}  {' | '.join(parts)}", flush=True)


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1, help="decode workers; with --aggregated all workers")
    parser.add_argument("--aggregated", action="store_true")
    parser.add_argument(
        "--rates",
        default="8",
        type=lambda words: [Run.parse(word) for word in words.split(",")],
        help="requests per second, one run each; @N: they state the N-th targets",
    )
    parser.add_argument("--duration", type=float, default=60)
    parser.add_argument("--warmup", type=float, default=5)
    parser.add_argument("--input-tokens", type=int, default=2600)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--unloaded", type=int, default=0, help="after the first rate, 10 s of two prompts a second of about so many tokens"
    )
    add_shape(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("up", nargs="*", help="after --: further flags of twostep up")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="ts-") as name, system(arguments, Path(name), out) as (target, redis_url):
        titles = " ".join(f"{words.replace('ttft:', '').replace(' tpot:', '/').replace(' gap:', '/'):>12s}" for words in TARGETS)
        print(f"{'rate':>6} {'sent':>6} {'lost':>4} {'local':>5} {titles}  TTFT p50 p95 p99 | TPOT | longest gap, ms")
        for place, run in enumerate(arguments.rates):
            show(run, load(target, run, arguments, out))
            if arguments.unloaded and not place:
                alone = argparse.Namespace(**vars(arguments) | {"input_tokens": arguments.unloaded, "duration": 10, "warmup": 1})
                print(f"  2/s of {arguments.unloaded} tokens:")
                show(Run(rate=2.0), load(target, Run(rate=2.0), alone, out, f"unloaded-{arguments.unloaded}"))
        (out / "workers.jsonl").write_text("".join(record.to_json() + "\n" for record in registered_workers(redis_url)))
        logs = Path(name) / "logs"
        if logs.is_dir():
            shutil.copytree(logs, out / "logs", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
