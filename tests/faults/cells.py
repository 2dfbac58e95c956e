"""One fault, five requests: each stands at another state of the hand-over when the fault strikes, and each is a cell of the matrix.

1. only prefill-0 and decode-0 are known; one request is held at each state on them
2. the spare workers become known again; the fault strikes; the gates open
3. SIGSTOP and cuts are taken back after their time; what was killed is started again by itself
4. all five requests end, the system is whole, and then nobody may hold anything
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from fault_system import FaultSystem, Held
from faulty_requests import Ask, Asker, Outcome, Probing
from namespaces import Plane

from twostep import AsyncClient

# In the order of the machine; the lease is COMMITTED or RELEASED while tokens are decoded.
STATES = ("reserved", "publishing", "ready", "fetching", "decoding")
# Every state needs something of the worker that the next one holds up: `reserved` stops all of its prefill steps.
_STAGING = ("fetching", "ready", "publishing", "decoding", "reserved")
_BUSIER = 100
_STAGE_S = 60.0
_PROMPT_TOKENS = 600
# Decoding goes on for seconds after the last state is staged.
_MAX_TOKENS = {"decoding": 400}
_DEFAULT_MAX_TOKENS = 40
_EMPTY_S = 40.0
_RECOVER_S = 30.0


class Fault(Enum):
    KILL = "kill -9"
    STOP = "SIGSTOP"
    CUT = "network cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`pids`: whom kill and SIGSTOP strike. `cut`: a host, and the networks it loses; none: cutting it is another target's cut."""

    name: str
    pids: Callable[[FaultSystem], list[int]]
    cut: tuple[str, tuple[Plane, ...]] | None = None
    cut_name: str = ""
    """The cut's name where it isolates more than the target."""
    of_ray: bool = False
    """Ray itself must be whole again, too."""

    def title(self, fault: Fault) -> str:
        return self.cut_name if fault is Fault.CUT and self.cut_name else self.name


def _component(name: str) -> Callable[[FaultSystem], list[int]]:
    return lambda system: [pid] if (pid := system.components[name].pid) else []


