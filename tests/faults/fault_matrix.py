"""`make fault-matrix`: strikes every part of a real deployment at every state of the hand-over, and writes docs/fault-matrix.md.

    python tests/faults/fault_matrix.py                      all of it, about 12 minutes on two cores
    python tests/faults/fault_matrix.py --only "kill -9" --target decode --stop-s 5

The faults are dealt out to lanes, each a deployment in namespaces of its own: one that waits out a SIGSTOP leaves the machine to the
others.
Needs Linux with network namespaces: root, or a kernel that gives them to users.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import namespaces
from cells import TARGETS, Fault, Injection, Target, Timing, inject
from fault_system import FaultSystem, Held
from faulty_requests import Asker, Outcome
from report import markdown, totals, with_two_raylets

from twostep.text.model_card import ModelCard

_ROOT = Path(__file__).resolve().parents[2]
# A proxy set for the internet knows nothing of these networks.
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
# About what an injection takes besides the fault's own duration: to deal them out evenly.
_OVERHEAD_S = 25.0
_TRIES = 2


def main() -> int:
    if "--lane" in sys.argv:
        namespaces.enter()
    args = _parse()
    chosen = [(target, fault) for fault, target in _all() if _wanted(args, target, fault)]
    timing = Timing(stop_s=args.stop_s, cut_s=args.cut_s)
    for name in _PROXIES:
        os.environ.pop(name, None)
        os.environ.pop(name.upper(), None)
    if args.lane is not None:
        asyncio.run(_run_lane(_deal(chosen, args.lanes, timing)[args.lane], timing, args))
        return 0
    if args.two_raylets:
        said = _two_raylets()
        if args.output:
            args.output.write_text(with_two_raylets(args.output.read_text(), said.text))
        return 0 if said.good else 1
    return _run_all(chosen, timing, args)


def _run_all(chosen: Sequence[tuple[Target, Fault]], timing: Timing, args: argparse.Namespace) -> int:
    """Lanes side by side, each a process; their results become one page."""
    reason = namespaces.why_not()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fm-", dir="/tmp") as scratch:
        model = args.model or Path(scratch) / "model"
        if args.model is None:
            _save_model(model)
        lanes = min(args.lanes, len(chosen))
        outputs = [Path(scratch) / f"{lane}.jsonl" for lane in range(lanes)]
        words = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--lanes", str(lanes), "--model", str(model)]
        running = [subprocess.Popen([*words, "--lane", str(lane), "--json", str(path)]) for lane, path in enumerate(outputs)]
        # Nothing may outlive this process; a lane's end is the end of all in its namespaces.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            codes = [process.wait() for process in running]
        finally:
            for process in running:
                process.kill()
        injections = [_from_json(line) for path in outputs if path.exists() for line in path.read_text().splitlines()]
    two_raylets = _two_raylets() if len(chosen) == len(list(_all())) else _Said("", True)
    done = {(injection.fault, injection.target) for injection in injections}
    injections += [
        Injection(fault=fault.value, target=target.title(fault), problem="not reached: its lane ended early")
        for target, fault in chosen
        if (fault.value, target.title(fault)) not in done
    ]
    order = {(fault.value, target.title(fault)): n for n, (fault, target) in enumerate(_all())}
    injections.sort(key=lambda injection: order[injection.fault, injection.target])
    seconds = time.monotonic() - begin
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    made = f"{now}, {os.cpu_count()} cores, SIGSTOP for {timing.stop_s:g} s, cuts of {timing.cut_s:g} s, {lanes} deployments side by side."
    if args.output:
        args.output.write_text(markdown(injections, timing, made=made, two_raylets=two_raylets.text, seconds=seconds))
    print(totals(injections, seconds))
    return 0 if not any(codes) and two_raylets.good and all(injection.good for injection in injections) else 1


class _Said(NamedTuple):
    text: str
    good: bool


def _two_raylets() -> _Said:
    """Runs the tests between two raylets and returns what they say."""
    said, good = [], True
    for script in ("two_raylets.py", "contract_on_two_raylets.py"):
        done = subprocess.run([sys.executable, str(Path(__file__).with_name(script))], stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, end="", flush=True)
        good = good and done.returncode == 0
        said += [line for line in done.stdout.splitlines() if line.strip() and "[100%]" not in line]
        if done.returncode:
            said.append(f"{script} FAILED with status {done.returncode}")
    return _Said("\n".join(said), good)


async def _run_lane(mine: Sequence[tuple[Target, Fault]], timing: Timing, args: argparse.Namespace) -> None:
    asker = Asker(ModelCard.load(args.model).vocab_size)
    system: FaultSystem | None = None
    try:
        for target, fault in mine:
            for attempt in range(_TRIES):
                try:
                    system = system or await _started(args.model, args.json.parent)
                    injection = await inject(system, target, fault, timing, asker)
                except (TimeoutError, AssertionError) as error:
                    injection = Injection(fault=fault.value, target=target.title(fault), problem=f"could not be done: {error}")
                _say(injection, args.lane)
                if system is not None and not injection.good:
                    # The next fault shall strike a healthy system.
                    _keep_logs(system, args.logs, f"{fault.name}-{target.name}-{attempt}".replace(" ", "-"))
                    await system.stop()
                    system = None
                if injection.cells:
                    break
            with args.json.open("a") as out:
                out.write(json.dumps(dataclasses.asdict(injection)) + "\n")
    finally:
        if system is not None:
            await system.stop()


async def _started(model: Path, parent: Path) -> FaultSystem:
    system = FaultSystem(model, parent=parent)
    try:
        await system.start()
    except BaseException:
        print(system.log_tails(), file=sys.stderr)
        await system.stop()
        raise
    return system


def _say(injection: Injection, lane: int) -> None:
    cells = ", ".join(f"{state} {o.status}{'!' * bool(o.num_wrong)} {o.seconds:.1f}" for state, o in injection.cells.items())
    recovered, whole = (f"{s:.1f}" if s is not None else "never" for s in (injection.recovered_s, injection.whole_s))
    held = "" if injection.held.nothing else f" HELD {injection.held}"
    print(
        f"[{lane}] {'ok  ' if injection.good else 'FAIL'} {injection.fault} {injection.target}: {cells}; "
        f"probes failed {injection.probes_failed} of {injection.num_probes} recovered {recovered} whole {whole} "
        f"in {injection.seconds:.0f} s{held} {injection.problem}",
        flush=True,
    )


def _keep_logs(system: FaultSystem, directory: Path | None, name: str) -> None:
    if directory is not None:
        (directory / name).mkdir(parents=True, exist_ok=True)
        for log in system.directory.glob("*.log"):
            (directory / name / log.name).write_bytes(log.read_bytes())


def _from_json(line: str) -> Injection:
    fields: dict[str, Any] = json.loads(line)
    fields["cells"] = {state: Outcome(**outcome) for state, outcome in fields["cells"].items()}
    fields["held"] = Held(**fields["held"])
    return Injection(**fields)


def _all() -> Iterator[tuple[Fault, Target]]:
    for fault in Fault:
        for target in TARGETS:
            if fault is not Fault.CUT or target.cut is not None:
                yield fault, target


def _wanted(args: argparse.Namespace, target: Target, fault: Fault) -> bool:
    return (not args.only or args.only == fault.value) and args.target in target.title(fault)


def _deal(chosen: Sequence[tuple[Target, Fault]], num_lanes: int, timing: Timing) -> list[list[tuple[Target, Fault]]]:
    """The longest first, each to the lane with the least to do."""
    lanes: list[list[tuple[Target, Fault]]] = [[] for _ in range(num_lanes)]
    load = [0.0] * num_lanes
    for target, fault in sorted(chosen, key=lambda pair: -timing.duration_s(pair[1])):
        lane = load.index(min(load))
        lanes[lane].append((target, fault))
        load[lane] += timing.duration_s(fault) + _OVERHEAD_S
    return lanes


def _save_model(directory: Path) -> None:
    """Runs in a process that ends, as it imports torch."""
    code = f"import sys; sys.path.insert(0, {str(_ROOT / 'tests')!r}); import tiny_models; from pathlib import Path\n"
    code += "tiny_models.save_tiny_model(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fault_matrix.py")
    parser.add_argument("--only", default="", choices=["", *(fault.value for fault in Fault)], help="one kind of fault")
    parser.add_argument("--target", default="", help="only targets whose name has this in it")
    parser.add_argument("--stop-s", type=float, default=Timing().stop_s, help="how long SIGSTOP lasts")
    parser.add_argument("--cut-s", type=float, default=Timing().cut_s, help="how long a network is cut")
    parser.add_argument("--lanes", type=int, default=3, help="deployments side by side")
    parser.add_argument("--output", type=Path, help="the page to write")
    parser.add_argument("--logs", type=Path, help="where the logs of systems that failed are kept")
    parser.add_argument("--two-raylets", action="store_true", help="only these tests; in an existing --output their section is replaced")
    parser.add_argument("--model", type=Path, help="a model directory; a small one is made if not given")
    for internal in ("--lane", "--json"):
        parser.add_argument(internal, type=int if internal == "--lane" else Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
