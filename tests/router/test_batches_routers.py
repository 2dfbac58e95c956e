"""Batches of several routers on one directory: one runs each, and another goes on when it goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions
from batch_fakes import answers, ended, jsonl, line, submit
from http_fakes import open_client, url, when
from openai import AsyncOpenAI
from router_fakes import Cluster, after, until

from router.batches.service import BatchLease
from router.server import Router
from twostep.keys.api_key_file import put_in_file, remove_from_file
from twostep.keys.api_keys import Limits, make_key

NUM = 12


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis is given up after a second; here it is this process that may stand still for longer."""
    monkeypatch.setattr("twostep.cluster.connection._TIMEOUT_S", 60.0)


@asynccontextmanager
async def second_router(cluster: Cluster, **options: Any) -> AsyncIterator[Router]:
    router = Router(cluster.config(**options))
    await router.start()
    try:
        yield router
    finally:
        await router.drain(0.0)


class NoRedis:
    async def eval(self, *_: Any) -> None:
        raise redis.exceptions.ConnectionError("cut off")


@pytest.mark.parametrize("death", ["drained", "cut off"])
async def test_another_router_goes_on(cluster: Cluster, tmp_path: Path, death: str) -> None:
    prefill, _ = await cluster.prefill(), await cluster.decode()
    prefill.before_first.extend([after(0)] * 5 + [after(600)] * 2)
    options: dict[str, Any] = {"batch_dir": tmp_path / "batches", "batch_concurrency": 2}
    async with cluster.serving(**options), open_client(cluster) as client:
        first = cluster.router.batches
        assert first is not None
        first._leases._lease_s = 1000.0
        batch = await submit(client, jsonl(*(line(str(index)) for index in range(NUM))))
        await until(lambda: len(prefill.requests) == 7, "five are answered and two under way")
        async with second_router(cluster, **options) as second:
            assert second.batches is not None
            take, taken = second.batches._leases.take, list[BatchLease | None]()

            async def told(name: str) -> BatchLease | None:
                taken.append(await take(name))
                return taken[-1]

            second.batches._leases.take = told  # type: ignore[method-assign]
            second.batches._look.set()
            await until(lambda: bool(taken), "the second one has tried")
            assert taken[0] is None, "the first one has it"
            if death == "drained":
                await first.drain(0.0)
            else:
                ((run, _),) = first._runs.values()
                lease: Any = run._lease
                # For the last time, and not for long.
                lease._lease_s = 1.0
                await lease.renew()
                lease._redis = NoRedis()
            batch = await ended(client, batch.id)
            assert batch.status == "completed"
            output = await answers(client, batch.output_file_id)
            assert [each["custom_id"] for each in output] == [str(index) for index in range(NUM)]
            assert batch.request_counts is not None
            assert batch.request_counts.completed == NUM
        # What was on disk was not asked again.
        assert len(prefill.requests) == NUM + 2


async def test_batches_run_in_the_name_of_the_key_that_asked(cluster: Cluster, tmp_path: Path) -> None:
    prefill, _ = await cluster.prefill(), await cluster.decode()
    path = tmp_path / "keys"
    # No more than two requests at once: the batch waits for its own.
    told, key = make_key(name="mine", limits=Limits(max_concurrent=2))
    other_told, other = make_key(name="other")
    for each in (key, other):
        put_in_file(path, each)
    async with cluster.serving(batch_dir=tmp_path / "batches", api_keys_file=path):
        base = f"{url(cluster)}/v1"
        async with (
            AsyncOpenAI(base_url=base, api_key=told, max_retries=0) as mine,
            AsyncOpenAI(base_url=base, api_key=other_told) as theirs,
        ):
            batch = await ended(mine, (await submit(mine, jsonl(*(line(str(index)) for index in range(4))))).id)
            assert batch.request_counts is not None
            assert batch.request_counts.completed == 4
            assert (await theirs.batches.list()).data == []
            account = cluster.router.access.account(key.id)
            assert account.num_calls == 0
            assert account.usage()["tokens_this_day"] > 0
            # Its key is revoked while the batch runs.
            gate = asyncio.Event()
            prefill.before_first.extend([after(0)] * 2 + [when(gate)] * 8)
            batch = await submit(mine, jsonl(*(line(str(index)) for index in range(10))))
            await until(lambda: len(prefill.requests) >= 4 + 4, "two are answered, and two take their time")
            remove_from_file(path, key.id)
            await until(lambda: key.id not in {each.key.id for each in cluster.router.access.accounts()}, "it is unknown")
            gate.set()
            store = cluster.router.batches
            assert store is not None
            await until(lambda: not store.num_running, "it is over")
        stored = store.store.get(next(iter((tmp_path / "batches").glob("*/batches"))).parent.name, batch.id)
        assert stored.state is not None
        assert stored.state.status.value == "completed"
        assert (stored.state.tally.completed, stored.state.tally.failed) == (4, 6)
        await cluster.all_free()


async def test_a_batch_that_a_router_takes_as_it_drains_is_anybodys_at_once(cluster: Cluster, tmp_path: Path) -> None:
    async with cluster.serving(batch_dir=tmp_path / "batches"), open_client(cluster) as client:
        batches = cluster.router.batches
        assert batches is not None
        # Nothing lapses by itself while this test runs.
        batches._leases._lease_s = 1000.0
        take, taken = batches._leases.take, list[BatchLease | None]()

        async def late(name: str) -> BatchLease | None:
            taken.append(await take(name))
            await batches.drain(0.0)
            return taken[-1]

        batches._leases.take = late  # type: ignore[method-assign]
        batch = await submit(client, jsonl(line("x")))
        await until(lambda: bool(taken), "it is taken")
        assert taken[0] is not None
        async with asyncio.timeout(60):
            while await take(batch.id) is None:
                pass
        assert not taken[0].held
        assert not batches.num_running
