"""Open streams over HTTP for minutes, on a whole system with fake engines: nothing dropped, and memory that does not grow.

    python benchmarks/http_soak.py                                500 streams for 300 s
    python benchmarks/http_soak.py --streams 20 --seconds 20      a dry run

`twostep up --runner fake`: router, a prefill and a decode worker, Redis and Ray, as deployed; only the model is not there. Every stream
asks one of a few questions for an answer as long as the run; each answer's text must be that which the SDK gets over gRPC meanwhile,
whole, and its last event [DONE]. Memory: the resident set of every process, once every few seconds, after the streams are open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

from twostep import Client
from twostep.errors import TwostepError
from twostep.local.ports import free_ports

_QUESTIONS = 8
_START_S = 120.0
_SAMPLE_S = 5.0


class Stream:
    """One answer on its way."""

    def __init__(self, question: str) -> None:
        self.question = question
        self.text = ""
        self.num_events = 0
        self.done = False
        self.problem = ""
        self.opened = asyncio.Event()
        self.longest_gap_s = 0.0

    async def run(self, http: aiohttp.ClientSession, num_tokens: int) -> None:
        body = {"model": "soak", "prompt": self.question, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        last = None
        try:
            async with http.post("/v1/completions", json=body) as answer:
                if answer.status != 200:
                    self.problem = f"{answer.status}: {await answer.text()}"
                    return
                async for line in answer.content:
                    if not line.startswith(b"data: "):
                        continue
                    now = time.monotonic()
                    self.longest_gap_s, last = max(self.longest_gap_s, now - (last or now)), now
                    if line.startswith(b"data: [DONE]"):
                        self.done = True
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.problem = event["error"]["message"]
                        return
                    self.num_events += 1
                    self.opened.set()
                    self.text += event["choices"][0]["text"] if event["choices"] else ""
        except (aiohttp.ClientError, TimeoutError) as error:
            self.problem = f"{type(error).__name__}: {error}"


def role_of(process: psutil.Process) -> str:
    words = process.cmdline()
    for module in ("router", "prefill_worker", "decode_worker"):
        if module in words:
            return module
    return ""


async def watch(root: psutil.Process, seconds: float, samples: dict[str, list[float]]) -> None:
    ends = time.monotonic() + seconds
    found = {role_of(child): child for child in root.children(recursive=True)}
    found.pop("", None)
    while time.monotonic() < ends:
        for name, process in found.items():
            samples.setdefault(name, []).append(process.memory_info().rss / (1 << 20))
        await asyncio.sleep(_SAMPLE_S)


def wait_ready(client: Client, log: Path) -> None:
    give_up = time.monotonic() + _START_S
    while True:
        try:
            client.generate("ready?", max_tokens=2).result()
            return
        except TwostepError:
            if time.monotonic() > give_up:
                raise SystemExit(f"the system did not start:\n{log.read_text()[-3000:]}") from None
            time.sleep(0.5)


async def soak(arguments: argparse.Namespace, root: psutil.Process, url: str, client: Client) -> bool:
    num_tokens = int(arguments.seconds / arguments.step_ms * 1e3)
    questions = [f"Question {i}: what is {i} times {i}?" for i in range(_QUESTIONS)]
    options = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    # What is right, over gRPC at the same time.
    asked = {question: client.generate(question, **options) for question in questions}  # type: ignore[arg-type]
    told = asyncio.create_task(asyncio.to_thread(lambda: {question: answer.result().text for question, answer in asked.items()}))
    streams = [Stream(questions[i % _QUESTIONS]) for i in range(arguments.streams)]
    samples: dict[str, list[float]] = {}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:
        began = time.monotonic()
        running = [asyncio.create_task(stream.run(http, num_tokens)) for stream in streams]
        opened = [asyncio.create_task(stream.opened.wait()) for stream in streams]
        await asyncio.wait([asyncio.gather(*opened), asyncio.gather(*running)], return_when=asyncio.FIRST_COMPLETED)
        print(f"{sum(stream.opened.is_set() for stream in streams)} streams open after {time.monotonic() - began:.1f} s", flush=True)
        watching = asyncio.create_task(watch(root, arguments.seconds * 0.95, samples))
        await asyncio.gather(*running)
        wall = time.monotonic() - began
        watching.cancel()
        await asyncio.wait([watching])
    right = await told
    problems = [stream.problem for stream in streams if stream.problem]
    wrong = [stream for stream in streams if not stream.problem and stream.text != right[stream.question]]
    unfinished = sum(not stream.done for stream in streams)
    events = sum(stream.num_events for stream in streams)
    print(f"{len(streams)} streams, {events:,} events in {wall:.0f} s ({events / wall:,.0f} a second)")
    print(f"dropped: {len(problems)}, without [DONE]: {unfinished}, wrong text: {len(wrong)}")
    gaps = sorted(stream.longest_gap_s for stream in streams)
    print(f"longest gap of a stream: median {gaps[len(gaps) // 2]:.2f} s, worst {gaps[-1]:.2f} s")
    for problem in sorted(set(problems))[:5]:
        print(f"  {problem}")
    flat = True
    for name, values in samples.items():
        third = max(1, len(values) // 3)
        early, late = statistics.median(values[:third]), statistics.median(values[-third:])
        print(f"{name}: {early:.0f} MiB in the first third, {late:.0f} MiB in the last ({min(values):.0f} to {max(values):.0f})")
        # What answers themselves hold grows with them: token ids of each stream, some MiB.
        flat = flat and late < early * 1.1 + 16
    return flat and not problems and not wrong and not unfinished


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--step-ms", type=float, default=200.0, help="of the fake engines: a token of every stream")
    arguments = parser.parse_args()
    port, http_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="ts-") as name:
        log = Path(name) / "up.log"
        words = [sys.executable, "-P", "-m", "twostep.cli", "up", "--runner", "fake", "--served-model-name", "soak"]
        words += ["--port", str(port), "--http-port", str(http_port), "--max-num-seqs", str(arguments.streams + 2 * _QUESTIONS)]
        env = os.environ | {"TWOSTEP_FAKE_STEP_MS": str(arguments.step_ms), "TWOSTEP_MAX_INFLIGHT": str(arguments.streams + 64)}
        with log.open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=out, env=env)
        try:
            with Client(f"127.0.0.1:{port}", max_retries=0, timeout=arguments.seconds * 2 + 60) as client:
                wait_ready(client, log)
                good = asyncio.run(soak(arguments, psutil.Process(process.pid), f"http://127.0.0.1:{http_port}", client))
        finally:
            process.terminate()
            process.wait(60)
    print("flat and whole" if good else "NOT flat or NOT whole")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
