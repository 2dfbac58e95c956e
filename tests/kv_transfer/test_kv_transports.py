"""Which transports a worker makes of --kv-transfer, and which of them a lease goes by."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.pool_side import PoolSide
from kv_transfer.telemetry import TransferTelemetry
from kv_transfer.transports import TRANSPORT_KINDS, TransportKind, TransportParts, Transports, make_transports
from prefill_worker.publisher import Publisher
from twostep.engine.fake import FakeRunner
from twostep.errors import Incompatible, InvalidRequest, SetupError, Unavailable
from twostep.settings.readers import kv_transports
from twostep.worker.config import WorkerConfig


def parts_of(run_dir: Path = Path("/nowhere"), **options: Any) -> TransportParts:
    runner = FakeRunner(num_blocks=8, block_size=4, vocab_size=10, max_model_len=32)
    config = WorkerConfig(role="prefill", run_dir=run_dir, **({"runner": "fake"} | options))
    return TransportParts(config=config, worker_id="w", epoch=1, runner=runner)


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("ray", "ray"), ("nixl, ray", "nixl,ray"), ("ray,cuda_ipc", "ray,cuda_ipc")])
def test_lists_of_transports(text: str, value: str) -> None:
    assert kv_transports(text) == value


def test_auto_takes_what_can_be_and_says_why_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kv_transfer.transports")
    assert make_transports(parts_of(tmp_path)).names == ("ray",)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "no KV transfer by cuda_ipc here",
        "no KV transfer by nixl here",
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_transfer": "cuda_ipc"}, "leave it out"),
        ({"kv_transfer": "nixl,ray"}, "leave it out"),
        ({"kv_transfer": "cuda_ipc", "runner": "model", "device": "cpu"}, "has none"),
        ({"kv_transfer": "nixl", "runner": "model", "device": "cuda:0", "tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
        ({"kv_transfer": "local"}, "one process"),
        ({"kv_transfer": "ray,local"}, "one process"),
    ],
)
def test_what_was_asked_for_by_name_must_be(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        make_transports(parts_of(tmp_path, **options))


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(parts: TransportParts) -> Any:
        raise ImportError("No module named 'nixl'")

    monkeypatch.setitem(TRANSPORT_KINDS, "nixl", TransportKind(make=missing))
    with pytest.raises(SetupError, match="No module named 'nixl'"):
        make_transports(parts_of(tmp_path, kv_transfer="nixl"))
    assert make_transports(parts_of(tmp_path)).names == ("ray",)


def sized(name: str, *, ready: bool, most: int, copies_out: bool) -> Any:
    """As far as a choice looks at it. `most`: bytes of a lease, 0 any."""
    return SimpleNamespace(name=name, ready=ready, max_lease_bytes=most, copies_out=copies_out, why_not_ready="")


def publisher_by(*transports: Any) -> Publisher:
    """One that only chooses: it has no engine."""
    telemetry = TransferTelemetry()
    return Publisher(cast(PoolSide, None), Transports(transports), lambda *_: None, telemetry, block_bytes=1, wire="raw", lease_ttl_s=1.0)


names = st.sampled_from(["a", "b", "c", "d"])
some = st.lists(st.builds(sized, names, ready=st.booleans(), most=st.integers(0, 3), copies_out=st.booleans()), unique_by=lambda t: t.name)


@given(some, st.lists(names, unique=True), st.integers(0, 4))
def test_the_readers_first_that_can_be_used_is_chosen(transports: Sequence[Any], offered: list[str], num_bytes: int) -> None:
    publisher = publisher_by(*transports)
    by_name = {t.name: t for t in transports}
    asked = offered or [t.name for t in transports if t.copies_out]
    usable = [
        n
        for n in asked
        if n in by_name and by_name[n].ready and (not by_name[n].max_lease_bytes or num_bytes <= by_name[n].max_lease_bytes)
    ]
    if usable:
        assert publisher.choose(offered, (), num_bytes) == (by_name[usable[0]], "raw")
        publisher.check_size(num_bytes)
    else:
        with pytest.raises(Unavailable if set(asked) & set(by_name) else Incompatible):
            publisher.choose(offered, (), num_bytes)


def test_what_no_transport_can_take_is_refused_before_any_compute() -> None:
    ready = [sized("a", ready=True, most=10, copies_out=True), sized("b", ready=True, most=20, copies_out=True)]
    publisher = publisher_by(*ready, sized("c", ready=False, most=0, copies_out=False))
    publisher.check_size(20)
    with pytest.raises(InvalidRequest):
        publisher.check_size(21)
    with pytest.raises(Unavailable):
        publisher_by(sized("c", ready=False, most=0, copies_out=False)).check_size(1)
