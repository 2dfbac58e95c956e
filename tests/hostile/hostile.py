"""`make hostile`: attacks a running system, one attack after another, and says what it cost everybody else.

    python tests/hostile/hostile.py                      all attacks of attacks_*.py, some minutes
    python tests/hostile/hostile.py --short              those that every change must pass
    python tests/hostile/hostile.py --only gzip          whose name has this in it
    python tests/hostile/hostile.py --only everything --requests 10000

Prints a line for each attack: what was answered, the longest stall of the router as its probes saw it every 50 ms, how long an ordinary
client beside it waited for an answer, and how much memory the router took at most beyond what it had before. It fails where an answer is
not the one due, where the ordinary client was refused or got another answer than before, where a probe got no good answer, or where a
bound below is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc
import redis
from attack import Attack, Target
from attacks_engine import BROKEN
from running import System, running
from tiny_models import save_poisoned_model

from twostep.errors import TwostepError
from twostep.keys.api_key_file import put_in_file
from twostep.keys.api_keys import make_key
from twostep.local.ports import free_ports

_HERE = Path(__file__).parent
_MODEL = "hostile"
# The router's promise beside any attack (docs/access.md). Its probes are quicker on a quiet machine.
_AIM_S = 0.1
# Beyond this a run fails: a busy machine takes a core away in ways that no figure of the kernel shows.
_BOUND_S = 1.0
_BOUND_BYTES = 512 << 20
# An attack frees what it holds before it returns. Its last effects are still its own.
_AFTER_S = 1.0
# Errors of an attack: the answer was not the one due, or none came.
_FAILURES = (AssertionError, OSError, TimeoutError, EOFError, aiohttp.ClientError, grpc.RpcError, redis.RedisError, TwostepError)
# No attack takes so long, but for the requests that are asked for; whatever it does then is a fault, of it or of the system.
_ATTACK_S = 120.0
_REQUEST_S = 1.0


class Figures(NamedTuple):
    """`stall_s`: the longest stall without waits for a core; `wall_s`: as it was seen; `answer_s`: the ordinary client's longest wait."""

    stall_s: float
    wall_s: float
    answer_s: float
    grown_bytes: int
    problems: Sequence[str]


