"""`python -P -m twostep.autoscaler.replay FILE [--spare 0 ...]`: what the policy says to the observations of a --decision-log now, or would
have said under another configuration.

    FILE:17 at 14:03:15 4 prefill, 3 decode (prompts take longer) -> 3 prefill, 3 decode (enough)
    960 decisions, 41 differ; pods on average 6.2 -> 5.8, an hour 6.20 -> 5.80

Flags are the autoscaler's own; those that are not given are as the log has them. The policy remembers its own decisions, but what it sees
is what was seen then: pods that it would have asked for and nobody did are not there. Exit code 0: none differs; 1: some do; 2: the file
cannot be read, or a flag makes no sense.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from twostep.autoscaler.decision_log import Logged, read_decisions
from twostep.autoscaler.memory import Memory
from twostep.autoscaler.model import ROLES, Decision, PolicyConfig
from twostep.autoscaler.policy import decide
from twostep.errors import InvalidRequest

# Flag (as of python -P -m twostep.autoscaler), what it sets, of which type. A role in front: of that pool.
_POLICY: dict[str, tuple[str, Callable[[str], Any]]] = {
    "target-ttft-ms": ("ttft_ms", float),
    "target-tpot-ms": ("tpot_ms", float),
    "attainment": ("attainment", float),
    "interval": ("interval_s", float),
    "demand-window": ("window_s", float),
    "cool-down": ("cool_down_s", float),
    "hysteresis": ("hysteresis", float),
    "surge": ("surge", int),
    "spare": ("spare", int),
    "max-cost": ("max_cost", float),
    "max-workers": ("max_workers", int),
    "max-utilization": ("max_utilization", float),
    "worker-drain": ("drain_s", float),
    "switch-time": ("switch_s", float),
    "scale-to-zero-after": ("scale_to_zero_after_s", float),
}
_POOL: dict[str, tuple[str, Callable[[str], Any]]] = {
    "min-workers": ("min_workers", int),
    "max-workers": ("max_workers", int),
    "gpus-per-worker": ("gpus_per_worker", int),
    "price": ("price_per_gpu_hour", float),
    "cold-start": ("cold_start_s", float),
}


def main(argv: Sequence[str] | None = None) -> int:
    args = vars(_parser().parse_args(argv))
    path: Path = args.pop("file")
    changes = {name: value for name, value in args.items() if value is not None}
    tally = _Tally()
    memory = Memory()
    try:
        with path.open(encoding="utf-8") as lines:
            for logged in read_decisions(lines):
                config = changed(logged.config, changes)
                # Another configuration has led elsewhere: it goes on from its own memory.
                if logged.memory is not None and (not changes or tally.num_decisions == 0):
                    memory = logged.memory
                step = decide(config, memory, logged.observation)
                memory = step.memory
                tally.add(logged, config, step.decision)
                if not same(step.decision, logged.decision):
                    at = time.strftime("%H:%M:%S", time.gmtime(logged.observation.now_s))
                    sys.stdout.write(f"{path}:{logged.line} at {at} {_words(logged.decision)} -> {_words(step.decision)}\n")
    except (OSError, InvalidRequest) as error:
        sys.stderr.write(f"{path} cannot be replayed: {error}\n")
        return 2
    sys.stdout.write(tally.line() + "\n")
    return 1 if tally.num_different else 0


def changed(config: PolicyConfig, changes: dict[str, Any]) -> PolicyConfig:
    """With flags by their names with underscores. Raises InvalidRequest where they make no sense."""
    pools = {}
    for role in ROLES:
        fields = {field: changes[key] for flag, (field, _) in _POOL.items() if (key := _key(f"{role}-{flag}")) in changes}
        pools[role] = dataclasses.replace(config.pool(role), **fields)
    fields = {field: changes[_key(flag)] for flag, (field, _) in _POLICY.items() if _key(flag) in changes}
    for bound in ("max_cost", "max_workers"):
        if bound in fields:
            fields[bound] = fields[bound] or None
    if "switch_roles" in changes:
        fields["switching"] = changes["switch_roles"]
    return dataclasses.replace(config, prefill=pools["prefill"], decode=pools["decode"], **fields)


def same(one: Decision, other: Decision) -> bool:
    """Returns whether both decisions do the same; their reasons may differ."""
    names = ("prefill", "decode", "replicas", "switches", "victims")
    return all(getattr(one, name) == getattr(other, name) for name in names)


@dataclasses.dataclass(slots=True)
class _Tally:
    num_decisions: int = 0
    num_different: int = 0
    pods_then: int = 0
    pods_now: int = 0
    cost_then: float = 0.0
    cost_now: float = 0.0

    def add(self, logged: Logged, config: PolicyConfig, decision: Decision) -> None:
        self.num_decisions += 1
        self.num_different += not same(decision, logged.decision)
        self.pods_then += sum(logged.decision.replicas.values())
        self.pods_now += sum(decision.replicas.values())
        self.cost_then += logged.config.cost(logged.decision.replicas)
        self.cost_now += config.cost(decision.replicas)

    def line(self) -> str:
        many = max(1, self.num_decisions)
        differ = f"{self.num_different} differ{'s' if self.num_different == 1 else ''}"
        pods = f"pods on average {self.pods_then / many:.1f} -> {self.pods_now / many:.1f}"
        return f"{self.num_decisions} decisions, {differ}; {pods}, an hour {self.cost_then / many:.2f} -> {self.cost_now / many:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -P -m twostep.autoscaler.replay",
        description="Makes the decisions of an autoscaler's --decision-log again, as they were configured or otherwise.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what --decision-log wrote")
    pools = {f"{role}-{flag}": of for role in ROLES for flag, of in _POOL.items()}
    for flag, (_, kind) in (_POLICY | pools).items():
        parser.add_argument(f"--{flag}", type=kind, default=None, metavar="N", help="instead of what the log has")
    parser.add_argument("--switch-roles", action=argparse.BooleanOptionalAction, default=None, help="instead of what the log has")
    return parser


def _key(flag: str) -> str:
    return flag.replace("-", "_")


def _words(decision: Decision) -> str:
    switches = "".join(f", {switch.worker_id} to {switch.to}" for switch in decision.switches)
    pods = "" if decision.replicas == {"prefill": decision.prefill, "decode": decision.decode} else f" in {_pods(decision)} pods"
    return f"{decision.prefill} prefill, {decision.decode} decode{pods}{switches} ({decision.reason})"


def _pods(decision: Decision) -> str:
    return " and ".join(str(decision.replicas.get(role, 0)) for role in ROLES)


if __name__ == "__main__":
    sys.exit(main())
