"""One trace as a picture: the load, each contestant's workers over the time, and whose requests were kept. Needs matplotlib; draws
without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from twostep.autoscaler.model import ROLES, PolicyConfig, Role
from twostep.lab.simulation.outcome import Moment, ScalingOutcome
from twostep.lab.simulation.results import OutcomeRow

# Apart for colour-blind readers as well (Okabe and Ito, 2008).
_COLOURS: dict[Role, str] = {"prefill": "#0072B2", "decode": "#E69F00"}
_LINES = ("#009E73", "#D55E00", "#767676", "#CC79A7")
_GREY = "#767676"
_MAX_CONTESTANTS = 3
_DPI = 110
# Attainment is drawn as a mean over so many intervals.
_SMOOTH = 4


def draw(outcomes: Sequence[ScalingOutcome], policy: PolicyConfig, path: Path, *, title: str) -> Path:
    """The first few of `outcomes`, which are of one trace and seed. Makes the folder."""
    shown = outcomes[:_MAX_CONTESTANTS]
    figure = Figure(figsize=(10, 3.2 + 2.1 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(len(shown) + 2, 1, sharex=True, height_ratios=[1, *[1.5] * len(shown), 1.2], squeeze=False)
    axes: list[Axes] = list(panels[:, 0])
    _load(axes[0], shown[0].moments)
    most = max(sum(moment.pods.values()) for one in shown for moment in one.moments)
    for axis, one in zip(axes[1:-1], shown, strict=True):
        _workers(axis, one, most)
    _kept(axes[-1], shown, policy)
    losses = shown[0].losses
    for axis in axes:
        for at, _ in losses:
            axis.axvline(at / 60, color=_GREY, lw=0.8, ls=":")
        axis.grid(axis="y", color="0.9", lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    for at, role in losses:
        axes[0].annotate(f" {role} worker lost", (at / 60, 0), fontsize=7.5, color=_GREY, va="bottom")
    axes[-1].set_xlabel("minutes")
    axes[-1].set_xlim(0, shown[0].moments[-1].at_s / 60)
    figure.suptitle(
        f"Trace “{title}”, simulated: load, workers, and requests that kept TTFT ≤ {policy.ttft_ms:g} and TPOT ≤ {policy.tpot_ms:g} ms",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    return path


def draw_costs(lines: Sequence[OutcomeRow], policy: PolicyConfig, path: Path, *, title: str) -> Path:
    """What each contestant kept, and for how many GPU-hours: means over the seeds. HPAs by their decode metric."""
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    kinds = (
        ("decode seats", "HPAs, decode on running sequences", "s", _LINES[2]),
        ("decode pool", "HPAs, decode on KV in use", "o", _COLOURS["prefill"]),
    )
    for word, label, marker, colour in kinds:
        found = [line for line in lines if line.name.startswith("HPAs") and word in line.name]
        if found:
            hours, kept = [line.gpu_hours for line in found], [line.attainment for line in found]
            axis.scatter(hours, kept, marker=marker, s=26, color=colour, label=label)
    others = [line for line in lines if not line.name.startswith("HPAs")]
    for line, colour, marker in zip(others, (_LINES[1], _LINES[0], _LINES[3], "0.2"), "*DXP", strict=False):
        axis.scatter(
            [line.gpu_hours],
            [line.attainment],
            marker=marker,
            s=130 if marker == "*" else 50,
            color=colour,
            label=line.name.split(", HPA")[0],
            zorder=3,
        )
    axis.axhline(policy.attainment, color=_GREY, lw=0.8, ls="--")
    axis.set_xlabel("GPU-hours")
    axis.set_ylabel("share of requests kept")
    axis.grid(color="0.9", lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    axis.set_title(f"Trace “{title}”, simulated: what was kept for how much", fontsize=10.5, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    return path


def _load(axis: Axes, moments: Sequence[Moment]) -> None:
    axis.plot([m.at_s / 60 for m in moments], [m.requests_per_s for m in moments], color="0.2", lw=1.4)
    axis.set_ylabel("requests/s")
    axis.set_ylim(bottom=0)


def _workers(axis: Axes, one: ScalingOutcome, most: int) -> None:
    minutes = [m.at_s / 60 for m in one.moments]
    below = [0] * len(minutes)
    for role in ROLES:
        top = [b + m.serving[role] for b, m in zip(below, one.moments, strict=True)]
        axis.fill_between(minutes, below, top, step="post", color=_COLOURS[role], alpha=0.45, lw=0, label=f"{role} workers that serve")
        below = top
    axis.step(minutes, [sum(m.pods.values()) for m in one.moments], where="post", color="0.2", lw=1.0, label="pods that are paid")
    axis.set_ylim(0, most + 2)
    axis.set_ylabel("workers")
    axis.set_title(f"{one.name}: {one.attainment:.1%} kept, {one.gpu_hours:.1f} GPU-hours", fontsize=9.5, loc="left")
    axis.legend(loc="upper right", fontsize=7.5, frameon=False, ncols=3)


def _kept(axis: Axes, shown: Sequence[ScalingOutcome], policy: PolicyConfig) -> None:
    for colour, one in zip(_LINES, shown, strict=False):
        shares = [1.0 if share is None else share for share in one.kept_shares]
        smooth = [sum(shares[i : i + _SMOOTH]) / len(shares[i : i + _SMOOTH]) for i in range(0, len(shares), _SMOOTH)]
        minutes = [i * _SMOOTH * policy.interval_s / 60 for i in range(len(smooth))]
        axis.step(minutes, smooth, where="post", color=colour, lw=1.3, label=one.name)
    axis.axhline(policy.attainment, color=_GREY, lw=0.8, ls="--")
    axis.set_ylim(-0.03, 1.05)
    axis.set_ylabel("share kept")
    axis.legend(loc="lower right", fontsize=7.5, frameon=True, framealpha=0.9, edgecolor="none")
