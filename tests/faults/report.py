"""The fault matrix as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cells import STATES, Fault, Injection, Timing
from faulty_requests import Outcome

_HEAD = """# What happens when something dies

Made by `make fault-matrix`: a real deployment in network namespaces (Redis, a Ray of four nodes, two routers, two prefill and two decode
workers, each host with a network of its own), the fake model (every token depends on the KV bytes that were handed over), and faults that
strike while one request stands at each state of the hand-over. Every cell says what the client of that request saw, and how long after the
fault its answer was over:

- **ok**: the whole answer, every token the right one, none lost, none twice; *n attempts* if the router began it again elsewhere.
- a gRPC status: the request failed clearly. It may be repeated.

The client is the SDK with the addresses of both routers, and its defaults.

*Fresh requests* are short ones, sent all the time (one each half second) through the same router alone, never repeated: how many failed and
with what (DEADLINE_EXCEEDED: not within 20 s), how long the slowest of the others took, and how long after the fault the first one
succeeded that no failure followed. *Whole again* is when every process serves again, with all its transports. The last columns are what is
left when all that is over: by the workers' own count (with a walk through their block pools), by every raylet's, files in shared memory,
processes. (Where the owner of an object has died, Ray may keep a marker of a byte or two in its place: these hold no KV and are not
counted. It may also keep a copy that nothing refers to until it needs the room: such a store is filled, and what stays is counted.) In a
cell of `decoding` the KV has been handed over (COMMITTED, RELEASED) and tokens are flowing.
"""
_TWO_RAYLETS = "## Two raylets"
_EXPLAIN = {
    Fault.KILL: "The process ends at once, and is started again half a second later, as a supervisor would.",
    Fault.STOP: "The process freezes for {stop:g} s: its connections stay open, and nothing is answered.",
    Fault.CUT: "A host's cable is pulled for {cut:g} s: packets vanish without a word. Ray has a network of its own.",
}


def markdown(injections: Sequence[Injection], timing: Timing, *, made: str, seconds: float, two_raylets: str = "") -> str:
    """`made`: by what and when. `two_raylets`: what the test of that name printed."""
    parts = [_HEAD, made, ""]
    for fault in Fault:
        rows = [injection for injection in injections if injection.fault == fault.value]
        if rows:
            parts += [f"## {fault.value}", "", _EXPLAIN[fault].format(stop=timing.stop_s, cut=timing.cut_s), "", *_table(rows), ""]
    if two_raylets:
        parts += [_section(two_raylets), ""]
    problems = [f"- {i.fault}, {i.target}: {i.problem}" for i in injections if i.problem]
    if problems:
        parts += ["## What stands out", "", *problems, ""]
    return "\n".join([*parts, totals(injections, seconds), ""])


def with_two_raylets(page: str, two_raylets: str) -> str:
    """A page with that section made anew."""
    before, found, rest = page.partition(_TWO_RAYLETS)
    assert found, "the page has no such section; make all of it"
    _, fence, behind = rest.partition("```")[2].partition("```")
    assert fence
    return before + _section(two_raylets) + behind


def _section(two_raylets: str) -> str:
    intro = "The ray transport between two nodes of one Ray: a raylet killed in mid-pull, then the contract's own tests."
    return "\n".join([_TWO_RAYLETS, "", intro, "", "```", two_raylets.strip(), "```"])


def _table(rows: Sequence[Injection]) -> list[str]:
    names = ["struck", *(state.upper() if state != "decoding" else state for state in STATES)]
    names += [
        "fresh requests: failed",
        "slowest",
        "succeed after",
        "whole again after",
        "blocks",
        "leases",
        "objects, bytes",
        "files, processes",
        "wrong tokens",
    ]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = [_cell(row.cells.get(state)) for state in STATES]
        held = row.held
        left = [str(held.blocks), str(held.leases), f"{held.objects}, {held.bytes}", f"{held.files}, {held.strays}"]
        if held.unknown or held.integrity:
            left[0] += f" ({held.integrity or held.unknown})"
        wrong = sum(o.num_wrong for o in row.cells.values()) + row.num_probe_tokens_wrong
        fresh = [
            _failed(row),
            f"{row.slowest_probe_s:.1f} s",
            _after(row.recovered_s),
            _after(row.whole_s),
        ]
        lines.append("| " + " | ".join([row.target, *cells, *fresh, *left, str(wrong)]) + " |")
    return lines


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not run"
    if outcome.num_wrong:
        return f"**{outcome.num_wrong} wrong tokens**, {outcome.status}"
    if outcome.status != "OK":
        sent = f" after {outcome.num_tokens} tokens" if outcome.num_tokens else ""
        return f"{'**hung** ' if outcome.hung else ''}{outcome.status}{sent}, {outcome.seconds:.1f} s"
    again = f", {outcome.attempts} attempts" if outcome.attempts > 1 else ""
    return f"ok{again}, {outcome.seconds:.1f} s"


def _failed(row: Injection) -> str:
    count = f"{sum(row.probes_failed.values())} of {row.num_probes}"
    return f"{count} ({', '.join(f'{n} {status}' for status, n in row.probes_failed.items())})" if row.probes_failed else count


def _after(seconds: float | None) -> str:
    return "**never**" if seconds is None else f"{seconds:.1f} s" if seconds else "at once"


def totals(injections: Sequence[Injection], seconds: float) -> str:
    outcomes = [outcome for injection in injections for outcome in injection.cells.values()]
    ends = Counter("recovered" if o.recovered else "hung" if o.hung else "wrong" if o.num_wrong else "failed" for o in outcomes)
    wrong = sum(o.num_wrong for o in outcomes) + sum(i.num_probe_tokens_wrong for i in injections)
    held = [injection.held for injection in injections]
    missing = sum(len(STATES) - len(injection.cells) for injection in injections)
    never = sum(injection.whole_s is None or injection.recovered_s is None for injection in injections)
    return (
        f"**Totals**: {len(outcomes) + missing} cells ({len(injections)} faults): {ends['recovered']} recovered, "
        f"{ends['failed']} failed clearly, {ends['hung']} hung, {missing} not run; {never} faults not recovered from; "
        f"leaked: {sum(h.blocks for h in held)} blocks, "
        f"{sum(h.leases for h in held)} leases, {sum(h.bytes for h in held)} object-store bytes, "
        f"{sum(h.files + h.strays for h in held)} files and processes; {wrong} lost, duplicated or wrong tokens; in {seconds:.0f} s."
    )
