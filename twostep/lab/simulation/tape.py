"""A simulation as a decision log (twostep/autoscaler/decision_log.py): what the joint policy saw of it and what it decided, to be replayed
through the policy, or through the service."""

from __future__ import annotations

from twostep.autoscaler.decision_log import head_of, line_of
from twostep.autoscaler.model import Decision, Observation
from twostep.lab.simulation.run import Setting, simulate
from twostep.lab.simulation.scalers import JointPolicy
from twostep.lab.simulation.traces import Requests, Trace


def decision_lines(setting: Setting, trace: Trace, requests: Requests, *, seed: int) -> list[str]:
    """The log's lines: the configuration, then every decision in order."""
    lines = [head_of(setting.policy)]

    def write(observation: Observation, decision: Decision) -> None:
        lines.append(line_of(observation, decision))

    simulate(setting, trace, requests, JointPolicy(setting.policy, on_decision=write), seed=seed)
    return lines
