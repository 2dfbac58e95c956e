"""Tests of the parts of a change of roles: passes, configurations, transports, the engine's bounds, metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_sided import ArrayStore, OneSidedHub, OneSidedTransport
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from worker_harness import SECRET, make_runner, prompt_of

from kv_transfer.transports import TRANSPORT_KINDS, TransportParts, Transports, make_transports
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.types import EngineRequest, EngineStats, StepOutput
from twostep.errors import SetupError, Unauthenticated, Unavailable
from twostep.metrics.engine import EngineMetrics
from twostep.metrics.process import register_process
from twostep.metrics.registry import MetricsRegistry
from twostep.metrics.worker import WorkerMetrics
from twostep.rpc.v1 import worker_pb2
from twostep.rpc.worker_role import PASS_LIFE_S, RolePass
from twostep.sampling_params import SamplingParams
from twostep.step_curve import StepWorkload
from twostep.worker import model as worker_model
from twostep.worker.config import ROLES, WorkerConfig, config_in_role
from twostep.worker.edge import Switchboard
from twostep.worker.model import resolve_config

# ---- passes ----------------------------------------------------------------------------------------------------------------

unsigned = st.builds(
    RolePass,
    worker_id=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    epoch=st.integers(0, 2**64 - 1),
    role=st.sampled_from(["prefill", "decode", ""]),
    drain_timeout_s=st.floats(allow_nan=False),
    expires_unix_ms=st.integers(2**60, 2**62),
)
passes = unsigned.map(lambda each: each.signed(SECRET))


@given(passes)
def test_a_pass_is_good_for_its_life_after_the_wire(given_pass: RolePass) -> None:
    sent = worker_pb2.SwitchRoleRequest.FromString(given_pass.to_proto().SerializeToString())
    received = RolePass.from_proto(sent)
    assert received == given_pass
    received.verify(SECRET, worker_id=given_pass.worker_id, epoch=given_pass.epoch)
    with pytest.raises(Unavailable):
        received.verify(SECRET, worker_id=given_pass.worker_id, epoch=(given_pass.epoch + 1) % 2**64)


@given(passes, st.data())
def test_whatever_is_changed_of_a_pass_breaks_it(given_pass: RolePass, data: st.DataObject) -> None:
    changes: dict[str, Any] = {
        "worker_id": st.just(given_pass.worker_id + "1"),
        "epoch": st.integers(0, 2**64 - 1).filter(lambda epoch: epoch != given_pass.epoch),
        "role": st.sampled_from([role for role in ("prefill", "decode", "x") if role != given_pass.role]),
        "drain_timeout_s": st.floats(allow_nan=False).filter(lambda s: repr(s) != repr(given_pass.drain_timeout_s)),
        "expires_unix_ms": st.integers(given_pass.expires_unix_ms + 1, 2**63 - 1),
        "mac": st.binary(max_size=40).filter(lambda mac: mac != given_pass.mac),
    }
    field = data.draw(st.sampled_from(sorted(changes)))
    changed = replace(given_pass, **{field: data.draw(changes[field])})
    with pytest.raises(Unauthenticated, match="--secret-file"):
        changed.verify(SECRET, worker_id=changed.worker_id, epoch=changed.epoch)


def test_a_pass_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000_000 * 10**6]
    monkeypatch.setattr("twostep.rpc.worker_role.time.time_ns", lambda: clock[0])
    issued = RolePass.issue(SECRET, worker_id="w", epoch=1, role="decode", drain_timeout_s=1.0)
    clock[0] += int(PASS_LIFE_S * 1e9) - 1
    issued.verify(SECRET, worker_id="w", epoch=1)
    clock[0] += 1
    with pytest.raises(Unauthenticated):
        issued.verify(SECRET, worker_id="w", epoch=1)
    with pytest.raises(Unauthenticated):
        RolePass.from_proto(worker_pb2.SwitchRoleRequest(expires_unix_ms=-1))


# ---- configurations --------------------------------------------------------------------------------------------------------


def test_a_gpu_s_step_budget_changes_with_the_role_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.model.runner.device.choose_device", lambda device: ("cuda:0", "there is one"))
    for role, budgets in (("prefill", (4096, 2048)), ("decode", (2048, 4096))):
        config = resolve_config(WorkerConfig(role=role, model="m", max_num_batched_tokens=0, max_num_seqs=0))
        assert resolve_config(config) == config
        other = config_in_role(config, next(r for r in ROLES if r != role))
        assert (config.max_num_batched_tokens, other.max_num_batched_tokens) == budgets
        assert config_in_role(other, role) == config
        assert (config.max_num_seqs, other.max_num_seqs) == (256, 256)
        # Memory is set aside for the larger steps, whichever role takes them.
        sizing = worker_model._pool(replace(config, kv_cache_memory_bytes=0), Path("m"), None)
        assert not isinstance(sizing, int)
        assert sizing.max_num_batched_tokens == 4096
        told = resolve_config(WorkerConfig(role=role, model="m", max_num_batched_tokens=100))
        assert config_in_role(told, other.role).max_num_batched_tokens == 100


def test_only_who_hands_over_prefills() -> None:
    with pytest.raises(SetupError, match="--kv-transfer none"):
        config_in_role(WorkerConfig(role="decode", kv_transfer="none"), "prefill")


# ---- services --------------------------------------------------------------------------------------------------------------


class _Echo:
    async def Ask(self, request: str, context: object) -> str:
        return f"{request}!"


async def test_calls_go_to_who_serves_now() -> None:
    board, slots = Switchboard(), dict[str, Any]()
    board.add_to(cast(Any, SimpleNamespace(add=lambda slot, add, name: slots.update({name: slot}))))
    with pytest.raises(Unavailable):
        slots["twostep.v1.Decode"].Ask("a", None)
    board.connect({"twostep.v1.Decode": _Echo()}, "it decodes now")
    # As gRPC keeps it from the start.
    ask = slots["twostep.v1.Decode"].Ask
    assert await ask("a", None) == "a!"
    with pytest.raises(Unavailable, match="it decodes now"):
        slots["twostep.v1.Kv"].Ask("a", None)
    board.disconnect("it changes")
    with pytest.raises(Unavailable, match="it changes"):
        ask("a", None)


# ---- transports ------------------------------------------------------------------------------------------------------------


class Counted(OneSidedTransport):
    """Notes when it is started and closed."""

    def __init__(self, name: str) -> None:
        super().__init__(ArrayStore(np.zeros((8, 64), np.uint8)), 64, OneSidedHub(), worker_id="w", name=name)
        self.calls = ""

    async def start(self) -> None:
        self.calls += "s"
        await super().start()

    async def close(self) -> None:
        self.calls += "c"
        await super().close()


async def test_transports_go_on_in_the_other_role_but_for_those_of_one_role(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, ipc, new = Counted("ray"), Counted("cuda_ipc"), Counted("cuda_ipc")
    transports = Transports([ipc, ray])
    await transports.start()
    config = WorkerConfig(role="decode", runner="fake", fixed_roles=True)
    parts = TransportParts(config=config, worker_id="w", epoch=1, runner=make_runner(), carried=transports)
    with pytest.raises(SetupError, match="this worker has none"):
        make_transports(parts)
    await transports.start()
    assert (ipc.calls, ray.calls) == ("s", "s"), "nothing has changed"
    kind = replace(TRANSPORT_KINDS["cuda_ipc"], make=lambda parts: new)
    monkeypatch.setitem(TRANSPORT_KINDS, "cuda_ipc", kind)
    again = make_transports(parts)
    assert [again.get(name) for name in again.names] == [new, ray]
    await again.start()
    assert (ipc.calls, new.calls, ray.calls) == ("sc", "s", "s")
    await again.close()
    assert (ipc.calls, new.calls, ray.calls) == ("sc", "sc", "sc")


# ---- the engine ------------------------------------------------------------------------------------------------------------


def request(seq_id: str, length: int, max_tokens: int) -> EngineRequest:
    return EngineRequest(
        seq_id=seq_id,
        token_ids=tuple(prompt_of(length)),
        num_prompt_tokens=length,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        eos_token_ids=frozenset(),
        prefix_key=b"k",
    )


def run_to_end(engine: Engine) -> list[StepOutput]:
    outputs = []
    while engine.wait_for_work(0):
        outputs.append(engine.step())
    return outputs


def test_an_engine_takes_other_bounds_only_while_it_is_idle_and_keeps_its_prefixes() -> None:
    engine = Engine(make_runner(), EngineConfig(max_num_batched_tokens=64, max_num_seqs=8, hash_unit=8))
    bounds = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    engine.submit(request("a", 60, 4))
    assert not engine.reconfigure(**bounds)
    engine.step()
    assert not engine.reconfigure(**bounds)
    assert engine.max_num_batched_tokens == 64
    run_to_end(engine)
    # Held for a hand-over: its blocks are somebody's.
    engine.submit(request("h", 8, 4), hold=True)
    run_to_end(engine)
    assert not engine.reconfigure(**bounds)
    engine.release("h")
    found = set(engine.cached_prefixes())
    assert found
    assert engine.reconfigure(**bounds)
    assert set(engine.cached_prefixes()) == found
    engine.submit(request("b", 200, 2))
    outputs = run_to_end(engine)
    assert max(output.num_prefill_tokens for output in outputs) == 16
    assert outputs[0].progress[0].num_cached_tokens >= 56
    with pytest.raises(SetupError):
        engine.reconfigure(max_num_batched_tokens=0, max_num_seqs=4)
    engine.check_integrity()


# ---- metrics ---------------------------------------------------------------------------------------------------------------


def test_gauges_follow_the_role_and_counters_stay_where_they_were_counted() -> None:
    registry, steps = MetricsRegistry(), [0]
    idle = dict.fromkeys(("num_running", "num_waiting", "num_reserved", "num_held", "num_cached_blocks"), 0)
    engine = EngineMetrics(registry, role="prefill", stats=lambda: EngineStats(**idle, num_blocks=4, num_free_blocks=4, steps=steps[0]))
    worker = WorkerMetrics(registry, role="prefill")
    every = register_process(registry, "prefill"), engine, worker

    def serve(role: str, *, num_tokens: int, num_steps: int) -> dict[tuple[str, str, str], float]:
        """Serves and returns what is scraped after that, by name, role and the label beside it."""
        for metrics in every:
            metrics.serve(role)
        steps[0] += num_steps
        engine.on_step(StepOutput(step=1, workload=StepWorkload(prompt_tokens=num_tokens)))
        worker.set(ready=True, num_leases=1, oldest_lease_s=0.0, num_sequences=2, num_streams=0)
        return {
            (sample.name, sample.labels["role"], sample.labels.get("kind", "")): sample.value
            for family in text_string_to_metric_families(generate_latest(registry.collectors).decode())
            for sample in family.samples
            if "role" in sample.labels and not sample.name.endswith("_created")
        }

    def counted(found: dict[tuple[str, str, str], float]) -> list[float]:
        """Steps and tokens of either role."""
        names = ("twostep_engine_steps_total", ""), ("twostep_engine_tokens_total", "prefill")
        return [found[name, role, kind] for name, kind in names for role in ("prefill", "decode") if (name, role, kind) in found]

    assert counted(serve("prefill", num_tokens=10, num_steps=5))[0] == 5
    found = serve("decode", num_tokens=3, num_steps=2)
    assert counted(found) == [5, 2, 10, 3]
    for gauge in ("twostep_worker_ready", "twostep_worker_sequences", "twostep_num_requests_running", "twostep_process_info"):
        assert (gauge, "decode", "") in found
        assert (gauge, "prefill", "") not in found
    found = serve("prefill", num_tokens=1, num_steps=7)
    assert counted(found) == [12, 2, 11, 3]
    assert ("twostep_worker_ready", "decode", "") not in found
