"""A model whose encoder reads the prompt: what the router adds to the prompt is the workers' matter, not the client's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from bare_deployment import make_bare_model_dir
from http_fakes import TEXT, open_http, streamed, told
from router_fakes import Cluster, FakePrefill, RedisServer

START = 3
# Of one prompt in a step of the second prefill worker, with the token that the decoder begins with.
ROOM = 6


@pytest.fixture
async def cluster(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Cluster]:
    directory = make_bare_model_dir(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "t5", "decoder_start_token_id": START}))
    built = Cluster(directory, redis_server, tmp_path)
    yield built
    await built.close()


@pytest.fixture
async def prefill(cluster: Cluster) -> FakePrefill:
    return await cluster.prefill(max_prompt_tokens=3)


@pytest.fixture
async def http(cluster: Cluster, prefill: FakePrefill) -> AsyncIterator[aiohttp.ClientSession]:
    await cluster.decode(max_prompt_tokens=ROOM)
    async with cluster.serving(), open_http(cluster) as session:
        yield session


async def test_clients_are_told_their_own_prompt(prefill: FakePrefill, http: aiohttp.ClientSession) -> None:
    given = {"prompt": [5, 6], "max_tokens": 9, "return_token_ids": True}
    whole = await told(http, TEXT, given)
    (choice,) = whole["choices"]
    assert choice["prompt_token_ids"] == [5, 6]
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (2, 11)
    again = await told(http, TEXT, given | {"prompt": choice["prompt_token_ids"]})
    assert again["choices"][0]["token_ids"] == choice["token_ids"]
    usage_asked = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = await streamed(http, TEXT, given | usage_asked)
    assert [part["prompt_token_ids"] for event in events for part in event["choices"] if "prompt_token_ids" in part] == [[5, 6]]
    assert {event["usage"]["prompt_tokens"] for event in events} == {2}
    assert [list(request.token_ids) for request in prefill.requests] == [[5, 6, START]] * 3


async def test_a_prompt_goes_where_a_step_has_room_for_it(cluster: Cluster, prefill: FakePrefill, http: aiohttp.ClientSession) -> None:
    other = await cluster.prefill("p1", max_prompt_tokens=ROOM)
    await cluster.seen()
    await told(http, TEXT, {"prompt": [5] * (ROOM - 1), "max_tokens": 2})
    assert (len(prefill.requests), len(other.requests)) == (0, 1)
    refused = (await told(http, TEXT, {"prompt": [5] * ROOM, "max_tokens": 2}, status=400))["error"]
    assert refused["code"] == "context_length_exceeded"
    assert f"its {ROOM} tokens" in refused["message"]
    assert "--max-num-batched-tokens" in refused["message"]
    assert len(other.requests) == 1


async def test_what_an_encoder_cannot_do_is_refused_by_the_router(
    cluster: Cluster, prefill: FakePrefill, http: aiohttp.ClientSession
) -> None:
    for asked in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
        error = (await told(http, TEXT, {"prompt": [5, 6], "max_tokens": 2} | asked, status=400))["error"]
        assert "encoder" in error["message"]
        assert prefill.record.worker_id not in error["message"]
    error = (await told(http, "/v1/embeddings", {"input": [5, 6]}, status=400))["error"]
    assert "encoder" in error["message"]
    assert not prefill.requests
