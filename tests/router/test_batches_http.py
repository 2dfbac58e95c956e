"""Files and batches as OpenAI's client has them, against routers and scripted workers; and routers that go on with each other's batches."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest
from batch_fakes import answers, ended, jsonl, line, submit
from http_fakes import CHAT, TEXT, open_client, open_http, served, told, url, when
from openai import AsyncOpenAI
from openai.types import Batch, FileObject
from router_fakes import Cluster, after, refuse, until
from scraping import scrape

from router.batches.service import BatchLease
from router.server import Router
from twostep.keys.api_key_file import put_in_file, remove_from_file
from twostep.keys.api_keys import Limits, make_key


def counts(batch: Batch) -> tuple[str, int, int, int]:
    """Its status, requests, those answered and those that failed."""
    assert batch.request_counts is not None
    return batch.status, batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed


async def test_a_batch_from_its_file_to_its_answers(cluster: Cluster, tmp_path: Path) -> None:
    async with served(cluster, batch_dir=tmp_path / "batches"), open_client(cluster) as client:
        content = jsonl(*(line(f"request {index}") for index in range(40)), line("broken", temperature=-1), line("stream", stream=True))
        batch = await submit(client, content, metadata={"night": "first"})
        assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"night": "first"}, CHAT)
        assert (batch.expires_at or 0) - batch.created_at == 86400
        batch = await ended(client, batch.id)
        assert counts(batch) == ("completed", 42, 40, 2)
        assert all((batch.in_progress_at, batch.finalizing_at, batch.completed_at))
        told = await answers(client, batch.output_file_id)
        assert [each["custom_id"] for each in told] == [f"request {index}" for index in range(40)], "in the order of the input"
        for each in told:
            assert (each["error"], each["id"][:10], each["response"]["status_code"]) == (None, "batch_req_", 200)
            body = each["response"]["body"]
            assert body["object"] == "chat.completion"
            assert body["choices"][0]["message"]["content"] == cluster.text_of(cluster.expected(4))
        assert batch.usage is not None
        assert batch.usage.output_tokens == 160
        assert batch.usage.input_tokens == sum(each["response"]["body"]["usage"]["prompt_tokens"] for each in told)
        failed = {each["custom_id"]: each["response"] for each in await answers(client, batch.error_file_id)}
        assert failed.keys() == {"broken", "stream"}
        assert failed["broken"]["status_code"] == 400
        assert failed["broken"]["body"]["error"]["param"] == "temperature"
        # Everything went in the batch class, whatever the body says.
        assert {request.request_class for worker in cluster.workers for request in worker.requests} == {3}
        # The output is a file like others.
        listed = {each.id: each.purpose for each in (await client.files.list()).data}
        assert listed == {batch.input_file_id: "batch", batch.output_file_id: "batch_output", batch.error_file_id: "batch_output"}
        assert batch.output_file_id is not None
        assert (await client.files.delete(batch.output_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(batch.output_file_id)
        await cluster.all_free()


async def test_a_batch_of_completions_outlives_its_file(cluster: Cluster, tmp_path: Path) -> None:
    async with served(cluster, batch_dir=tmp_path / "batches"), open_client(cluster) as client:
        content = b"\xef\xbb\xbf" + jsonl(line("a", TEXT), line("b", TEXT, n=2)) + b"\n\n"
        expires: Any = {"anchor": "created_at", "seconds": 7200}
        file = await client.files.create(file=("in.jsonl", content), purpose="batch", expires_after=expires)
        assert abs((file.expires_at or 0) - file.created_at - 7200) <= 1
        assert (await client.files.retrieve(file.id)).filename == "in.jsonl"
        assert (await client.files.content(file.id)).content == content
        batch = await client.batches.create(input_file_id=file.id, endpoint=TEXT, completion_window="24h")  # type: ignore[arg-type]
        await client.files.delete(file.id)
        batch = await ended(client, batch.id)
        bodies = [each["response"]["body"] for each in await answers(client, batch.output_file_id)]
        assert [len(body["choices"]) for body in bodies] == [1, 2]


async def test_what_is_no_batch_fails_and_says_where(cluster: Cluster, tmp_path: Path) -> None:
    lines = [
        b'{"custom_id": "a"',
        b"[]",
        json.dumps(line("ok")).encode(),
        json.dumps(line("ok")).encode(),
        json.dumps(line("u", TEXT)).encode(),
        json.dumps({**line("m"), "method": "GET"}).encode(),
        json.dumps({**line("b"), "body": "x"}).encode(),
        json.dumps({**line("b"), "custom_id": 7}).encode(),
        b"\xff\xfe",
        b"[" * 100_000,
    ]
    async with cluster.serving(batch_dir=tmp_path / "batches"), open_client(cluster) as client:
        batch = await ended(client, (await submit(client, b"\n".join(lines))).id)
        assert (batch.status, bool(batch.failed_at)) == ("failed", True)
        assert batch.errors is not None
        assert [(each.line, each.code) for each in batch.errors.data or ()] == [
            *((1, "invalid_json_line"), (2, "invalid_json_line"), (4, "duplicate_custom_id"), (5, "invalid_url"), (6, "invalid_method")),
            *((7, "invalid_body"), (8, "invalid_custom_id"), (9, "invalid_json_line"), (10, "too_many_values")),
        ]
        empty = await ended(client, (await submit(client, b"\n\n")).id)
        assert empty.errors is not None
        assert [each.code for each in empty.errors.data or ()] == ["empty_file"]


async def test_what_clients_get_wrong(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        cluster.serving(batch_dir=tmp_path / "batches", max_file_bytes=2000),
        open_http(cluster) as http,
        open_client(cluster) as client,
    ):

        async def refused(awaitable: Any, status: int, param: str | None = None) -> None:
            async with awaitable as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["param"], bool(error["message"])) == (status, param, True), error

        def form(*fields: tuple[str, str], file: bytes | None = b"{}", **options: Any) -> aiohttp.FormData:
            made = aiohttp.FormData()
            for name, value in fields:
                made.add_field(name, value)
            if file is not None:
                made.add_field("file", file, filename="x", **options)
            return made

        batch, expires = ("purpose", "batch"), "expires_after[seconds]"
        no_file = form(batch, ("a", "b"), file=None)
        no_file.add_field("x", b"y", filename="z")
        for made, status, param in (
            (form(), 400, "purpose"),
            (form(("purpose", "fine-tune")), 400, "purpose"),
            (no_file, 400, "file"),
            (form(batch, file=b""), 400, "file"),
            (form(batch, file=b"x" * 2001), 413, "file"),
            (form(batch, (expires, "3599")), 400, expires),
            (form(batch, ("expires_after[anchor]", "now")), 400, "expires_after[anchor]"),
            (form(batch, ("note", "x" * 5000)), 400, None),
            (form(*[("a", "b")] * 20), 400, None),
        ):
            await refused(http.post("/v1/files", data=made), status, param)
        await refused(http.post("/v1/files", json={}), 415)
        for raw, kind in (
            (b"", "multipart/form-data; boundary=x"),
            (b"nothing of the kind", "multipart/form-data; boundary=x"),
            (b"--x\r\n\r\n", "multipart/form-data; boundary=x"),
            (b"--x\r\nContent-Disposition: form-data; name=file\r\n\r\n{}\r\n", "multipart/form-data; boundary=x"),
            (b"--x--", "multipart/form-data"),
            (b"--x\r\n" * 3, f"multipart/form-data; boundary={'x' * 200}"),
            (b"--x\r\n" + b"A: b\r\n" * 1000 + b"\r\n", "multipart/form-data; boundary=x"),
        ):
            await refused(http.post("/v1/files", data=raw, headers={"content-type": kind}), 400)
        assert not list((tmp_path / "batches").glob("*/files/*")), "nothing is kept of those"
        assert not list((tmp_path / "batches").glob("*/uploads/*"))

        file = (await client.files.create(file=b"{}", purpose="batch")).id
        good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        for change, param in (
            ({"endpoint": "/v1/moderations"}, "endpoint"),
            ({"completion_window": "1h"}, "completion_window"),
            ({"input_file_id": 7}, "input_file_id"),
            ({"metadata": {"a": 1}}, "metadata.a"),
            ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
            ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ):
            await refused(http.post("/v1/batches", json=good | change), 400, param)
        for missing in ("file-" + "0" * 32, "../../etc/passwd", "file-x"):
            await refused(http.post("/v1/batches", json=good | {"input_file_id": missing}), 404)
        for path in ("/v1/files/x", "/v1/files/..%2f..%2fsecret", "/v1/files/x/content", "/v1/batches/x", "/v1/batches/batch_" + "0" * 32):
            await refused(http.get(path), 404)
        await refused(http.post("/v1/batches/x/cancel"), 404)
        await refused(http.delete("/v1/files/x"), 404)
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("limit=101", "limit"), ("limit=" + "9" * 50, "limit")):
            await refused(http.get(f"/v1/batches?{query}"), 400, param)
        await refused(http.get("/v1/files?order=random"), 400, "order")


async def test_without_a_directory_the_endpoints_say_so(cluster: Cluster) -> None:
    async with cluster.serving(), open_client(cluster) as client:
        with pytest.raises(openai.NotFoundError, match="--batch-dir"):
            await client.batches.list()


async def test_lists_come_in_pages(cluster: Cluster, tmp_path: Path) -> None:
    async with cluster.serving(batch_dir=tmp_path / "batches"), open_client(cluster) as client, open_http(cluster) as http:
        batches = [await submit(client, jsonl(line(str(index)))) for index in range(5)]
        seen = [each.id async for each in client.batches.list(limit=2)]
        assert seen == [each.id for each in reversed(batches)], "newest first, each once"
        files = [each.input_file_id for each in batches]
        assert [each.id async for each in client.files.list(limit=3)] == files[::-1]
        assert [each.id async for each in client.files.list(limit=2, order="asc")] == files
        assert [each.id async for each in client.files.list(purpose="batch_output")] == []
        page = await told(http, "/v1/batches?limit=2")
        assert set(page) == {"object", "data", "first_id", "last_id", "has_more"}
        assert (len(page["data"]), page["first_id"], page["has_more"]) == (2, batches[-1].id, True)
        for kind, path in ((Batch, f"batches/{batches[0].id}"), (FileObject, f"files/{files[0]}")):
            assert not kind.model_validate(await told(http, f"/v1/{path}")).model_extra


async def test_a_cancel_keeps_what_is_answered(cluster: Cluster, tmp_path: Path) -> None:
    prefill, _ = await cluster.prefill(), await cluster.decode()
    async with cluster.serving(batch_dir=tmp_path / "batches", batch_concurrency=2), open_client(cluster) as client:
        prefill.before_first.extend([after(0)] * 4 + [after(600)] * 2)
        batch = await submit(client, jsonl(*(line(str(index)) for index in range(20))))
        await until(lambda: len(prefill.requests) == 6, "four are answered and two under way")
        seen = scrape(cluster.router.metrics_port)
        assert (seen("twostep_batch_jobs_open"), seen("twostep_batch_jobs")) == (1, 1)
        assert seen("twostep_batch_jobs", state="in_progress") == 1
        assert seen("twostep_batch_requests_total", status="ok") == 4
        batch = await client.batches.cancel(batch.id)
        assert (batch.status, bool(batch.cancelling_at)) == ("cancelling", True)
        batch = await ended(client, batch.id)
        assert (counts(batch), bool(batch.cancelled_at)) == (("cancelled", 20, 4, 16), True)
        done = [each["custom_id"] for each in await answers(client, batch.output_file_id)]
        undone = await answers(client, batch.error_file_id)
        assert sorted([*done, *(each["custom_id"] for each in undone)], key=int) == [str(index) for index in range(20)]
        assert {each["error"]["code"] for each in undone} == {"batch_cancelled"}
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel((await ended(client, (await submit(client, b"x")).id)).id)
        seen = scrape(cluster.router.metrics_port)
        found = {status: seen("twostep_batch_requests_total", status=status) for status in ("ok", "failed", "unanswered")}
        assert found == {"ok": 4, "failed": 0, "unanswered": 16}

        def jobs_ended() -> list[float | None]:
            seen = scrape(cluster.router.metrics_port)
            return [seen("twostep_batch_jobs_ended_total", status=status) for status in ("completed", "failed", "cancelled", "expired")]

        # Clients may know of an end before it is counted.
        await until(lambda: jobs_ended() == [0, 1, 1, 0], "both are counted")
        await cluster.all_free()


async def test_no_room_and_lost_workers_are_waited_out(cluster: Cluster, tmp_path: Path) -> None:
    prefill, _ = await cluster.prefill(), await cluster.decode()
    # More at once than the router takes; workers that refuse; one failure that would end a client's request.
    prefill.hooks.extend([refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")] * 3 + [refuse(grpc.StatusCode.INTERNAL, "a bug")])
    async with cluster.serving(batch_dir=tmp_path / "batches", max_inflight=1, max_waiting=0), open_client(cluster) as client:
        batch = await ended(client, (await submit(client, jsonl(*(line(str(index)) for index in range(8))))).id)
        assert counts(batch) == ("completed", 8, 8, 0)
        assert (scrape(cluster.router.metrics_port)("twostep_batch_request_retries_total") or 0) >= 4


async def test_the_window_is_over(cluster: Cluster, tmp_path: Path) -> None:
    prefill, _ = await cluster.prefill(), await cluster.decode()
    prefill.before_first.extend([after(0)] * 2 + [after(600)] * 2)
    async with cluster.serving(batch_dir=tmp_path / "batches", batch_concurrency=2), open_client(cluster) as client:
        batch = await submit(client, jsonl(*(line(str(index)) for index in range(6))))
        await until(lambda: len(prefill.requests) == 4, "two are answered and two under way")
        (run,) = (run for run, _ in cluster.router.batches._runs.values())  # type: ignore[union-attr]
        run._asked = dataclasses.replace(run._asked, expires=run._asked.created)
        batch = await ended(client, batch.id)
        assert (batch.status, bool(batch.expired_at)) == ("expired", True)
        assert len(await answers(client, batch.output_file_id)) == 2
        assert {each["error"]["code"] for each in await answers(client, batch.error_file_id)} == {"batch_expired"}


async def test_tenants_do_not_see_each_other(cluster: Cluster, tmp_path: Path) -> None:
    async with served(cluster, batch_dir=tmp_path / "batches"), open_client(cluster) as client:
        mine, theirs = (client.with_options(default_headers={"x-twostep-tenant": name}) for name in ("a", "b"))
        batch = await ended(mine, (await submit(mine, jsonl(line("x")))).id)
        assert batch.output_file_id is not None
        assert (await theirs.batches.list()).data == (await theirs.files.list()).data == []
        for call in (
            theirs.batches.retrieve(batch.id),
            theirs.batches.cancel(batch.id),
            theirs.files.retrieve(batch.input_file_id),
            theirs.files.content(batch.output_file_id),
            theirs.files.delete(batch.output_file_id),
            theirs.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),  # type: ignore[arg-type]
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert len((await mine.files.list()).data) == 2
        assert {request.tenant for worker in cluster.workers for request in worker.requests if hasattr(request, "tenant")} <= {"a"}


NUM = 12


@asynccontextmanager
async def second_router(cluster: Cluster, **options: Any) -> AsyncIterator[Router]:
    router = Router(cluster.config(**options))
    await router.start()
    try:
        yield router
    finally:
        await router.drain(0.0)


@pytest.mark.parametrize("death", ["drained", "cut off"])
async def test_another_router_goes_on(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str) -> None:
    prefill, _ = await cluster.prefill(), await cluster.decode()
    prefill.before_first.extend([after(0)] * 5 + [after(600)] * 2)
    options: dict[str, Any] = {"batch_dir": tmp_path / "batches", "batch_concurrency": 2}
    taken = watch_leases(monkeypatch)
    async with cluster.serving(**options), open_client(cluster) as client:
        first = cluster.router.batches
        assert first is not None
        batch = await submit(client, jsonl(*(line(str(index)) for index in range(NUM))))
        await until(lambda: len(prefill.requests) == 7, "five are answered and two under way")
        async with second_router(cluster, **options):
            await until(lambda: len(taken) > 1, "the second one has tried")
            assert [got for _, got in taken[:2]] == [True, False], "the first one has it"
            if death == "drained":
                await first.drain(0.0)
            else:
                # No network is cut here: its lease goes, and it gets no other.
                lease = taken[0][0]
                monkeypatch.setattr(lease, "renew", lease.release)
                await lease.release()
            batch = await ended(client, batch.id)
            assert counts(batch) == ("completed", NUM, NUM, 0)
            output = await answers(client, batch.output_file_id)
            assert [each["custom_id"] for each in output] == [str(index) for index in range(NUM)]
        # Lines whose answers were on disk were not asked again.
        assert len(prefill.requests) == NUM + 2


def watch_leases(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BatchLease, bool]]:
    """Leases that routers ask for from now on, and whether they get them; none lapses by itself."""
    take, taken = BatchLease.take, list[tuple[BatchLease, bool]]()

    async def told(lease: BatchLease) -> bool:
        taken.append((lease, await take(lease)))
        return taken[-1][1]

    monkeypatch.setattr(BatchLease, "take", told)
    monkeypatch.setattr("router.batches.service.LEASE_S", 1000.0)
    return taken


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
            assert counts(batch) == ("completed", 4, 4, 0)
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


async def test_a_batch_that_a_router_takes_as_it_drains_is_anybodys_at_once(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = watch_leases(monkeypatch)
    take = BatchLease.take

    async def late(lease: BatchLease) -> bool:
        got = await take(lease)
        await batches.drain(0.0)
        return got

    async with cluster.serving(batch_dir=tmp_path / "batches"), open_client(cluster) as client:
        assert cluster.router.batches is not None
        batches = cluster.router.batches
        with monkeypatch.context() as patched:
            patched.setattr(BatchLease, "take", late)
            batch = await submit(client, jsonl(line("x")))
            await until(lambda: bool(taken), "it is taken")
        assert taken[0][1]
        await until(lambda: not taken[0][0].held(), "it is given back")
        async with asyncio.timeout(60):
            while not await BatchLease(cluster.redis, batch.id, "another").take():
                pass
        assert not batches.num_running