class Watched:
    """The samples of watch.py, as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._samples: list[dict[str, Any]] = []
        self._expected = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            self._samples.append(json.loads(line))

    async def until_all_answer(self) -> None:
        """Returns when every probe and the ordinary client have had a good answer, which all later ones are compared with."""
        wanted = {"HTTP probe", "HTTP, connection kept", "gRPC probe", "answer"}
        while wanted:
            assert self._process.poll() is None, "the watching process runs"
            await asyncio.sleep(0.05)
            for sample in list(self._samples):
                if sample["kind"] != "memory" and not sample["problem"]:
                    wanted.discard(sample.get("what", "answer"))
                    self._expected = sample.get("text", "") or self._expected

    def figures(self, begin_s: float, end_s: float) -> Figures:
        """Returns the figures of all that was under way between the two."""
        samples = list(self._samples)
        before = [each["bytes"] for each in samples if each["kind"] == "memory" and each["at_s"] <= begin_s]
        during = [each for each in samples if each["at_s"] <= end_s and each["at_s"] + each.get("wall_s", 0.0) >= begin_s]
        probes = [each for each in during if each["kind"] == "probe"]
        problems = {f"{each.get('what', 'the ordinary client')}: {each['problem']}" for each in during if each.get("problem")}
        texts = {each["text"] for each in during if each["kind"] == "answer" and not each["problem"]}
        problems |= {f"the ordinary client got {text!r}, not {self._expected!r}" for text in texts - {self._expected}}
        held = [each["bytes"] for each in during if each["kind"] == "memory"]
        return Figures(
            stall_s=max((each["stall_s"] for each in probes), default=0.0),
            wall_s=max((each["wall_s"] for each in probes), default=0.0),
            answer_s=max((each["wall_s"] for each in during if each["kind"] == "answer"), default=0.0),
            grown_bytes=max(held, default=0) - before[-1],
            problems=sorted(problems),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Attacks a running system and says what it cost everybody else.")
    parser.add_argument("--short", action="store_true", help="only what every change must pass")
    parser.add_argument("--only", default="", metavar="TEXT", help="attacks whose name has this in it")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="how many are drawn at random (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random")
    args = parser.parse_args()
    chosen = [attack for attack in _all() if args.only in attack.name and (attack.short or not args.short)]
    if not chosen:
        print(f"no attack has {args.only!r} in its name; there are: " + ", ".join(attack.name for attack in _all()))
        return 2
    with tempfile.TemporaryDirectory(prefix="h-") as folder:
        # The attacks of attacks_engine.py have a token to work with; nobody else comes upon it.
        model = save_poisoned_model(Path(folder) / _MODEL, BROKEN, value=float("inf"))
        keys = [_key_of(Path(folder) / "keys.jsonl", name) for name in ("attacker", "neighbour")]
        admin_port, *_ = free_ports(1)
        extra = ("--dtype", "float32", "--api-keys-file", str(Path(folder) / "keys.jsonl"))
        env = {"TWOSTEP_ADMIN_PORT": str(admin_port), "TWOSTEP_CALIBRATE": "0"}
        started = time.monotonic()
        with running(model, Path(folder) / "up", extra=extra, env=env, api_key=keys[1]) as system:
            print(f"started in {time.monotonic() - started:.0f} s; {len(chosen)} attacks", flush=True)
            target = replace(_target(system, model, admin_port, keys), num_requests=args.requests, seed=args.seed)
            with _watched(system, target, keys[1]) as watched:
                failed = asyncio.run(_attack(chosen, target, watched))
            system.check_empty()
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _all() -> list[Attack]:
    modules = [importlib.import_module(path.stem) for path in sorted(_HERE.glob("attacks_*.py"))]
    return [attack for module in modules for attack in module.ATTACKS]


def _key_of(path: Path, name: str) -> str:
    told, key = make_key(name=name)
    put_in_file(path, key)
    return told


def _target(system: System, model: Path, admin_port: int, keys: Sequence[str]) -> Target:
    host, _, grpc_port = system.target.rpartition(":")
    return Target(
        host=host,
        http_port=int(system.http_url.rpartition(":")[2]),
        grpc_port=int(grpc_port),
        admin_port=admin_port,
        api_key=keys[0],
        neighbour_key=keys[1],
        model=_MODEL,
        model_dir=model,
        redis_url=system.told("router", "--redis-url"),
        workers=[worker.address for worker in system.all_workers()],
        secret_file=Path(system.told("router", "--secret-file")),
    )


@contextmanager
def _watched(system: System, target: Target, api_key: str) -> Iterator[Watched]:
    (router,) = system.pids("router")
    args = {"pid": router, "host": target.host, "http_port": target.http_port, "grpc_port": target.grpc_port, "model": target.model}
    argv = [sys.executable, str(_HERE / "watch.py"), json.dumps({**args, "api_key": api_key})]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Watched(process)
    finally:
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _attack(attacks: Sequence[Attack], target: Target, watched: Watched) -> int:
    """Runs the attacks and returns how many failed."""
    async with asyncio.timeout(_ATTACK_S):
        await watched.until_all_answer()
    width = max(len(attack.name) for attack in attacks)
    print(f"{'attack':{width}}  stall ms  as seen  client s  memory MB  answered")
    failed, worst_s, most_bytes = 0, 0.0, 0
    stalls: dict[str, float] = {}
    for attack in attacks:
        begun = time.monotonic()
        wrong: list[str] = []
        try:
            async with asyncio.timeout(_ATTACK_S + _REQUEST_S * target.num_requests):
                answered = await attack.run(target)
        except _FAILURES as error:
            answered = ""
            wrong.append(f"{type(error).__name__}: {error}")
        await asyncio.sleep(_AFTER_S)
        seen = watched.figures(begun, time.monotonic())
        wrong += seen.problems
        stalls[attack.name] = seen.stall_s
        bound_s = max(_AIM_S, 2 * stalls[attack.control]) if attack.control in stalls else _BOUND_S
        wrong += [f"a stall of {seen.stall_s:.2f} s"] if seen.stall_s > bound_s else []
        wrong += [f"{seen.grown_bytes >> 20} MB of memory"] if seen.grown_bytes > _BOUND_BYTES else []
        aim = "!" if seen.stall_s > _AIM_S else " "
        figures = f"{seen.stall_s * 1e3:7.0f}{aim}  {seen.wall_s * 1e3:7.0f}  {seen.answer_s:8.1f}  {seen.grown_bytes / 2**20:9.1f}"
        print(f"{attack.name:{width}}  {figures}  {answered}", flush=True)
        for line in wrong:
            print(f"    WRONG: {line}", flush=True)
        failed += bool(wrong)
        worst_s, most_bytes = max(worst_s, seen.stall_s), max(most_bytes, seen.grown_bytes)
    print(f"longest stall {worst_s * 1e3:.0f} ms (aim {_AIM_S * 1e3:.0f}), most memory {most_bytes / 2**20:.0f} MB")
    return failed


if __name__ == "__main__":
    sys.exit(main())
