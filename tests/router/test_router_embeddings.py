"""/v1/embeddings and Embed before prefill workers that play by script: what is asked of them, and what becomes of it when they fail."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from bare_deployment import MAX_MODEL_LEN, until
from batch_fakes import answers, ended, jsonl, submit
from http_fakes import open_client, open_http, told
from openai.types import CreateEmbeddingResponse
from router_fakes import Cluster, FakeDecode, FakePrefill, after, make_model_dir, refuse, vector_of

from router.placing.placement import NoPlacement, Placement, Shortage, place
from twostep.cluster.prediction import Candidate, PlacementRequest, Snapshot
from twostep.errors import SetupError
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.rpc.v1 import prefill_pb2

EMBED = "/v1/embeddings"
IDS = [7, 8, 9]


async def embedded(http: aiohttp.ClientSession, given: Any, status: int = 200, **options: Any) -> Any:
    found = await told(http, EMBED, {"model": "m", "input": given, **options}, status)
    if status == 200:
        if options.get("encoding_format") != "base64":  # which OpenAI's client unpacks before
            CreateEmbeddingResponse.model_validate(found)
        assert [each["index"] for each in found["data"]] == list(range(len(found["data"])))
        return [each["embedding"] for each in found["data"]]
    return found["error"]


# ---- what is asked and answered ----------------------------------------------------------------------------------------------


async def test_texts_and_ids_in_their_order(cluster: Cluster, prefill: FakePrefill, http: aiohttp.ClientSession) -> None:
    texts = ["the capital of France", "Paris", "the end of the answer"]
    ids = [cluster.tokenizer.encode(text).ids for text in texts]
    want = [vector_of(each) for each in ids]
    for given in (texts, ids):
        assert await embedded(http, given) == want
    assert await embedded(http, texts[0]) == await embedded(http, ids[0]) == want[:1]
    (packed,) = await embedded(http, texts[0], encoding_format="base64")
    assert base64.b64decode(packed) == struct.pack("<3f", *want[0])
    async with open_client(cluster) as client:
        answer = await client.embeddings.create(model="m", input=texts)
    assert [each.embedding for each in answer.data] == want
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    pooling = prefill.requests[-1].pooling
    assert (pooling.kind, pooling.dimensions, pooling.normalize) == (prefill_pb2.POOLING_LAST, 0, True)
    assert len({request.request_id for request in prefill.requests}) == len(prefill.requests)
    await cluster.all_free()


async def test_grpc_has_the_same(cluster: Cluster, prefill: FakePrefill) -> None:
    prefill.cached_tokens = 2
    async with cluster.serving():
        inputs = [pb.EmbedInput(text="Paris"), pb.EmbedInput(token_ids=pb.TokenIds(ids=IDS))]
        call = cluster.stub.Embed(pb.EmbedRequest(inputs=inputs, request_id="mine", normalize=False), timeout=60)
        answer = await call
        assert dict(await call.initial_metadata())["x-request-id"] == "mine"
        ids = cluster.tokenizer.encode("Paris").ids
        assert [list(each.values) for each in answer.embeddings] == [vector_of(ids), vector_of(IDS)]
        assert answer.usage.prompt_tokens == len(ids) + 3
        assert answer.usage.cached_tokens == min(2, len(ids)) + 2
        assert not prefill.requests[-1].pooling.normalize
        for wrong in (
            pb.EmbedRequest(),
            pb.EmbedRequest(inputs=[pb.EmbedInput()]),
            pb.EmbedRequest(inputs=[inputs[0]] * 2049),
            pb.EmbedRequest(inputs=inputs, truncate_prompt_tokens=0),
            pb.EmbedRequest(inputs=inputs, dimensions=2),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cluster.stub.Embed(wrong, timeout=60)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("given", "options", "param"),
    [
        ("", {}, "input"),
        ([], {}, "input"),
        ([[]], {}, "input[0]"),
        (["a", ""], {}, "input[1]"),
        (["a", [1]], {}, "input[1]"),
        ([1, "a"], {}, "input[1]"),
        ([1 << 30], {}, "input[0]"),
        (["a"] * 2049, {}, "input"),
        ([5] * (MAX_MODEL_LEN + 1), {}, None),
        ("word " * 3 * MAX_MODEL_LEN, {}, None),
        ("a", {"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
        ("a", {"dimensions": 2}, "dimensions"),
        ("a", {"encoding_format": "hex"}, "encoding_format"),
        ("a", {"embed_dtype": "float16"}, "embed_dtype"),
    ],
)
async def test_what_cannot_be_embedded(http: aiohttp.ClientSession, given: Any, options: dict[str, Any], param: str | None) -> None:
    error = await embedded(http, given, 400, **options)
    assert error["param"] == param
    assert (error["code"] == "context_length_exceeded") == (param is None)


async def test_of_several_inputs_it_is_said_which_one_is_too_long(http: aiohttp.ClientSession) -> None:
    long = "word " * 3 * MAX_MODEL_LEN
    for given, at in ((["a", long], 1), ([[5] * (MAX_MODEL_LEN + 1)], 0), ([IDS, IDS, [5] * (MAX_MODEL_LEN + 1)], 2)):
        error = await embedded(http, given, 400)
        assert (error["param"], error["code"]) == (f"input[{at}]", "context_length_exceeded")
        assert error["message"].startswith(f"input[{at}]: This model's maximum context length")


async def test_of_several_inputs_it_is_said_which_one_a_worker_refuses(cluster: Cluster, prefill: FakePrefill) -> None:
    prefill.hooks.append(refuse(grpc.StatusCode.INVALID_ARGUMENT, "no such token"))
    prefill.before_first.append(refuse(grpc.StatusCode.OUT_OF_RANGE, "not finite"))
    async with cluster.serving(), open_http(cluster) as http:
        refused = await embedded(http, [IDS], 400)
        assert (refused["param"], refused["message"].split(":")[0]) == ("input[0]", "input[0]")
        failed = await embedded(http, [IDS], 422)
        assert failed["message"].startswith("input[0]: ")


async def test_what_clients_get_wrong_is_counted_as_that(http: aiohttp.ClientSession) -> None:
    for given in ("", ["a", ""], [[5] * (MAX_MODEL_LEN + 1)]):
        await embedded(http, given, 400)
    metrics = await (await http.get("/metrics")).text()
    counted = [line for line in metrics.splitlines() if line.startswith("twostep_requests_total")]
    assert counted
    assert all('status="INVALID_ARGUMENT"' in line or 'status="OK"' in line or 'status="CANCELLED"' in line for line in counted), counted


async def test_other_refusals(http: aiohttp.ClientSession) -> None:
    await told(http, EMBED, {"model": "another", "input": "a"}, 404)
    await told(http, EMBED, {"model": "m"}, 400)


async def test_too_long_inputs_are_cut_on_demand(cluster: Cluster, http: aiohttp.ClientSession) -> None:
    text = "the capital of France is Paris, the end of the answer and so on"
    ids = cluster.tokenizer.encode(text).ids
    assert await embedded(http, [text, text * 9], truncate_prompt_tokens=4) == [vector_of(ids[:4])] * 2
    assert await embedded(http, [ids, IDS], truncate_prompt_tokens=4) == [vector_of(ids[-4:]), vector_of(IDS)]
    assert await embedded(http, [[5, *IDS] * MAX_MODEL_LEN], truncate_prompt_tokens=-1) == [[MAX_MODEL_LEN, 5, 9]]
    assert await embedded(http, "word " * 5 * MAX_MODEL_LEN, truncate_prompt_tokens=-1)
    assert await embedded(http, [[5] * MAX_MODEL_LEN]), "the whole context, without one for an answer"


async def test_what_the_directory_says(bare_model_dir: Path, cluster: Cluster, tmp_path: Path) -> None:
    directory = make_model_dir(tmp_path / "mean")
    config = json.loads((directory / "config.json").read_text()) | {"hidden_size": 3, "matryoshka_dimensions": [2, 3]}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "1_Pooling").mkdir()
    pooling = directory / "1_Pooling" / "config.json"
    pooling.write_text('{"pooling_mode_mean_tokens": true}')
    (directory / "modules.json").write_text(json.dumps([{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]))
    other = Cluster(directory, cluster.redis_server, tmp_path)
    try:
        prefill = await other.prefill()
        async with other.serving(), open_http(other) as http:
            assert await embedded(http, [IDS], dimensions=2) == [vector_of(IDS)[:2]]
            asked = prefill.requests[-1].pooling
            assert (asked.kind, asked.dimensions, asked.normalize) == (prefill_pb2.POOLING_MEAN, 2, False)
            await embedded(http, [IDS], normalize=True)
            assert prefill.requests[-1].pooling.normalize
            assert "2, 3" in (await embedded(http, [IDS], 400, dimensions=1))["message"]
            # It is ready without any worker that decodes: the directory is one of a model for embeddings.
            await until(lambda: other.router._ready(), "it is ready")
        (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 6, "do_lower_case": true}')
        async with other.serving(), open_http(other) as http:
            assert await embedded(http, ["The FOX"]) == [vector_of(other.tokenizer.encode("the fox").ids)]
            assert "6" in (await embedded(http, [[5] * 7], 400))["message"]
            assert await embedded(http, [[5, 6] * 7], truncate_prompt_tokens=-1) == [vector_of([5, 6] * 3)]
        pooling.write_text('{"pooling_mode_cls_token": true}')
        with pytest.raises(SetupError, match="pooling_mode_cls_token"):
            async with other.serving():
                pass
    finally:
        await other.close()


# ---- workers that fail ---------------------------------------------------------------------------------------------------------


async def test_a_worker_that_dies_half_way_is_another_one_s_work(cluster: Cluster) -> None:
    workers = [await cluster.prefill("p0"), await cluster.prefill("p1")]
    for worker in workers:
        worker.before_first.append(after(60.0))
    async with cluster.serving(), open_http(cluster) as http:
        call = asyncio.create_task(embedded(http, [IDS]))
        await until(cluster.held, "a worker has taken it")
        first, second = sorted(workers, key=lambda worker: not worker.held)
        second.before_first.clear()
        await first.die()
        assert await call == [vector_of(IDS)]
        (one,), (other,) = first.requests, second.requests
        assert (one.attempt, other.attempt) == (1, 2)
        assert cluster.router.book.requests()["recent"][0]["attempts"] == 2
    await cluster.all_free()


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_a_worker_that_refuses_is_passed_over(cluster: Cluster, code: grpc.StatusCode) -> None:
    workers = [await cluster.prefill("p0"), await cluster.prefill("p1")]
    for worker in workers:
        worker.hooks.append(refuse(code, "not now"))
    async with cluster.serving(), open_http(cluster) as http:
        assert await embedded(http, [IDS]) == [vector_of(IDS)]
        assert all(worker.requests for worker in workers)
    await cluster.all_free()


async def test_what_a_worker_has_against_an_input_is_the_client_s(cluster: Cluster, prefill: FakePrefill) -> None:
    prefill.hooks.append(refuse(grpc.StatusCode.INVALID_ARGUMENT, "no such token"))
    prefill.hooks.append(after(0.0))
    prefill.before_first.append(refuse(grpc.StatusCode.INVALID_ARGUMENT, "not finite"))
    async with cluster.serving(), open_http(cluster) as http:
        for message in ("no such token", "not finite"):
            assert message in (await embedded(http, [IDS], 400))["message"]
    assert len(prefill.requests) == 2


async def test_without_a_prefill_worker_there_is_none(cluster: Cluster, decode: FakeDecode) -> None:
    """However many decode."""
    async with cluster.serving(no_worker_grace=0.1), open_http(cluster) as http:
        message = (await embedded(http, [IDS], 503))["message"]
        assert all(word in message for word in ("no prefill worker", "start a prefill worker", "both roles", "--fixed-roles")), message
    assert not decode.requests


async def test_workers_of_an_older_version_are_not_asked(cluster: Cluster) -> None:
    old = await cluster.prefill("p0", embeds=False)
    async with cluster.serving(no_worker_grace=0.1), open_http(cluster) as http:
        assert "embeddings" in (await embedded(http, [IDS], 409))["message"]
        new = await cluster.prefill("p1")
        await cluster.seen()
        assert await embedded(http, [IDS]) == [vector_of(IDS)]
    assert (len(old.requests), len(new.requests)) == (0, 1)


async def test_time_is_up(cluster: Cluster, prefill: FakePrefill) -> None:
    prefill.before_first.append(after(60.0))
    async with cluster.serving(), open_http(cluster) as http:
        await embedded(http, [IDS], 504, timeout=0.2)
        await cluster.all_free()
    assert prefill.cancelled


async def test_a_client_that_goes_frees_all(cluster: Cluster, prefill: FakePrefill) -> None:
    prefill.before_first += [after(60.0)] * 3
    async with cluster.serving(), open_http(cluster) as http:
        call = asyncio.create_task(embedded(http, [IDS] * 3))
        await until(lambda: len(prefill.held) == 3, "all are under way")
        assert len(cluster.router.book.requests()["live"]) == 3
        call.cancel()
        await cluster.all_free()
        assert not cluster.router.admission.num_inflight


async def test_the_first_that_fails_ends_the_others(cluster: Cluster, prefill: FakePrefill) -> None:
    prefill.before_first += [after(60.0), refuse(grpc.StatusCode.INVALID_ARGUMENT, "not finite"), after(60.0)]
    async with cluster.serving(), open_http(cluster) as http:
        await embedded(http, [IDS] * 3, 400)
        await cluster.all_free()


# ---- what it leaves behind -----------------------------------------------------------------------------------------------------


async def test_it_is_in_the_book_the_metrics_and_the_demand(cluster: Cluster, prefill: FakePrefill) -> None:
    async with cluster.serving(), open_http(cluster) as http:
        await embedded(http, [IDS, IDS])
        (one, _) = cluster.router.book.requests()["recent"]
        assert (one["prefill_worker"], one["decode_worker"], one["prompt_tokens"], one["output_tokens"]) == ("p0", "", 3, 0)
        assert list(one["phases"]) == ["route", "queue", "prefill"]
        metrics = await (await http.get("/metrics")).text()
        assert "twostep_prompt_tokens_total 6.0" in metrics
        demand = sum(totals.prompt_tokens for totals in cluster.router.demand.totals().values())
        assert demand == 6


async def test_a_batch_of_them(cluster: Cluster, prefill: FakePrefill, decode: FakeDecode, tmp_path: Path) -> None:
    async with cluster.serving(batch_dir=tmp_path / "batches"), open_client(cluster) as client:
        bodies = [{"model": "m", "input": given} for given in ([IDS, IDS], [5], "")]
        lines = [{"custom_id": str(i), "method": "POST", "url": EMBED, "body": body} for i, body in enumerate(bodies)]
        batch = await ended(client, (await submit(client, jsonl(*lines), endpoint=EMBED)).id)
        told = [each["response"]["body"] for each in await answers(client, batch.output_file_id)]
        assert [[each["embedding"] for each in body["data"]] for body in told] == [[vector_of(IDS)] * 2, [vector_of([5])]]
        (failed,) = await answers(client, batch.error_file_id)
        assert (failed["custom_id"], failed["response"]["status_code"]) == ("2", 400)
        assert {request.request_class for request in prefill.requests} == {pb.REQUEST_CLASS_BATCH}
        assert batch.usage is not None
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (7, 0)


# ---- where it is placed --------------------------------------------------------------------------------------------------------


def test_only_workers_that_hand_over_are_chosen(cluster: Cluster) -> None:
    records = [dataclasses.replace(cluster.template, worker_id=name, role="prefill") for name in ("p0", "p1")]
    candidates = [Candidate(record=records[0], queued_tokens=4000), Candidate(record=records[1])]
    decode = [Candidate(record=dataclasses.replace(cluster.template, worker_id="d0", role="decode", local_prefill=True))]
    demand = PlacementRequest(request_id="r", num_tokens=100, max_new_tokens=0, embeds=True)
    placed = place(Snapshot(prefill=candidates, decode=decode), demand)
    assert isinstance(placed, Placement)
    assert placed.computing.worker_id == "p1"
    found = {
        "none": place(Snapshot(prefill=[], decode=decode), demand),
        "full": place(Snapshot(prefill=[dataclasses.replace(each, no_prompts=True) for each in candidates], decode=decode), demand),
        "large": place(Snapshot(prefill=candidates, decode=decode), dataclasses.replace(demand, num_tokens=MAX_MODEL_LEN + 1)),
    }
    shortages = {name: each.shortage for name, each in found.items() if isinstance(each, NoPlacement)}
    assert shortages == {"none": Shortage.MISSING, "full": Shortage.EXCLUDED, "large": Shortage.TOO_LARGE}
    whole = place(Snapshot(prefill=candidates, decode=[]), dataclasses.replace(demand, num_tokens=MAX_MODEL_LEN))
    assert isinstance(whole, Placement), "nothing is left for an answer"
