"""One router and either client: what is sent, what comes back, and how an answer ends."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from both_clients import until
from pydantic import BaseModel, ValidationError
from scripted_server import WORDS, ScriptedInference, serving

import twostep
from twostep import AsyncClient, Client, Message, ToolCall
from twostep.rpc.v1 import inference_pb2 as pb

Server = tuple[ScriptedInference, str]


def test_pieces_then_the_end(client: Any) -> None:
    generation = client.generate("ok", logprobs=1, request_id="r1")
    assert generation.finish_reason is None
    with pytest.raises(twostep.InvalidRequest, match="not ended yet"):
        _ = generation.usage
    for name in ("text", "reasoning", "tool_calls", "token_ids"):
        # An empty answer would look like one that was read.
        with pytest.raises(twostep.InvalidRequest, match=r"result\(\)"):
            getattr(generation, name)
    pieces = list(generation)
    assert [(p.text, p.position) for p in pieces] == list(zip(WORDS, range(3), strict=True))
    assert pieces[1].token_ids == (101,)
    assert (pieces[0].logprobs[0].logprob, pieces[0].logprobs[0].top[0].token_id) == (-0.5, 7)
    assert (generation.text, generation.finish_reason, generation.request_id) == ("one two three", "stop", "r1")
    assert (generation.usage.cached_tokens, generation.transfer.transport) == (2, "ray")
    assert generation.phases.ttft_s == pytest.approx(0.013)
    assert list(generation) == []
    assert repr(generation) == "Generation(request_id='r1', num_tokens=3, stop, text='one two three')"


def test_result_is_the_whole_answer(client: Any) -> None:
    completion = client.chat([Message("user", "hi"), {"role": "user", "content": "ok"}]).result()
    assert (completion.text, completion.token_ids) == ("one two three", (100, 101, 102))
    assert (completion.request_id, completion.finish_reason, completion.attempts) == ("made-by-router", "stop", 1)


def test_reasoning_stands_apart(client: Any) -> None:
    answer = client.chat([Message("user", "think")])
    assert [(piece.reasoning, piece.text) for piece in answer] == [("let me ", ""), ("see", ""), ("", "42")]
    completion = answer.result()
    assert (completion.reasoning, completion.text, len(completion.token_ids)) == ("let me see", "42", 3)


def test_models_tokenize_and_status(client: Any) -> None:
    (model,) = client.models()
    assert (model.name, model.max_model_len, model.decode_workers) == ("scripted", 512, 2)
    tokens = client.tokenize("abc")
    assert (tokens.token_ids, len(tokens)) == ((97, 98, 99), 3)
    status = client.status()
    assert (status.model, status.ready, [w.worker_id for w in status.workers]) == ("scripted", True, ["prefill-0", "decode-0", "decode-1"])
    assert status.workers[0].transports == ("cuda_ipc", "ray")
    assert status.workers[1].num_free_blocks == 400
    assert (status.load.ttft_s.p95, status.load.slo_attainment) == pytest.approx((0.31, 0.985))


def test_embeddings(client: Any, server: Server) -> None:
    found = client.embed(["abc", [1, 2]], dimensions=4, normalize=False, truncate_prompt_tokens=-1, request_class="batch", model="scripted")
    assert found.vectors == ((97.0, 98.0, 99.0), (1.0, 2.0))
    assert (found.usage.prompt_tokens, found.usage.cached_tokens) == (5, 1)
    sent = server[0].embeds[-1]
    assert (sent.dimensions, sent.normalize, sent.truncate_prompt_tokens) == (4, False, -1)
    assert (sent.request_class, sent.model) == (pb.REQUEST_CLASS_BATCH, "scripted")
    assert client.embed("a", ttft_ms=None).vectors == ((97.0,),)
    assert not any(map(server[0].embeds[-1].HasField, ("dimensions", "normalize", "truncate_prompt_tokens", "ttft_ms")))
    server[0].calls.clear()
    assert client.embed("refuse once").vectors[0][0] == ord("r")
    assert server[0].calls["embed"] == 2


@pytest.mark.parametrize("given", [[], [[1, -1]], [[1.5]], [7], [b"bytes", None]])
def test_what_cannot_be_embedded_never_leaves(client: Any, server: Server, given: Any) -> None:
    with pytest.raises((twostep.InvalidRequest, TypeError)):
        client.embed(given)
    assert not server[0].embeds


def test_options_that_embeddings_have_not(client: Any, server: Server) -> None:
    with pytest.raises(TypeError, match="temperature"):
        client.embed("a", temperature=0.0)
    with pytest.raises(twostep.InvalidRequest, match="dimensions"):
        client.embed("a", dimensions="many")
    assert not server[0].embeds


def test_status_without_targets_or_work_has_none(client: Any, server: Server) -> None:
    server[0].cluster.load.ClearField("slo_attainment")
    server[0].cluster.load.ClearField("prefill_decode_load_ratio")
    load = client.status().load
    assert (load.slo_attainment, load.prefill_decode_load_ratio) == (None, None)


def test_statuses_become_our_errors(client: Any, server: Server) -> None:
    with pytest.raises(twostep.InvalidRequest, match="temperature is -1"):
        client.generate("invalid").result()
    with pytest.raises(twostep.NotFound):
        client.generate("ok", model="other").result()
    prompt = "x" * (5 << 20)
    with pytest.raises(twostep.InvalidRequest, match="too large"):
        client.generate(prompt).result()
    assert server[0].calls[prompt] == 0, "it is the caller's mistake, and not repeated"


def test_a_prompt_that_is_too_long_says_by_how_much(client: Any) -> None:
    with pytest.raises(twostep.ContextExceeded) as caught:
        client.generate("long").result()
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.max_model_len) == (600, None, 512)


# ---- calls, several answers, and forms ---------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "weather"}}


def test_calls_come_apart_from_the_text_unless_asked_otherwise(client: Any) -> None:
    answer = client.chat("call", tools=[TOOL])
    assert [[call.arguments for call in piece.tool_calls] for piece in answer] == [["", '{"city":'], [' "Bonn"}']]
    completion = answer.result()
    assert completion.tool_calls == answer.tool_calls == (ToolCall("weather", '{"city": "Bonn"}', "call-1"),)
    assert (completion.text, completion.finish_reason) == ("I look.", "tool_calls")
    assert completion.message == Message("assistant", "I look.", tool_calls=completion.tool_calls)
    in_text = client.chat("call", tools=[TOOL], tool_calls="text").result()
    assert (in_text.text, in_text.tool_calls, in_text.finish_reason) == ("<call>", (), "stop")


@pytest.mark.parametrize("prompt", ["ok", "crash"])
def test_several_answers(client: Any, server: Server, prompt: str) -> None:
    completion = client.generate(prompt, n=3, request_id="r").result()
    assert [(choice.index, choice.text, choice.token_ids) for choice in completion.choices] == [
        (index, "one two three", (100 * index, 100 * index + 1, 100 * index + 2)) for index in range(3)
    ]
    assert (completion.text, completion.usage.prompt_tokens, completion.usage.completion_tokens) == ("one two three", 5, 9)
    assert completion.resumes == (prompt == "crash")
    if completion.resumes:
        begun = {answer.index: list(answer.token_ids) for answer in server[0].requests[-1].begun_answers}
        assert begun == {1: [100, 101], 2: [200, 201]}, "that of index 0 had ended"
        assert server[0].requests[-1].sampling.seed == 1234


@pytest.mark.parametrize("asked", [{"n": 2}, {"tools": [TOOL]}])
def test_an_old_router_gives_no_wrong_answer(client: Any, server: Server, asked: Any) -> None:
    server[0].api_level = 0
    with pytest.raises(twostep.Incompatible, match="older than this client"):
        client.chat("endless", **asked).result()
    until(lambda: server[0].cancelled["endless"] == 1, client)
    assert client.chat("ok", tools=[TOOL], tool_calls="text").result().text == "one two three"


class City(BaseModel):
    city: str
    people: int


def test_an_answer_is_what_was_asked_for(client: Any, server: Server) -> None:
    assert client.chat("form", response_format=City).result().parsed == City(city="Bonn", people=330000)
    assert client.chat("form", json_schema=City, n=1).result().choices[0].parsed.city == "Bonn"
    assert client.chat("form").result().parsed is None
    assert json.loads(server[0].requests[0].sampling.grammar.json_schema) == City.model_json_schema()
    cut = client.chat("cut", response_format=City).result()
    with pytest.raises(twostep.AnswerCutOff, match="max_tokens") as caught:
        _ = cut.parsed
    assert caught.value.text == cut.text == "one two three"
    with pytest.raises(ValidationError):
        _ = client.chat("ok", response_format=City).result().parsed


# ---- retries and resumes ---------------------------------------------------------------------------------------------------


def test_refused_requests_are_retried_so_often(client: Any, server: Server) -> None:
    completion = client.generate("refuse-2").result()
    assert (completion.text, completion.resumes, server[0].calls["refuse-2"]) == ("one two three", 0, 3)
    with pytest.raises(twostep.ResourceExhausted):
        client.generate("refuse-99").result()
    assert server[0].calls["refuse-99"] == 4
    assert client.tokenize("refuse once").token_ids == tuple(b"refuse once")
    assert server[0].calls["tokenize"] == 2


def test_retries_are_bounded_by_time(kind: Any, server: Server) -> None:
    with kind(server[1], max_retries=1000) as client, pytest.raises((twostep.ResourceExhausted, twostep.DeadlineExceeded)):
        client.generate("refuse-999", timeout=0.5).result()
    assert server[0].calls["refuse-999"] <= 10, "each pause is 0.05 s at least"


def test_a_refusal_says_when_to_come_again(kind: Any, server: Server) -> None:
    with kind(server[1], timeout=60) as client:
        assert client.generate("later-200").result().text == "one two three"
        with pytest.raises(twostep.ResourceExhausted) as caught:
            client.generate("later-30000", timeout=29).result()
        assert caught.value.retry_after_s == 30.0, "no longer than anybody is given, and yet longer than there is"
        assert server[0].calls["later-30000"] == 1
        with pytest.raises(twostep.ResourceExhausted) as caught:
            client.generate("never").result()
        assert (caught.value.hopeless, server[0].calls["never"]) == (True, 1)
    with kind(server[1], max_retries=0) as client:
        for prompt, seconds in (("later-1234", 1.234), ("refuse-9", None)):
            with pytest.raises(twostep.ResourceExhausted) as caught:
                client.generate(prompt).result()
            assert caught.value.retry_after_s == seconds


def test_a_stream_that_breaks_carries_what_arrived_and_is_not_repeated(client: Any, server: Server) -> None:
    with pytest.raises(twostep.StreamBroken, match="broke off after 2 tokens: the decode worker was lost") as caught:
        client.generate("break").result()
    assert isinstance(caught.value, twostep.Unavailable)
    assert (caught.value.text, caught.value.token_ids) == ("one two ", (100, 101))
    assert server[0].calls["break"] == 1


def test_a_stream_that_breaks_goes_on_where_the_server_can(client: Any, server: Server) -> None:
    generation = client.generate("crash", max_tokens=9, temperature=0.7, stop="END")
    assert [p.position for p in generation] == [0, 1, 2]
    completion = generation.result()
    assert (completion.text, completion.resumes, generation.seed) == ("one two three", 1, 1234)
    first, second = server[0].requests[-2:]
    assert list(second.resume_token_ids) == [100, 101]
    assert (second.sampling.seed, second.request_id) == (1234, "made-by-router")
    del second.resume_token_ids[:]
    second.sampling.ClearField("seed")
    second.request_id = ""
    assert second == first, "nothing else has changed"


def test_only_breaks_without_progress_between_them_count(kind: Any, server: Server) -> None:
    with kind(server[1], timeout=60, max_retries=1) as client:
        completion = client.generate("stumble").result()
    assert (completion.text, completion.resumes) == ("one two three", 2)


@pytest.mark.parametrize("declined", [{"resume": False}, {"migrate": False}])
def test_going_on_can_be_declined_and_done_by_hand(client: Any, server: Server, declined: dict[str, bool]) -> None:
    with pytest.raises(twostep.StreamBroken) as caught:
        client.generate("crash", **declined).result()
    assert server[0].requests[-1].no_migration == (not declined.get("migrate", True))
    broken = caught.value
    assert (broken.token_ids, broken.seed) == ((100, 101), 1234)
    with pytest.raises(twostep.InvalidRequest, match="seed"):
        client.generate("crash", resume_token_ids=broken.token_ids)
    rest = client.generate("crash", resume_token_ids=broken.token_ids, seed=broken.seed).result()
    assert (rest.text, rest.token_ids) == ("three", (102,))


@pytest.mark.parametrize("prompt", ["noend", "skip"])
def test_a_server_that_breaks_the_contract(client: Any, prompt: str) -> None:
    with pytest.raises(twostep.StreamBroken):
        client.generate(prompt).result()


# ---- its end ---------------------------------------------------------------------------------------------------------------


def test_deadline(client: Any) -> None:
    with pytest.raises(twostep.DeadlineExceeded):
        client.generate("silent", timeout=0.3).result()
    with pytest.raises(twostep.DeadlineExceeded) as caught:
        client.generate("late").result()
    assert (caught.value.text, caught.value.token_ids, caught.value.seed) == ("one two ", (100, 101), 1234)


def test_leaving_the_loop_or_the_context_cancels_the_call(client: Any, server: Server) -> None:
    generation = client.generate("endless")
    for _ in generation:
        break
    with client.generate("endless") as left:
        next(iter(left))
    until(lambda: server[0].cancelled["endless"] == 2, client)
    with pytest.raises(twostep.Cancelled):
        list(generation)


def test_a_closed_client_says_so(kind: Any, server: Server) -> None:
    with kind(server[1]) as client:
        client.close()
        for ask in (client.models, lambda: client.generate("ok")):
            with pytest.raises(twostep.InvalidRequest, match="closed"):
                ask()


def test_nobody_there(kind: Any) -> None:
    with kind("127.0.0.1:9", max_retries=0) as client:
        for ask in (client.models, lambda: client.generate("ok").result()):
            with pytest.raises(twostep.Unavailable, match=r"127\.0\.0\.1:9.*twostep up"):
                ask()


async def test_the_http_port_says_what_it_is() -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    _, port = runner.addresses[0]
    async with AsyncClient(f"127.0.0.1:{port}", timeout=60) as client:
        for ask in (client.models(), client.generate("ok").result()):
            with pytest.raises(twostep.InvalidRequest, match=rf"127\.0\.0\.1:{port} is an HTTP port.*127\.0\.0\.1:50051"):
                await ask
    await runner.cleanup()


def test_long_requests_are_compressed_if_asked(kind: Any, server: Server) -> None:
    with pytest.raises(twostep.InvalidRequest, match="compression is 'zip'"):
        Client(server[1], compression="zip")  # type: ignore[arg-type]
    with kind(server[1], compression="gzip", timeout=60) as client:
        prompt = "a long prompt " * 1000
        assert client.generate(prompt).result().text == "one two three"
        assert server[0].requests[-1].text == prompt
        assert len(client.tokenize(prompt)) == len(prompt)


# ---- threads: the blocking client ------------------------------------------------------------------------------------------


def test_cancel_from_another_thread(server: Server) -> None:
    with Client(server[1], timeout=600) as client, ThreadPoolExecutor(1) as threads:
        generation = client.generate("silent")
        answer = threads.submit(generation.result)
        until(lambda: server[0].calls["silent"] == 1)
        generation.cancel()
        with pytest.raises(twostep.Cancelled):
            answer.result(60)
        until(lambda: server[0].cancelled["silent"] == 1)


def test_cancel_does_not_wait_for_the_next_try(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()

    def long_delay(attempts: object, error: object, *, elsewhere: bool) -> float:
        waiting.set()
        return 1000.0

    monkeypatch.setattr("twostep.client._channel.Attempts.delay_s", long_delay)
    with Client(server[1], timeout=2000) as client, ThreadPoolExecutor(1) as threads:
        generation = client.generate("refuse-1000")
        answer = threads.submit(generation.result)
        assert waiting.wait(60)
        generation.cancel()
        with pytest.raises(twostep.Cancelled):
            answer.result(60)


def test_dropping_a_generation_cancels(server: Server) -> None:
    with Client(server[1], timeout=60) as client:
        dropped = client.generate("endless")
        # Until it is there: a call cancelled before the server has heard of it is no call.
        until(lambda: server[0].calls["endless"] == 1)
        del dropped
        until(lambda: server[0].cancelled["endless"] == 1)


class _Interrupted:
    """A call whose next() Ctrl-C strikes while grpc's code holds the lock that its own thread needs for every call of the channel."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __next__(self) -> None:
        self._call._state.condition.acquire()
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def test_after_an_interruption_the_next_call_takes_another_connection(server: Server) -> None:
    with Client(server[1], timeout=60) as client:
        answer = client.generate("endless")
        call: Any = answer._call
        try:
            answer._call = cast(Any, _Interrupted(call))
            with pytest.raises(KeyboardInterrupt):
                answer.result()
            found: list[str] = []
            # grpc's thread being stuck, no deadline would end the call.
            asking = threading.Thread(target=lambda: found.append(client.generate("ok").result().text), daemon=True)
            asking.start()
            asking.join(60.0)
            assert found == ["one two three"]
            # gRPC tells of a call's end from a thread of its own.
            until(lambda: [state.num_open for state in client.routers] == [0])
        finally:
            call._state.condition.release()