_BOTH = (Plane.SERVICE, Plane.RAY)
TARGETS = (
    Target(name="router", pids=_component("router-0"), cut=("router-0", _BOTH)),
    Target(name="prefill worker", pids=_component("prefill-0"), cut=("prefill", _BOTH), cut_name="prefill worker's host"),
    Target(name="decode worker", pids=_component("decode-0"), cut=("decode", _BOTH), cut_name="decode worker's host"),
    Target(name="prefill's engine process", pids=lambda s: s.engine("prefill-0")),
    Target(name="decode's engine process", pids=lambda s: s.engine("decode-0")),
    Target(name="prefill's KV agent, helper", pids=lambda s: s.agent_helper("prefill-0")),
    Target(name="prefill's KV agent, actor", pids=lambda s: s.agent_actor("prefill-0")),
    Target(name="decode's KV agent, helper", pids=lambda s: s.agent_helper("decode-0")),
    Target(name="decode's KV agent, actor", pids=lambda s: s.agent_actor("decode-0")),
    Target(
        name="prefill's raylet",
        pids=lambda s: s.program("prefill", "raylet"),
        cut=("prefill", (Plane.RAY,)),
        cut_name="prefill's raylet and KV agent",
        of_ray=True,
    ),
    Target(
        name="decode's raylet",
        pids=lambda s: s.program("decode", "raylet"),
        cut=("decode", (Plane.RAY,)),
        cut_name="decode's raylet and KV agent",
        of_ray=True,
    ),
    Target(name="Ray's head (GCS)", pids=lambda s: s.program("head", "gcs_server"), cut=("head", _BOTH), of_ray=True),
    Target(name="Redis", pids=_component("redis"), cut=("redis", _BOTH)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds. `client_s`: what a client allows its request beyond the fault's duration. `whole_s`: for all to be back."""

    stop_s: float = 60.0
    cut_s: float = 20.0
    client_s: float = 60.0
    whole_s: float = 150.0

    def duration_s(self, fault: Fault) -> float:
        return {Fault.KILL: 0.0, Fault.STOP: self.stop_s, Fault.CUT: self.cut_s}[fault]


@dataclass(kw_only=True)
class Injection:
    """The outcome of one fault."""

    fault: str
    target: str
    cells: dict[str, Outcome] = field(default_factory=dict)
    recovered_s: float | None = None
    """From the fault to when fresh requests through router-0 succeed for good; 0: none failed. None: never."""
    whole_s: float | None = None
    """From the fault until every process serves again. None: not within its bound."""
    num_probes: int = 0
    probes_failed: dict[str, int] = field(default_factory=dict)
    """Counts by status; DEADLINE_EXCEEDED: not within 20 s."""
    num_probe_tokens_wrong: int = 0
    slowest_probe_s: float = 0.0
    """Only probes that succeeded count."""
    held: Held = field(default_factory=Held)
    problem: str = ""
    """Why it could not be done, or what stands out."""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        cells = len(self.cells) == len(STATES) and all(not o.num_wrong and not o.hung for o in self.cells.values())
        return bool(
            cells and self.recovered_s is not None and self.whole_s is not None and self.held.nothing
            and not self.num_probe_tokens_wrong and not self.problem
        )  # fmt: skip


async def inject(system: FaultSystem, target: Target, fault: Fault, timing: Timing, asker: Asker) -> Injection:
    """Raises TimeoutError if the requests could not be brought to their states; the system must then be started anew."""
    begin = time.monotonic()
    injection = Injection(fault=fault.value, target=target.title(fault))
    await system.hide_spare()
    async with AsyncClient([system.target(0), system.target(1)]) as client:
        # All that is struck runs through the first router: the second one looks busier for as long as the first is there.
        for _ in range(_BUSIER):
            client._pool.take(avoid=[system.target(0)])
        running: dict[Ask, asyncio.Task[None]] = {}
        try:
            await _stage(system, client, asker, timing.duration_s(fault) + timing.client_s, running)
            await system.show_spare()
            async with Probing(system.target(0), asker) as probing:
                injection.problem = await _strike(system, target, fault, timing, injection, running, probing)
            injection.recovered_s = probing.recovered_s
            injection.num_probes = len(probing.ended)
            injection.probes_failed = probing.failed
            injection.num_probe_tokens_wrong = probing.num_wrong
            injection.slowest_probe_s = probing.slowest_s
        finally:
            system.gates.open_all()
            for task in running.values():
                task.cancel()
            if running:
                await asyncio.wait(running.values())
    injection.held = await system.until_empty(_EMPTY_S)
    injection.seconds = time.monotonic() - begin
    return injection


async def _stage(system: FaultSystem, client: AsyncClient, asker: Asker, timeout_s: float, running: dict[Ask, asyncio.Task[None]]) -> None:
    for state in _STAGING:
        max_tokens = _MAX_TOKENS.get(state, _DEFAULT_MAX_TOKENS)
        ask = asker.new(state, prompt_tokens=_PROMPT_TOKENS, max_tokens=max_tokens, timeout_s=timeout_s)
        if state != "decoding":
            system.gates.arm(state)
        running[ask] = asyncio.create_task(ask.run(client), name=state)
        if state == "decoding":
            async with asyncio.timeout(_STAGE_S):
                await ask.streaming.wait()
            await _check_staged(system)
        else:
            await system.gates.held(state, _STAGE_S)


async def _check_staged(system: FaultSystem) -> None:
    """By the workers' own count, before `reserved` stops prefill's engine: three leases with all published that may be, and one sequence
    that decodes beside the three that wait for their KV. Raises TimeoutError."""
    give_up, objects = time.monotonic() + _STAGE_S, -1
    while True:
        prefill, decode = await system.stats("prefill-0"), await system.stats("decode-0")
        before, objects = objects, sum(transport.num_objects for transport in prefill.transports)
        if (prefill.num_leases, decode.num_sequences, decode.num_running) == (3, 4, 1) and before == objects > 0:
            return
        if time.monotonic() > give_up:
            raise TimeoutError(f"the requests are not where they should be: {prefill} {decode}")
        await asyncio.sleep(0.1)


async def _strike(
    system: FaultSystem,
    target: Target,
    fault: Fault,
    timing: Timing,
    injection: Injection,
    running: dict[Ask, asyncio.Task[None]],
    probing: Probing,
) -> str:
    """From the fault until all is back; returns what stands out."""
    early = [ask.name for ask, task in running.items() if task.done()]
    if early:
        raise TimeoutError(f"{', '.join(early)} ended before the fault")
    pids = target.pids(system) if fault is not Fault.CUT else []
    if fault is not Fault.CUT and not pids:
        raise TimeoutError(f"{target.name} does not run")
    struck = probing.since = time.monotonic()
    for ask in running:
        ask.since = struck
    _do(system, target, fault, pids)
    system.gates.open_all()
    await asyncio.sleep(timing.duration_s(fault))
    _undo(system, target, fault, pids)
    await asyncio.wait(running.values())
    injection.cells = {ask.name: ask.outcome for ask in running}
    try:
        await system.until_whole(timing.whole_s, ask_ray=target.of_ray or fault is Fault.CUT)
    except TimeoutError as error:
        return str(error)
    injection.whole_s = time.monotonic() - struck
    await probing.until_recovered(_RECOVER_S)
    return ""


def _do(system: FaultSystem, target: Target, fault: Fault, pids: list[int]) -> None:
    if fault is Fault.CUT:
        assert target.cut is not None
        system.hosts[target.cut[0]].cut(*target.cut[1])
    for pid in pids:
        os.kill(pid, signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP)


def _undo(system: FaultSystem, target: Target, fault: Fault, pids: list[int]) -> None:
    if fault is Fault.CUT:
        assert target.cut is not None
        system.hosts[target.cut[0]].mend()
    for pid in pids if fault is Fault.STOP else ():
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:  # somebody ended it meanwhile
            continue
    for component in system.components.values():
        component.resume()
