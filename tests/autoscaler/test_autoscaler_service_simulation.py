"""The service beside the simulation: shown what the simulated deployment showed, it decides over Redis and gRPC what was decided there."""

from __future__ import annotations

import asyncio

import pytest
from hpa_formula import desired
from service_harness import Clock, Scene, keda

from twostep.autoscaler.decision_log import read_decisions
from twostep.autoscaler.model import ROLES
from twostep.autoscaler.server import Autoscaler
from twostep.lab.plan.machine import machine_of_preset
from twostep.lab.simulation.run import decision_lines
from twostep.lab.simulation.traces import LoadTrace, TraceCurve, WorkerLoss, requests
from twostep.settings.autoscaler import PoolSettings

# Up and down, from prompts to answers, and a worker lost, in ten minutes.
TRACE = LoadTrace(
    name="short",
    seconds=600,
    rate=TraceCurve(((0, 8), (200, 30), (400, 30), (600, 8))),
    prompts=TraceCurve(((150, 2800), (450, 1000))),
    outputs=TraceCurve(((150, 120), (450, 450))),
    losses=(WorkerLoss(300, "decode"),),
)


@pytest.mark.system
async def test_the_service_follows_a_trace_as_the_simulation_says(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, clock = PoolSettings(max_workers=12, cold_start=45.0), Clock(0.0)
    targets = {"target_ttft_ms": 500.0, "target_tpot_ms": 10.0}
    settings = scene.config(interval=15.0, stale_after=1000, prefill=pool, decode=pool, **targets)
    deployment = machine_of_preset("h200-llama-3.1-8b").base
    tape = list(read_decisions(decision_lines(deployment, settings.policy(), TRACE, requests(TRACE, 1), seed=1, refusing=False)))
    assert len({tuple(each.decision.replicas.items()) for each in tape}) > 3, "it has something to follow"
    service = Autoscaler(settings, clock=clock)
    # The simulated deployment begins with workers that serve.
    monkeypatch.setattr("twostep.autoscaler.controller.why_wait", lambda *seen, **since: "")
    # Step by step, and no faster than the test.
    monkeypatch.setattr(service.controller, "run", asyncio.Event().wait)
    await service.start()
    try:
        async with keda(service.port) as asked:
            for number, logged in enumerate(tape, 1):
                assert logged.config == settings.policy()
                clock.now_s = logged.observation.now_s
                seen = logged.observation
                monkeypatch.setattr(service.controller._collector, "observation", lambda look, asked, switching, seen=seen: seen)
                await service.controller.step()
                record = service.board.answer()
                assert (record.number, record.at_s) == (number, seen.now_s)
                assert record.replicas == logged.decision.replicas
                assert record.wanted == {role: logged.decision.wanted(role) for role in ROLES}
                assert record.victims == logged.decision.victims
                assert record.switches == {switch.worker_id: switch.to for switch in logged.decision.switches}
                for role in ROLES:
                    pods = seen.pods[role]
                    come = desired(await asked.value(role), pods) if pods else record.replicas[role]
                    if record.asked[role] >= pods:
                        assert come == record.asked[role] >= record.replicas[role]
                    else:  # the HPA's tolerance may keep what there is
                        assert come in (record.asked[role], pods)
    finally:
        await service.drain(0.0)
