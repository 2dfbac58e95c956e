"""A worker that comes back with another role is a new life of it: links, registry and hints follow."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_fakes import SECRET, Cluster, until

from router.request.cleanup import Cleanup
from router.workers.pool import WorkerPool
from router.workers.prefix_index import WorkerLife
from twostep.cluster.records import WorkerRecord
from twostep.errors import TwostepError
from twostep.rpc.call_signing import CallSigner


class User:
    def __init__(self) -> None:
        self.lost: list[tuple[WorkerLife, str]] = []

    def on_worker_lost(self, life: WorkerLife, error: TwostepError) -> None:
        self.lost.append((life, error.message))


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    made = WorkerPool(router_id="r", signer=CallSigner(SECRET, "r"), cleanup=Cleanup())
    yield made
    await made.close()


def described(cluster: Cluster, **options: Any) -> WorkerRecord:
    values: dict[str, Any] = {"worker_id": "w", "role": "prefill", "address": "127.0.0.1:1", "epoch": 5}
    return dataclasses.replace(cluster.template, **(values | options))


def roles(pool: WorkerPool) -> dict[str, set[int]]:
    """Epochs of the lives that may get work."""
    snapshot = pool.snapshot()
    return {
        "prefill": {c.record.epoch for c in snapshot.prefill if not c.record.draining},
        "decode": {c.record.epoch for c in snapshot.decode if not c.record.draining},
    }


@pytest.mark.parametrize(("before", "after"), [("prefill", "decode"), ("decode", "prefill")])
async def test_a_new_life_in_the_other_role_takes_the_name(cluster: Cluster, pool: WorkerPool, before: str, after: str) -> None:
    user = User()
    pool.sync([described(cluster, role=before)])
    links = {**pool.prefill, **pool.decode}
    old = links[WorkerLife("w", 5)]
    old.users.add(user)
    assert roles(pool) == {before: {5}, after: set()}

    # It drains: what runs there is let alone, nothing new is sent.
    pool.sync([described(cluster, role=before, draining=True, ready=False)])
    assert roles(pool) == {before: set(), after: set()}
    assert not user.lost

    pool.sync([described(cluster, role=after, epoch=6)])
    assert roles(pool) == {before: set(), after: {6}}
    await until(lambda: bool(user.lost), "who has something there is told")
    assert user.lost == [(WorkerLife("w", 5), f"{before} worker w is gone")]
    # And back again, as often as anybody likes.
    for epoch, role in ((7, before), (8, after), (9, before)):
        pool.sync([described(cluster, role=role, epoch=epoch)])
        assert roles(pool)[role] == {epoch}
        assert len(pool.prefill) + len(pool.decode) == 1


async def test_a_role_without_a_new_epoch_is_nobody_s(cluster: Cluster, pool: WorkerPool, caplog: pytest.LogCaptureFixture) -> None:
    pool.sync([described(cluster)])
    pool.sync([described(cluster, role="decode")])
    assert roles(pool) == {"prefill": set(), "decode": set()}
    assert "without a new epoch" in caplog.text
    pool.sync([described(cluster, role="decode", epoch=6)])
    assert roles(pool) == {"prefill": set(), "decode": {6}}
