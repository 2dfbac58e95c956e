"""Renders what `twostep status` shows, as lines of text. Pure: no terminal, no client, no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostep.cli._terminal import char_width, clipped, width_of
from twostep.client import ClusterStatus, WorkerStatus
from twostep.client._status import RoleScaling, RouterLoad, Scaling
from twostep.errors import TwostepError
from twostep.process.printable import harmless

# Text in a style of twostep.cli._terminal.
Paint = Callable[..., str]
_BAR = 6
_ROLES = ("prefill", "decode")
_MAX_SWITCHES = 4


@dataclass(frozen=True, slots=True)
class RouterReply:
    """Holds what one router said: a status, or why there is none."""

    target: str
    status: ClusterStatus | None = None
    error: str = ""
    cause: TwostepError | None = None


@dataclass(frozen=True, slots=True)
class _Column:
    """`narrowest`: of a terminal that it is shown on."""

    title: str
    of: Callable[[WorkerStatus], str]
    narrowest: int = 0
    left: bool = False


def render(looks: Sequence[RouterReply], width: int, paint: Paint) -> list[str]:
    """The whole deployment on lines of at most `width` columns. `looks` are of different routers, one at least."""
    lines: list[str] = []
    for look in looks:
        lines += [*_router(look, width, paint), *_alerts(look, width, paint), ""]
    known = next((look.status for look in looks if look.status is not None), None)
    decisions = [look.status.scaling for look in looks if look.status is not None and look.status.scaling is not None]
    if decisions:
        # All routers read the same one, not at the same instant.
        lines += [*_scaling(min(decisions, key=lambda each: (not each.roles, each.age_s)), width, paint), ""]
    if known is not None:
        lines += _workers(known.workers, width, paint)
        lines += _troubles(known, width, paint)
    return lines


def _router(look: RouterReply, width: int, paint: Paint) -> list[str]:
    status = look.status
    if status is None:
        return [paint(line, "red") for line in _wrapped(f"{look.target}: {look.error}", width)]
    load = status.load
    state, style = ("draining", "yellow") if status.draining else ("ready", "green") if status.ready else ("not ready", "red")
    name, model = _clean(status.router_id) or look.target, _clean(status.model) or "no model yet"
    about = clipped(f"{model}  {name}  {_clean(status.version)}  up {duration(status.uptime_s)}  ", width - len(state))
    cached = f", {percent(load.cached_tokens_per_s, load.prompt_tokens_per_s)} cached" if load.prompt_tokens_per_s else ""
    ratio = "–" if load.prefill_decode_load_ratio is None else f"{load.prefill_decode_load_ratio:.2f}"
    kept = "–" if load.slo_attainment is None else f"{100 * load.slo_attainment:.1f} %"
    plain = [
        ("requests", f"{load.num_running} running, {load.num_waiting} waiting; {amount(load.requests_per_s)}/s", load.failures_per_s),
        ("tokens", f"{amount(load.prompt_tokens_per_s)}/s in{cached}; {amount(load.generation_tokens_per_s)}/s out", 0.0),
        ("placed", _placed(load), 0.0),
        ("work", f"prompts {instant(load.prompt_work_s)}, answers {instant(load.answer_work_s)}, P:D {ratio}   targets kept {kept}", 0.0),
    ]
    lines = [paint(about, "bold") + paint(state, style)]
    for title, text, failures in plain:
        failed = f", {amount(failures)}/s failed" if failures else ""
        lines.append(paint(f"{title:<9}", "dim") + clipped(text, width - 9 - len(failed)) + paint(failed, "red"))
    lines.append(
        paint(clipped(f"{'latency':<9}{'TTFT':>10}{'TPOT':>10}{'ITL':>10}{'queue':>10}   last {load.window_s:.0f} s", width), "dim")
    )
    for which in ("p50", "p95", "p99"):
        columns = [instant(getattr(percentiles, which)) for percentiles in (load.ttft_s, load.tpot_s, load.itl_s, load.queue_s)]
        lines.append(clipped(f"  {which:<7}" + "".join(f"{column:>10}" for column in columns), width))
    return lines


def _placed(load: RouterLoad) -> str:
    placed = load.handed_over_per_s + load.local_per_s
    kept, moved = percent(load.local_per_s, placed), percent(load.handed_over_per_s, placed)
    on_prefill = f" ({percent(load.local_on_prefill_per_s, placed)} on prefill workers)" if load.local_on_prefill_per_s else ""
    return f"{amount(placed)}/s: {kept} kept{on_prefill}, {moved} moved"


def _alerts(look: RouterReply, width: int, paint: Paint) -> list[str]:
    alerts = () if look.status is None else look.status.alerts
    texts = [(f"{alert.severity}: {alert.name}: {alert.text}, for {duration(alert.age_s)}", alert.severity) for alert in alerts]
    return [paint(line, "red" if severity == "critical" else "yellow") for text, severity in texts for line in _wrapped(text, width)]


def _workers(workers: Sequence[WorkerStatus], width: int, paint: Paint) -> list[str]:
    if not workers:
        return [paint(clipped("No worker has registered: start one, or look at the log of one that should be there.", width), "yellow")]
    names = min(max(len("worker"), *(width_of(_clean(worker.worker_id)) for worker in workers)), max(8, width - 56), 32)
    columns = [column for column in _columns() if column.narrowest <= width]
    cells = {worker.worker_id: [column.of(worker) for column in columns] for worker in workers}
    widths = [max(width_of(column.title), *(width_of(row[index]) for row in cells.values())) for index, column in enumerate(columns)]

    def row(name: str, values: Sequence[str]) -> str:
        padded = [
            value + " " * (wide - width_of(value)) if column.left else " " * (wide - width_of(value)) + value
            for column, wide, value in zip(columns, widths, values, strict=True)
        ]
        return clipped(f"{name}{' ' * (names - width_of(name))}  {'  '.join(padded)}".rstrip(), width)

    lines = []
    for role in _ROLES:
        of_role = sorted((worker for worker in workers if worker.role == role), key=lambda worker: worker.worker_id)
        ready = sum(worker_state(worker) == "ready" for worker in of_role)
        if of_role:
            any_work = ", taking any work" if all(worker.both_roles for worker in of_role) else ""
            lines.append(paint(clipped(f"{role}: {ready} of {len(of_role)} ready{any_work}", width), "bold"))
        else:
            lines.append(paint(clipped(f"{role}: {_without(role, workers)}", width), "yellow"))
        if of_role:
            lines.append(paint(row("worker", [column.title for column in columns]), "dim"))
        for worker in of_role:
            line = row(clipped(_clean(worker.worker_id), names), cells[worker.worker_id])
            state = worker_state(worker)
            lines.append(line.replace(f" {state} ", f" {paint(state, _STATE_STYLE[state])} ", 1))
        lines.append("")
    return lines[:-1]


def _scaling(scaling: Scaling, width: int, paint: Paint) -> list[str]:
    lines: list[str] = []
    if scaling.roles:
        wants = f"{', '.join(map(_wish, scaling.roles))} workers"
        ago, leader = duration(scaling.age_s), _clean(scaling.leader) or "nobody"
        if scaling.stale:
            said = f"autoscaler: nobody has decided for {ago}; see that it runs, and its log", f"wanted last, by {leader}: {wants}"
            lines += [paint(line, "yellow") for text in said for line in _wrapped(text, width)]
        else:
            parts = [f"autoscaler: {wants}", f"{ago} ago, by {leader}"]
            whole = "; ".join(parts)
            lines += [paint(line, "bold") for text in ([whole] if width_of(whole) <= width else parts) for line in _wrapped(text, width)]
        switches = [f"{switch.worker_id} becomes {switch.role}" for switch in scaling.switches[:_MAX_SWITCHES]]
        more = len(scaling.switches) - _MAX_SWITCHES
        why = [scaling.reason, f"held back by {scaling.limit}" if scaling.limit else "", ", ".join(switches)]
        why.append(f"and {more} more" if more > 0 else "")
        lines += [paint(line, "dim") for line in _wrapped("; ".join(filter(None, why)), width) if line]
    if scaling.problem:
        lines += [paint(line, "red") for line in _wrapped(f"autoscaler: its decision cannot be read: {scaling.problem}", width)]
    return lines


def _wish(role: RoleScaling) -> str:
    """As "prefill 1 of 2": so many serve, so many are wanted; and those started in the role (the pods of its Deployment, on Kubernetes),
    where they change or are others than the workers."""
    moving = f"{role.pods} → {role.wanted_pods} started as such" if role.pods != role.wanted_pods else ""
    elsewhere = f"{role.wanted_pods} started as such" if role.wanted_pods != role.wanted_workers else ""
    about = moving or elsewhere
    return f"{_clean(role.role)} {role.serving_workers} of {role.wanted_workers}" + (f" ({about})" if about else "")


def _troubles(status: ClusterStatus, width: int, paint: Paint) -> list[str]:
    """Workers that get no request, and why: those of no use now, and those that the router refuses."""
    idle = [f"{worker.worker_id}: {worker.not_ready_reason}" for worker in status.workers if worker.not_ready_reason]
    lines = [paint(line, "yellow") for text in idle for line in _wrapped(text, width)]
    for refused in status.refused:
        about = ", ".join(filter(None, (refused.role, refused.version)))
        named = f"{refused.worker_id} ({about})" if about else refused.worker_id
        lines += [paint(line, "red") for line in _wrapped(f"refused: {named}: {refused.reason}", width)]
    return ["", *lines] if lines else []


def _without(role: str, workers: Sequence[WorkerStatus]) -> str:
    if role == "prefill" and any(worker.local_prefill for worker in workers):
        return "no workers; decode workers compute prompts themselves"
    return "no workers, and nothing is served without"


_STATE_STYLE = {"ready": "green", "draining": "yellow", "starting": "yellow", "no use": "yellow"}


def _columns() -> list[_Column]:
    return [
        _Column("state", worker_state, left=True),
        _Column("run", lambda w: f"{w.num_running}/{w.max_num_seqs}" if w.max_num_seqs else str(w.num_running)),
        _Column("wait", lambda w: str(w.num_waiting), narrowest=64),
        _Column("KV used", _kv),
        _Column("tokens/s", lambda w: amount(w.tokens_per_s), narrowest=56),
        _Column("kept/s", lambda w: amount(w.kept_per_s), narrowest=76),
        _Column("out/s", lambda w: amount(w.handed_over_per_s), narrowest=76),
        _Column("in/s", lambda w: amount(w.taken_over_per_s), narrowest=76),
        _Column("hit", lambda w: percent(w.hit_tokens_per_s, w.queried_tokens_per_s) if w.queried_tokens_per_s else "–", narrowest=84),
        _Column("decoding", lambda w: str(w.num_decoding), narrowest=94),
        _Column("GPU", _gpu, narrowest=110),
        _Column("prompts", lambda w: f"{amount(w.prompt_tokens_per_s)}/s", narrowest=132),
        _Column("KV in", lambda w: _bytes(w.fetched_bytes_per_s), narrowest=132),
        _Column("queued", lambda w: amount(w.num_queued_tokens), narrowest=150),
        _Column("context", lambda w: amount(w.num_context_tokens), narrowest=150),
        _Column("address", lambda w: _clean(w.address), narrowest=180, left=True),
        _Column("transports", lambda w: _clean(",".join(w.transports)), narrowest=180, left=True),
    ]


def _gpu(worker: WorkerStatus) -> str:
    """As "87 %, 71/141G": how busy the busiest of its GPUs is, and the memory of all."""
    if not worker.gpus:
        return "–"
    busy = max((gpu.utilization for gpu in worker.gpus if gpu.utilization is not None), default=None)
    used, total = (sum(getattr(gpu, name) for gpu in worker.gpus) / 1e9 for name in ("memory_used", "memory_total"))
    return f"{'–' if busy is None else f'{100 * busy:.0f} %'}, {used:.0f}/{total:.0f}G"


def worker_state(worker: WorkerStatus) -> str:
    if worker.draining or not worker.ready:
        return "draining" if worker.draining else "starting"
    return "no use" if worker.not_ready_reason else "ready"


def _kv(worker: WorkerStatus) -> str:
    if not worker.num_blocks:
        return "–"
    share = 1 - worker.num_free_blocks / worker.num_blocks
    full = round(_BAR * share)
    return f"{'█' * full}{'·' * (_BAR - full)} {100 * share:3.0f} %"


def instant(seconds: float) -> str:
    """A latency. 0 is none: nothing was observed."""
    if not seconds:
        return "–"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def amount(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    if value == int(value) or value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.95 else f"{value:.1g}"


def _bytes(per_second: float) -> str:
    return f"{amount(per_second)}B/s" if per_second else "–"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def duration(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _clean(text: str) -> str:
    """On one line, and nothing in it that would command the terminal."""
    return harmless(" ".join(text.split()))


def _wrapped(text: str, width: int) -> list[str]:
    lines, columns = [""], 0
    for char in _clean(text):
        columns += char_width(char)
        if columns > width:
            lines.append("")
            columns = char_width(char)
        lines[-1] += char
    return lines
