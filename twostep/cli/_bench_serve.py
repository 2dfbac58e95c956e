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

from twostep.cli._bench_load import check_flags, load_of, target_of
from twostep.cli._bench_progress import shown
from twostep.errors import InvalidRequest, SetupError
from twostep.lab.bench.serve import report
from twostep.lab.bench.serve.load import ServeLoad
from twostep.lab.bench.serve.metrics import LatencyTargets, Prices
from twostep.lab.bench.serve.runner import RunProgress
from twostep.lab.bench.serve.summary import summarize
from twostep.lab.bench.serve.sweep import Doom, Search, Tried, knee
from twostep.lab.bench.serve.target import LoadTarget, ServedModel
from twostep.rpc import event_loop


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
        if args.stop_early and load.num_measured() is None:
            raise InvalidRequest("--stop-early needs to know how many requests will come: leave it out for users and conversations")
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
        plots = importlib.import_module("twostep.lab.bench.serve.plots")
        for path in plots.draw(
            points, best, judgement.targets, args.plots, title=args.title or served.model, attainment=judgement.attainment
        ):
            print(f"drawn: {path}", file=sys.stderr)
    # A run in which nothing was answered has measured nothing.
    return 0 if any(p.summary.num_completed for p in points) else 1


async def _point(
    args: argparse.Namespace, target: LoadTarget, served: ServedModel, load: ServeLoad, number: int, judgement: Judgement
) -> report.Point:
    """One run, shown and saved."""
    progress = RunProgress()
    async with shown(load.label, load.extent, progress, wanted=not args.no_progress and not args.json):
        expected = load.num_measured() if args.stop_early else None
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


def _document(args: argparse.Namespace, served: ServedModel, points: list[report.Point], judgement: Judgement) -> str:
    return json.dumps(report.as_json(points, _knee(points, judgement), _settings(args, served)), indent=2, allow_nan=False)


def _write(args: argparse.Namespace, served: ServedModel, points: list[report.Point], judgement: Judgement) -> None:
    """After every run: an interrupted sweep has what it found."""
    if args.output:
        args.output.write_text(_document(args, served, points, judgement) + "\n")


async def _sweep(
    args: argparse.Namespace, target: LoadTarget, served: ServedModel, load: ServeLoad, judgement: Judgement
) -> list[report.Point]:
    search = Search(first=load.rate or 1.0, resolution=args.sweep_resolution, max_points=args.sweep_points)
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
    if not args.rates:
        return [None]
    if args.sweep:
        raise InvalidRequest("--rates says which rates to run, --sweep finds one: give one of the two")
    try:
        rates: list[float | None] = [float(rate) for rate in args.rates.split(",")]
    except ValueError as error:
        raise InvalidRequest(f"--rates {args.rates!r}: give numbers with commas between them, as in 4,6,8") from error
    for rate in rates:
        # Wrong ones are refused before the first has run for a minute.
        load.at_rate(rate or 0.0)
    return rates


def _judgement(args: argparse.Namespace) -> Judgement:
    targets = LatencyTargets.parse(args.goodput)
    if args.sweep and not targets:
        raise InvalidRequest("--sweep needs targets to keep: give --goodput, as in --goodput ttft:500 tpot:30")
    if args.send_targets and targets.ttft_ms is None and targets.tpot_ms is None:
        raise InvalidRequest("--send-targets tells the router ttft and tpot of --goodput: give at least one of these")
    if args.stop_early and not targets:
        raise InvalidRequest("--stop-early ends what can no longer keep its targets: give --goodput")
    if not 0 < args.attainment <= 1:
        raise InvalidRequest(f"--attainment {args.attainment:g}: give a share above 0 and up to 1, as 0.95")
    prices = None
    if args.gpu_hour_price is not None:
        if args.prefill_gpus + args.decode_gpus < 1:
            raise InvalidRequest("--gpu-hour-price needs --prefill-gpus and --decode-gpus")
        decode = args.gpu_hour_price if args.decode_gpu_hour_price is None else args.decode_gpu_hour_price
        prices = Prices(
            prefill_gpus=args.prefill_gpus, decode_gpus=args.decode_gpus, prefill_gpu_hour=args.gpu_hour_price, decode_gpu_hour=decode
        )
    return Judgement(
        targets=targets,
        num_gpus=args.num_gpus or (args.prefill_gpus + args.decode_gpus) or None,
        prices=prices,
        attainment=args.attainment,
        max_slip_s=args.max_slip_ms / 1e3,
    )


def _settings(args: argparse.Namespace, served: ServedModel) -> dict[str, Any]:
    """Everything that the figures depend on; no secrets."""
    hidden = {"command", "kind", "json", "output", "save_requests", "plots", "no_progress", "api_key", "tls_ca", "tls_cert", "tls_key"}
    given = {name: str(value) if hasattr(value, "parts") else value for name, value in vars(args).items() if name not in hidden}
    return given | {"served_model": served.model, "served_max_model_len": served.max_model_len}
