"""Open streams over HTTP for minutes, on a whole system with fake engines: nothing dropped, and memory that does not grow.

    python benchmarks/http_soak.py                                500 streams for 300 s
    python benchmarks/http_soak.py --streams 20 --seconds 20      a dry run

`twostep up --runner fake`: router, a prefill and a decode worker, Redis and Ray, as deployed; only the model is not there. Every client
asks one of a few questions, reads the answer, and asks again, so that as many streams are open all the time; each answer's text must be
that which the SDK got over gRPC, whole, and its last event [DONE]. Memory: the resident set of every process, once every few seconds,
from when all streams are open and each has had an answer.
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
_MOST_PROBLEMS = 3


class Reader:
    """One client, whose answers come one after the other."""

    def __init__(self, question: str, right: str) -> None:
        self.question, self.right = question, right
        self.num_events = self.num_answers = self.num_wrong = 0
        self.problems: list[str] = []
        self.longest_gap_s = 0.0

    async def run(self, http: aiohttp.ClientSession, num_tokens: int, until: float) -> None:
        while time.monotonic() < until and len(self.problems) < _MOST_PROBLEMS:
            await self.ask(http, num_tokens)

    async def ask(self, http: aiohttp.ClientSession, num_tokens: int) -> None:
        body = {"model": "soak", "prompt": self.question, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        last, text, done = None, "", False
        try:
            async with http.post("/v1/completions", json=body) as answer:
                if answer.status != 200:
                    self.problems.append(f"{answer.status}: {await answer.text()}")
                    return
                async for line in answer.content:
                    if not line.startswith(b"data: "):
                        continue
                    now = time.monotonic()
                    self.longest_gap_s, last = max(self.longest_gap_s, now - (last or now)), now
                    if line.startswith(b"data: [DONE]"):
                        done = True
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.problems.append(event["error"]["message"])
                        return
                    self.num_events += 1
                    text += event["choices"][0]["text"] if event["choices"] else ""
        except (aiohttp.ClientError, TimeoutError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
            return
        if not done:
            self.problems.append("the answer ended without [DONE]")
        self.num_answers += 1
        self.num_wrong += text != self.right


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
    num_tokens = arguments.tokens
    answer_s = num_tokens * arguments.step_ms / 1e3
    questions = [f"Question {i}: what is {i} times {i}?" for i in range(_QUESTIONS)]
    asked = [client.generate(question, max_tokens=num_tokens, temperature=0.0, ignore_eos=True) for question in questions]
    right = await asyncio.to_thread(lambda: [answer.result().text for answer in asked])
    readers = [Reader(questions[i % _QUESTIONS], right[i % _QUESTIONS]) for i in range(arguments.streams)]
    samples: dict[str, list[float]] = {}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None, sock_read=120)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:
        began = time.monotonic()
        until = began + answer_s + arguments.seconds
        running = []
        for reader in readers:
            running.append(asyncio.create_task(reader.run(http, num_tokens, until)))
            # They end one by one then, and not all at once.
            await asyncio.sleep(answer_s / len(readers))
        print(f"{len(readers)} streams open after {time.monotonic() - began:.1f} s", flush=True)
        watching = asyncio.create_task(watch(root, arguments.seconds, samples))
        await asyncio.gather(*running)
        wall = time.monotonic() - began
        watching.cancel()
        await asyncio.wait([watching])
    problems = [problem for reader in readers for problem in reader.problems]
    num_wrong = sum(reader.num_wrong for reader in readers)
    events = sum(reader.num_events for reader in readers)
    print(f"{sum(reader.num_answers for reader in readers):,} answers, {events:,} events in {wall:.0f} s ({events / wall:,.0f} a second)")
    print(f"dropped: {len(problems)}, wrong text: {num_wrong}")
    gaps = sorted(reader.longest_gap_s for reader in readers)
    print(f"longest gap of a client: median {gaps[len(gaps) // 2]:.2f} s, worst {gaps[-1]:.2f} s")
    for problem in sorted(set(problems))[:5]:
        print(f"  {problem}")
    flat = True
    for name, values in samples.items():
        third = max(1, len(values) // 3)
        early, late = statistics.median(values[:third]), statistics.median(values[-third:])
        print(f"{name}: {early:.0f} MiB in the first third, {late:.0f} MiB in the last ({min(values):.0f} to {max(values):.0f})")
        flat = flat and late < early * 1.05 + 2
    return flat and not problems and not num_wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--tokens", type=int, default=150, help="of each answer")
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
