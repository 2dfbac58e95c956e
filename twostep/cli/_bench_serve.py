"""`twostep bench serve`: flags to a load, runs, tables and files."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import os
import sys
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from twostep.cli import INTERRUPTED
from twostep.cli._terminal import Terminal, clipped
from twostep.errors import InvalidRequest, SetupError
from twostep.extras import install
from twostep.lab.bench.serve import lengths, report
from twostep.lab.bench.serve.arrivals import Arrivals
from twostep.lab.bench.serve.load import ServeLoad, TraceTimes, Users
from twostep.lab.bench.serve.metrics import LatencyTargets
from twostep.lab.bench.serve.page import PageRun, page
from twostep.lab.bench.serve.runner import Extent, RunProgress
from twostep.lab.bench.serve.summary import summarize
from twostep.lab.bench.serve.sweep import Doom, Search, Tried, knee
from twostep.lab.bench.serve.target import RouterTarget, TargetModel, TargetOptions
from twostep.lab.bench.serve.workloads import (
    MAX_TURNS,
    MultiTurn,
    QuotingPrompts,
    RandomPrompts,
    RequestTrace,
    SharedPrefixPrompts,
    Workload,
    read_trace,
)
from twostep.rpc import event_loop
from twostep.settings.tls import TlsFiles

# Requests that leave later than this after their time are warned of: they are not the load that was asked for.
_MAX_SLIP_S = 0.010
_DEFAULT_DURATION_S = 60.0
# Requests that a sweep is always content with at each rate, however high the --attainment.
_MOST_NEEDED = 100
# Mean prompt and answer where --input-tokens and --output-tokens are not given.
_DEFAULT_LENGTHS = {
    "fixed": (512, 128),
    "normal": (2600, 128),
    "shared-prefix": (128, 128),
    "multi-turn": (128, 128),
    "quoting": (128, 128),
}
_ABOVE_0 = ("input_tokens", "output_tokens", "trace_speed", "duration", "num_requests", "concurrency", "timeout")
_AT_LEAST_0 = ("warmup", "think_time", "spread", "max_model_len", "vocab_size", "temperature")
_DRAW_EVERY_S, _LINE_EVERY_S = 0.25, 10.0
# What says nothing of the figures, or is a secret.
_NO_SETTINGS = {"command", "kind", "json", "output", "save_requests", "plots", "page", "api_key", "tls_ca", "tls_cert", "tls_key"}


def run(args: argparse.Namespace) -> int:
    _check_numbers(args)
    session = _Session(args=args, targets=_targets(args), num_gpus=_gpus(args.gpus))
    arrivals = _arrivals(args)
    workload = _workload(args)
    if args.plots and importlib.util.find_spec("matplotlib") is None:
        raise SetupError(f"--plots needs matplotlib; leave it out and draw from --output elsewhere, or {install('bench')}")
    for path in (args.output, args.save_requests, args.page):
        if path is not None and not path.parent.is_dir():
            raise SetupError(f"{path.parent} is not a folder; make it, or give another file")
    return event_loop.run(session.run(arrivals, workload))


@dataclass(slots=True, kw_only=True)
class _Session:
    """One command: its runs, and where they are told."""

    args: argparse.Namespace
    targets: LatencyTargets
    num_gpus: int | None
    points: list[report.Point] = field(default_factory=list)

    async def run(self, arrivals: Arrivals | Users | TraceTimes, workload: Workload) -> int:
        args = self.args
        load = ServeLoad(
            workload=workload,
            arrivals=arrivals,
            extent=_extent(args, arrivals, workload),
            seed=args.seed,
            max_model_len=args.max_model_len,
        )
        rates = _rates(args)
        # Wrong rates are refused before the first has run for a minute.
        loads = [load.at_rate(rate) for rate in rates] if args.sweep or len(rates) > 1 else [load]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            target = _target(args, self.targets)
        for warning in caught:
            print(f"twostep: {warning.message}", file=sys.stderr)
        try:
            served = await target.open()
            if args.sweep:
                await self._sweep(target, served, load)
            else:
                for at_rate in loads:
                    await self._point(target, served, at_rate)
                    if self._interrupted:
                        break
        finally:
            await target.close()
        best = self._knee()
        if args.json:
            print(self._document(served))
        elif len(self.points) > 1:
            print()
            print(report.sweep_table(self.points, best, args.attainment))
        if args.plots:
            from twostep.lab.bench.serve import plots  # noqa: PLC0415 - needs matplotlib

            path = plots.draw(self.points, best, self.targets, args.plots, title=served.model, attainment=args.attainment)
            print(f"drawn: {path}", file=sys.stderr)
        if args.page:
            runs = [PageRun(label=p.label, records=p.result.records, summary=p.summary, targets=self.targets) for p in self.points]
            args.page.write_text(page(runs, f"{served.model} under load", self._about()), encoding="utf-8")
            print(f"drawn: {args.page}", file=sys.stderr)
        if self._interrupted:
            return INTERRUPTED
        # A run in which nothing was answered has measured nothing.
        return 0 if any(p.summary.num_completed for p in self.points) else 1

    async def _sweep(self, target: RouterTarget, served: TargetModel, load: ServeLoad) -> None:
        search = Search(first=load.rate or 1.0)
        tried: list[Tried] = []
        while (rate := search.next_rate(tried)) is not None:
            point = await self._point(target, served, load.at_rate(rate))
            if self._interrupted:
                break
            passed = self._passed(point)
            if passed and report.is_burst(point):
                print(f"twostep: {rate:.4g} requests/s and more are not judged: {report.BURST}", file=sys.stderr, flush=True)
                break
            tried.append(Tried(rate, passed))
            if not self.args.json:
                print(f"  {rate:.4g} requests/s: {'kept' if tried[-1].passed else 'not kept'}\n", flush=True)

    async def _point(self, target: RouterTarget, served: TargetModel, load: ServeLoad) -> report.Point:
        """One run, shown and saved."""
        args, number, progress = self.args, len(self.points), RunProgress()
        async with _shown(load.label, load.extent, progress, wanted=not args.json):
            expected = load.num_measured() if args.sweep else None
            doom = None if expected is None else Doom(self.targets, args.attainment, expected)
            result, windows = await load.put_on(target, served, f"{number}", progress, doom)
        summary = summarize(result.records, windows, targets=self.targets, num_gpus=self.num_gpus)
        measured_s = windows.arrivals.length_s if self.targets else None
        doubts = report.warnings_of(result, summary, max_slip_s=_MAX_SLIP_S, measured_s=measured_s)
        point = report.Point(label=load.label, rate=load.rate, result=result, summary=summary, warnings=doubts)
        self.points.append(point)
        if args.save_requests:
            rate = load.rate if load.rate is not None and math.isfinite(load.rate) else None
            with args.save_requests.open("a" if number else "w") as file:
                for record in result.records:
                    file.write(json.dumps({"rate": rate, **record.as_json()}, allow_nan=False) + "\n")
        if args.output:
            # After every run: an interrupted sweep has what it found.
            args.output.write_text(self._document(served) + "\n")
        if not args.json:
            print(report.table(point, self.targets), flush=True)
        return point

    @property
    def _interrupted(self) -> bool:
        return bool(self.points) and self.points[-1].result.interrupted

    def _about(self) -> str:
        args = self.args
        return f"{args.workload}, seed {args.seed}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. Targets: {self.targets or 'none'}."

    def _passed(self, point: report.Point) -> bool:
        good = point.summary.goodput
        return good is not None and good.attainment >= self.args.attainment

    def _knee(self) -> report.Point | None:
        if len(self.points) < 2:
            return None
        judged = [p for p in self.points if not (self.args.sweep and report.is_burst(p))]
        best = knee([Tried(p.rate, self._passed(p)) for p in judged if p.rate is not None])
        return next((p for p in self.points if p.rate == best and best is not None), None)

    def _document(self, served: TargetModel) -> str:
        given = {
            name: str(value) if hasattr(value, "parts") else value for name, value in vars(self.args).items() if name not in _NO_SETTINGS
        }
        settings = given | {"served_model": served.model, "served_max_model_len": served.max_model_len}
        return json.dumps(report.as_json(self.points, self._knee(), settings), indent=2, allow_nan=False)


# ---- from flags to what they say ------------------------------------------------------------------------------------------


def _check_numbers(args: argparse.Namespace) -> None:
    for names, least in ((_ABOVE_0, "above 0"), (_AT_LEAST_0, "of 0 or more")):
        for name in names:
            value = getattr(args, name)
            if value is not None and not (math.isfinite(value) and (value > 0 or (value == 0 and names is _AT_LEAST_0))):
                raise InvalidRequest(f"--{name.replace('_', '-')} {value:g}: give a number {least}")
    if not 0 < args.attainment <= 1:
        raise InvalidRequest(f"--attainment {args.attainment:g}: give a share above 0 and up to 1, as 0.95")


def _targets(args: argparse.Namespace) -> LatencyTargets:
    targets = LatencyTargets.parse(args.goodput)
    if args.sweep and not targets:
        raise InvalidRequest("--sweep needs targets to keep: give --goodput, as in --goodput ttft:500 tpot:30")
    least = min(_MOST_NEEDED, math.ceil(1 / max(1e-9, 1 - args.attainment)))
    if args.sweep and args.num_requests is not None and args.num_requests < least:
        raise InvalidRequest(
            f"--sweep with --num-requests {args.num_requests:g}: one late answer would decide each rate; give {least} or more, so that "
            f"--attainment {args.attainment:g} allows one"
        )
    if args.send_targets and targets.ttft_ms is None and targets.tpot_ms is None and targets.gap_ms is None:
        raise InvalidRequest("--send-targets tells the router ttft, tpot and gap of --goodput: give at least one of these")
    return targets


def _gpus(text: str | None) -> int | None:
    if text is None:
        return None
    parts = text.split("+")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts) or not sum(map(int, parts)):
        raise InvalidRequest(f"--gpus {text}: give a number above 0, or those of prefill and of decode workers, as 1+3")
    return sum(map(int, parts))


def _target(args: argparse.Namespace, targets: LatencyTargets) -> RouterTarget:
    """Connects to nothing yet."""
    if args.target.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"--target {args.target}: give host:port of a router's gRPC port; OpenAI-compatible servers are loaded by "
            "`vllm bench serve --base-url` or GuideLLM"
        )
    return RouterTarget(
        TargetOptions(
            targets=tuple(t.strip() for t in args.target.split(",")),
            model=args.model,
            api_key=args.api_key,
            tls=TlsFiles(ca=args.tls_ca, cert=args.tls_cert, key=args.tls_key),
            timeout_s=args.timeout,
            temperature=args.temperature,
            vocab_size=args.vocab_size,
            request_class=args.request_class,
            ttft_ms=targets.ttft_ms if args.send_targets else None,
            tpot_ms=targets.tpot_ms if args.send_targets else None,
            gap_ms=targets.gap_ms if args.send_targets else None,
            tenant=args.tenant,
            text=_text(args.dataset_path) if args.workload == "quoting" else "",
        )
    )


def _rates(args: argparse.Namespace) -> list[float]:
    """Returns the rates of --rate, one run for each; none: it was not given."""
    try:
        rates = [float(rate) for rate in args.rate.split(",")] if args.rate else []
    except ValueError as error:
        raise InvalidRequest(f"--rate {args.rate!r}: give a number, or several with commas between them, as in 4,6,8") from error
    if args.sweep and len(rates) > 1:
        raise InvalidRequest("several --rate say which rates to run, --sweep finds one: give one rate, or leave --sweep out")
    return rates


def _arrivals(args: argparse.Namespace) -> Arrivals | Users | TraceTimes:
    rates = _rates(args)
    if args.concurrency is not None:
        if rates or args.sweep:
            raise InvalidRequest("users that wait for their answers have no rate: leave out --rate and --sweep, or --concurrency")
        return Users(args.concurrency)
    if args.workload == "mooncake" and not rates:
        if args.sweep:
            raise InvalidRequest("a trace's own times have no rate to vary: give --rate, or leave --sweep out")
        return TraceTimes(args.trace_speed or 1.0)
    if args.trace_speed is not None:
        raise InvalidRequest("--trace-speed is for a trace's own times: leave out --rate and --concurrency")
    return Arrivals(rate=rates[0] if rates else 1.0)


def _extent(args: argparse.Namespace, arrivals: Arrivals | Users | TraceTimes, workload: Workload) -> Extent:
    """A trace at its own times is run to its end unless something else is said."""
    if args.num_requests is not None and args.duration is not None:
        raise InvalidRequest("--num-requests and --duration both end the run: give one of the two")
    duration, num_requests = args.duration or 0.0, args.num_requests or 0
    if not duration and not num_requests:
        if isinstance(arrivals, TraceTimes) and isinstance(workload, RequestTrace):
            num_requests = len(workload.requests)
        else:
            duration = _DEFAULT_DURATION_S
    return Extent(duration_s=duration, num_requests=num_requests, warmup_s=args.warmup)


def _workload(args: argparse.Namespace) -> Workload:
    name, spread = args.workload, args.spread / 100
    if name != "quoting" and (args.dataset_path is not None) != (name == "mooncake"):
        raise InvalidRequest(
            "--workload mooncake is read from a file, quoting may be, and nothing else is: give both that and --dataset-path, or neither"
        )
    if name == "quoting" and args.max_model_len:
        raise InvalidRequest("--max-model-len would cut off what is asked for: give --workload quoting fewer --input-tokens")
    prefix_tokens, num_prefixes = _prefix(args.prefix_tokens)
    mean_prompt, mean_output = _DEFAULT_LENGTHS.get(name, (1, 1))
    prompt = lengths.Normal(args.input_tokens or mean_prompt, spread)
    output = lengths.Normal(args.output_tokens or mean_output, spread)
    fixed_output: lengths.Lengths | None = lengths.Fixed(args.output_tokens) if args.output_tokens else None
    match name:
        case "mooncake":
            return read_trace(args.dataset_path)
        case "fixed":
            return RandomPrompts(prompt=replace(prompt, spread=0.0), output=replace(output, spread=0.0))
        case "document":
            return RandomPrompts(prompt=lengths.DOCUMENT_PROMPT, output=fixed_output or lengths.DOCUMENT_OUTPUT)
        case "sharegpt":
            return RandomPrompts(prompt=lengths.SHAREGPT_PROMPT, output=fixed_output or lengths.SHAREGPT_OUTPUT)
        case "shared-prefix":
            return SharedPrefixPrompts(prefix_tokens=prefix_tokens or 1024, num_prefixes=num_prefixes, suffix=prompt, output=output)
        case "quoting":
            return QuotingPrompts(passage=prompt, output=output if args.output_tokens else None)
        case "multi-turn":
            return MultiTurn(
                turns=_turns(args.turns), message=prompt, output=output, system_tokens=prefix_tokens or 0, think_s=args.think_time
            )
    return RandomPrompts(prompt=prompt, output=output)


def _text(path: Path | None) -> str:
    """Returns the text whose passages are quoted: the one that `twostep bench quality` reads, unless a file is given."""
    source = Path(__file__).parents[1] / "lab" / "bench" / "quality.txt" if path is None else path
    try:
        return source.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{source} cannot be read ({error}); give a text as --dataset-path") from error


def _prefix(text: str | None) -> tuple[int | None, int]:
    """Returns the length of shared prefixes, if it was told, and how many there are. Raises InvalidRequest."""
    if text is None:
        return None, 1
    length, _, number = text.partition("x")
    if not all(part.isdecimal() and int(part) for part in (length, number or "1")):
        raise InvalidRequest(f"--prefix-tokens {text}: give a number above 0, or 1024x8 for eight different prefixes")
    return int(length), int(number or 1)


def _turns(text: str) -> lengths.Lengths:
    low, _, high = text.partition(":")
    try:
        turns = lengths.Uniform(int(low), int(high or low))
    except ValueError as error:
        raise InvalidRequest(f"--turns {text!r}: give a number, or the least and the most with a colon between them") from error
    if turns.high > MAX_TURNS:
        raise InvalidRequest(f"--turns {text!r}: conversations have {MAX_TURNS} turns at most")
    return turns


# ---- progress on standard error ---------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _shown(label: str, extent: Extent, progress: RunProgress, *, wanted: bool) -> AsyncIterator[None]:
    """Shows `progress` while the body runs: at a terminal one line that is drawn anew, else a line now and then."""
    if not wanted:
        yield
        return
    terminal = Terminal.of(sys.stderr, os.environ)
    task = asyncio.create_task(_follow(terminal, label, extent, progress))
    try:
        yield
    finally:
        task.cancel()
        terminal.write("\r\x1b[K" if terminal.live else "")


def progress_line(label: str, extent: Extent, progress: RunProgress) -> str:
    """Returns how far a run is: the seconds of its load, or requests that ended; once nothing more comes, how long it has waited since."""
    failed = f", {progress.num_failed} failed" if progress.num_failed else ""
    doing = f"{progress.in_flight} under way"
    if not extent.duration_s:
        done = f"{progress.num_ended}/{extent.num_requests}"
    else:
        done = f"{min(progress.elapsed_s, extent.end_s):.0f}/{extent.end_s:.0f} s"
    if progress.none_to_come:
        waited = f" for {progress.elapsed_s - extent.end_s:.0f} s" if progress.elapsed_s > extent.end_s else ""
        doing = f"waiting{waited} for the last {progress.in_flight} answers"
    return f"{label}: {done}, {progress.num_sent} sent, {doing}{failed}"


async def _follow(terminal: Terminal, label: str, extent: Extent, progress: RunProgress) -> None:
    while True:
        await asyncio.sleep(_DRAW_EVERY_S if terminal.live else _LINE_EVERY_S)
        line = progress_line(label, extent, progress)
        terminal.write(f"\r\x1b[K{clipped(line, terminal.size().columns - 1)}" if terminal.live else f"{line}\n")