def test_many_at_once_leave_no_threads(server: Server) -> None:
    before = threading.active_count()
    with Client(server[1], timeout=60) as client, ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda i: client.generate(f"many {i}").result().text, range(64)))
        open_ones = [client.generate(f"many {i}") for i in range(32)]
        texts += [g.result().text for g in open_ones]
    assert set(texts) == {"one two three"}
    until(lambda: threading.active_count() <= before)


# ---- tasks: the asyncio client ---------------------------------------------------------------------------------------------


@pytest.fixture
async def async_server() -> AsyncIterator[Server]:
    servicer = ScriptedInference()
    async with serving(servicer) as target:
        yield servicer, target


@pytest.mark.parametrize("ending", ["task", "cancel", "drop"])
async def test_a_task_that_ends_otherwise_ends_its_call(async_server: Server, ending: str) -> None:
    servicer, target = async_server
    async with AsyncClient(target, timeout=60) as client, asyncio.timeout(60):
        generation = client.generate("silent")
        task = asyncio.create_task(generation.result()) if ending != "drop" else None
        while not servicer.calls["silent"]:  # noqa: ASYNC110  the server's side
            await asyncio.sleep(0.01)
        if task is not None:
            task.cancel() if ending == "task" else generation.cancel()
            with pytest.raises(asyncio.CancelledError if ending == "task" else twostep.Cancelled):
                await task
        del generation
        while not servicer.cancelled["silent"]:  # noqa: ASYNC110  the server's side
            await asyncio.sleep(0.01)


async def test_many_at_once(async_server: Server) -> None:
    async with AsyncClient(async_server[1], timeout=60) as client:
        answers = await asyncio.gather(*(client.generate(f"many {i}").result() for i in range(100)))
    assert {a.text for a in answers} == {"one two three"}
    assert sum(async_server[0].calls.values()) == 100


# ---- what is written about it ------------------------------------------------------------------------------------------------


def test_the_readmes_example_runs(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the SDK; its page has more (test_client_docs.py), and another one is for OpenAI's client."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "from twostep" in block)
    exec(compile(re.sub(r"localhost:50051|router-[ab]:50051", server[1], example), "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("one two threestop Usage(prompt_tokens=5")


def test_curated_names() -> None:
    for name in twostep.__all__:
        assert getattr(twostep, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        _ = twostep.Clinet
