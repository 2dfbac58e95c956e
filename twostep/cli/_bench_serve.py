"""`twostep bench serve`: flags to a load, runs, tables and files."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from twostep.cli._bench_load import check_flags, load_of, rates_of, target_of
from twostep.cli._bench_progress import shown
from twostep.errors import InvalidRequest, SetupError
from twostep.lab.bench.serve import report
from twostep.lab.bench.serve.load import ServeLoad
from twostep.lab.bench.serve.metrics import LatencyTargets, Prices
from twostep.lab.bench.serve.runner import RunProgress
from twostep.lab.bench.serve.summary import summarize
from twostep.lab.bench.serve.sweep import Doom, Search, Tried, knee
from twostep.lab.bench.serve.target import LoadTarget, TargetModel
from twostep.rpc import event_loop

# A sweep stops when it is this near to the highest rate that keeps the targets, or after so many runs.
_SWEEP_RESOLUTION, _SWEEP_POINTS = 0.05, 16
# Requests that leave later than this after their time are warned of: they are not the load that was asked for.
_MAX_SLIP_S = 0.010


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    targets: LatencyTargets
    num_gpus: int | None
    prices: Prices | None
    attainment: float
    max_slip_s: float


def run(args: argparse.Namespace) -> int:
    check_flags(args)
    judgement = _judgement(args)
    if args.plots and importlib.util.find_spec("matplotlib") is None:
        raise SetupError("--plots needs matplotlib; pip install 'twostep[bench]', or leave it out and draw from --output elsewhere")
    for path in (args.output, args.save_requests):
        if path is not None and not path.parent.is_dir():
            raise SetupError(f"{path.parent} is not a folder; make it, or give another file")
    # A full garbage collection would be a pause of this process that looks like one of all streams: there is none while it runs.
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], 1 << 30)
    try:
        return event_loop.run(_main(args, judgement))
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _main(args: argparse.Namespace, judgement: Judgement) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        target = target_of(args, judgement.targets)
    for warning in caught:
        print(f"twostep: {warning.message}", file=sys.stderr)
    try:
        served = await target.open()
        load = await load_of(args, target, served)
        rates = _rates(args, load)
        points = []
        if args.sweep:
            points = await _sweep(args, target, served, load, judgement)
        else:
            for number, rate in enumerate(rates):
                at_rate = load if rate is None else load.at_rate(rate)
                points.append(await _point(args, target, served, at_rate, number, judgement))
                _write(args, served, points, judgement)
    finally:
        await target.close()
    best = _knee(points, judgement)
    if len(points) > 1 and not args.json:
        print()
        print(report.sweep_table(points, best, judgement.attainment))
    if args.json:
        print(_document(args, served, points, judgement))
    if args.plots:
        # Needs matplotlib.
        from twostep.lab.bench.serve import plots  # noqa: PLC0415

        for path in plots.draw(points, best, judgement.targets, args.plots, title=served.model, attainment=judgement.attainment):
            print(f"drawn: {path}", file=sys.stderr)
    # A run in which nothing was answered has measured nothing.
    return 0 if any(p.summary.num_completed for p in points) else 1


async def _point(
    args: argparse.Namespace, target: LoadTarget, served: TargetModel, load: ServeLoad, number: int, judgement: Judgement
) -> report.Point:
    """One run, shown and saved."""
    progress = RunProgress()
    async with shown(load.label, load.extent, progress, wanted=not args.json):
        expected = load.num_measured() if args.sweep else None
        doom = None if expected is None else Doom(judgement.targets, judgement.attainment, expected)
        result, windows = await load.put_on(target, served, f"{number}", progress, doom)
    summary = summarize(result.records, windows, targets=judgement.targets, num_gpus=judgement.num_gpus, prices=judgement.prices)
    doubts = report.warnings_of(
        result, summary, max_slip_s=judgement.max_slip_s, measured_s=windows.arrivals.length_s if judgement.targets else None
    )
    point = report.Point(label=load.label, rate=load.rate, result=result, summary=summary, warnings=doubts)
    if args.save_requests:
        rate = load.rate if load.rate is not None and math.isfinite(load.rate) else None
        with args.save_requests.open("a" if number else "w") as file:
            for record in result.records:
                file.write(json.dumps({"rate": rate, **record.as_json()}, allow_nan=False) + "\n")
    if not args.json:
        print(report.table(point, judgement.targets), flush=True)
    return point


def _document(args: argparse.Namespace, served: TargetModel, points: list[report.Point], judgement: Judgement) -> str:
    return json.dumps(report.as_json(points, _knee(points, judgement), _settings(args, served)), indent=2, allow_nan=False)


def _write(args: argparse.Namespace, served: TargetModel, points: list[report.Point], judgement: Judgement) -> None:
    """After every run: an interrupted sweep has what it found."""
    if args.output:
        args.output.write_text(_document(args, served, points, judgement) + "\n")


async def _sweep(
    args: argparse.Namespace, target: LoadTarget, served: TargetModel, load: ServeLoad, judgement: Judgement
) -> list[report.Point]:
    search = Search(first=load.rate or 1.0, resolution=_SWEEP_RESOLUTION, max_points=_SWEEP_POINTS)
    points: list[report.Point] = []
    tried: list[Tried] = []
    while (rate := search.next_rate(tried)) is not None:
        points.append(await _point(args, target, served, load.at_rate(rate), len(points), judgement))
        tried.append(Tried(rate, _passed(points[-1], judgement)))
        _write(args, served, points, judgement)
        if not args.json:
            print(f"  {rate:.4g} requests/s: {'kept' if tried[-1].passed else 'not kept'}\n", flush=True)
    return points


def _passed(point: report.Point, judgement: Judgement) -> bool:
    good = point.summary.goodput
    return good is not None and good.attainment >= judgement.attainment


def _knee(points: list[report.Point], judgement: Judgement) -> report.Point | None:
    if len(points) < 2:
        return None
    best = knee([Tried(p.rate, _passed(p, judgement)) for p in points if p.rate is not None])
    return next((p for p in points if p.rate == best and best is not None), None)


def _rates(args: argparse.Namespace, load: ServeLoad) -> list[float | None]:
    """None: as the load is."""
    rates = rates_of(args)
    if len(rates) < 2:
        return [None]
    if args.sweep:
        raise InvalidRequest("several --rate say which rates to run, --sweep finds one: give one rate, or leave --sweep out")
    for rate in rates:
        # Wrong ones are refused before the first has run for a minute.
        load.at_rate(rate)
    return [*rates]


def _gpus(text: str | None) -> tuple[int, int, int]:
    """Returns the GPUs of --gpus in all, of prefill and of decode workers; the last two are 0 where they are not told."""
    parts = (text or "0").split("+")
    numbers = [int(part) for part in parts if part.isdecimal()]
    if text is not None and (len(numbers) != len(parts) or len(parts) > 2 or not any(numbers)):
        raise InvalidRequest(f"--gpus {text}: give a number above 0, or those of prefill and of decode workers, as 1+3")
    return sum(numbers), numbers[0] if len(numbers) == 2 else 0, numbers[1] if len(numbers) == 2 else 0


def _prices(text: str, prefill_gpus: int, decode_gpus: int) -> Prices:
    try:
        of_prefill, of_decode = map(float, text.split(",") * (1 if "," in text else 2))
    except ValueError:
        of_prefill = of_decode = -1.0
    if not (0 <= of_prefill < math.inf and 0 <= of_decode < math.inf):
        raise InvalidRequest(f"--gpu-hour-price {text}: give a number of 0 or more, or two behind a comma")
    if prefill_gpus + decode_gpus < 1:
        raise InvalidRequest("--gpu-hour-price needs --gpus of prefill and of decode workers, as 1+3")
    return Prices(prefill_gpus=prefill_gpus, decode_gpus=decode_gpus, prefill_gpu_hour=of_prefill, decode_gpu_hour=of_decode)


def _judgement(args: argparse.Namespace) -> Judgement:
    targets = LatencyTargets.parse(args.goodput)
    if args.sweep and not targets:
        raise InvalidRequest("--sweep needs targets to keep: give --goodput, as in --goodput ttft:500 tpot:30")
    if args.send_targets and targets.ttft_ms is None and targets.tpot_ms is None:
        raise InvalidRequest("--send-targets tells the router ttft and tpot of --goodput: give at least one of these")
    if not 0 < args.attainment <= 1:
        raise InvalidRequest(f"--attainment {args.attainment:g}: give a share above 0 and up to 1, as 0.95")
    num_gpus, prefill_gpus, decode_gpus = _gpus(args.gpus)
    prices = _prices(args.gpu_hour_price, prefill_gpus, decode_gpus) if args.gpu_hour_price is not None else None
    return Judgement(
        targets=targets,
        num_gpus=num_gpus or None,
        prices=prices,
        attainment=args.attainment,
        max_slip_s=_MAX_SLIP_S,
    )


def _settings(args: argparse.Namespace, served: TargetModel) -> dict[str, Any]:
    """Everything that the figures depend on; no secrets."""
    hidden = {"command", "kind", "json", "output", "save_requests", "plots", "api_key", "tls_ca", "tls_cert", "tls_key"}
    given = {name: str(value) if hasattr(value, "parts") else value for name, value in vars(args).items() if name not in hidden}
    return given | {"served_model": served.model, "served_max_model_len": served.max_model_len}
