"""The blocking client against a real server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from scripted_server import WORDS, ScriptedInference, serving_in_thread

import twostep
from twostep import Client, Message


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[ScriptedInference, str]]:
    servicer = ScriptedInference()
    with serving_in_thread(servicer) as target:
        yield servicer, target


@pytest.fixture
def client(server: tuple[ScriptedInference, str]) -> Iterator[Client]:
    with Client(server[1], timeout=60) as client:
        yield client


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_pieces_then_the_end(client: Client) -> None:
    generation = client.generate("ok", logprobs=1, request_id="r1")
    assert generation.finish_reason is None
    with pytest.raises(twostep.InvalidRequest, match="not ended yet"):
        _ = generation.usage
    pieces = list(generation)
    assert [p.text for p in pieces] == list(WORDS)
    assert [p.position for p in pieces] == [0, 1, 2]
    assert pieces[1].token_ids == (101,)
    assert pieces[0].logprobs[0].top[0].token_id == 7
    assert generation.text == "one two three"
    assert generation.finish_reason == "stop"
    assert generation.usage.cached_tokens == 2
    assert generation.transfer.transport == "ray"
    assert generation.phases.ttft_s == pytest.approx(0.013)
    assert generation.request_id == "r1"
    assert list(generation) == []


def test_result_is_the_whole_answer(client: Client) -> None:
    completion = client.chat([Message("user", "hi"), {"role": "user", "content": "ok"}]).result()
    assert completion.text == "one two three"
    assert completion.token_ids == (100, 101, 102)
    assert completion.request_id == "made-by-router"
    assert completion.finish_reason == "stop"
    assert completion.attempts == 1


def test_what_is_sent(client: Client, server: tuple[ScriptedInference, str]) -> None:
    client.generate(
        token_ids=[1, 2, 3],
        model="scripted",
        cache_salt="s",
        max_tokens=9,
        temperature=0.0,
        stop="END",
        stop_token_ids=[4],
        ignore_eos=True,
        seed=-5,
    ).result()
    request = server[0].requests[-1]
    assert list(request.token_ids.ids) == [1, 2, 3]
    assert (request.model, request.cache_salt) == ("scripted", "s")
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.ignore_eos) == (9, 0.0, -5, True)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["END"], [4])
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({}, "either a prompt or token_ids"),
        ({"prompt": "a", "token_ids": [1]}, "either a prompt or token_ids"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": [1, -2]}, "-2"),
        ({"token_ids": [1 << 32]}, "4294967296"),
        ({"token_ids": ["x"]}, "'x'"),
        ({"prompt": "a\ud800b"}, "lone surrogate"),
        ({"prompt": b"bytes"}, "bytes"),
        ({"prompt": "a", "stop": ["\udfff"]}, "lone surrogate"),
        ({"prompt": "a", "max_tokens": 1 << 70}, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "stop_token_ids": [1 << 70]}, "stop_token_ids"),
        ({"prompt": "a", "timeout": -1}, "timeout"),
        ({"prompt": "a", "timeout": float("nan")}, "timeout"),
    ],
)
def test_bad_input_never_leaves(client: Client, server: tuple[ScriptedInference, str], arguments: dict[str, object], message: str) -> None:
    before = len(server[0].requests)
    with pytest.raises(twostep.InvalidRequest, match=message):
        client.generate(**arguments)  # type: ignore[arg-type]
    assert len(server[0].requests) == before


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user"}, [{"role": "user"}], [{"role": "user", "content": "\udc80"}], [None]])
def test_bad_messages(client: Client, messages: object) -> None:
    with pytest.raises(twostep.InvalidRequest, match="messages"):
        client.chat(messages)  # type: ignore[arg-type]


def test_unknown_option(client: Client) -> None:
    with pytest.raises(TypeError, match="max_token;"):
        client.generate("a", max_token=3)  # type: ignore[call-arg]


def test_statuses_become_our_errors(client: Client) -> None:
    with pytest.raises(twostep.InvalidRequest, match="temperature is -1"):
        client.generate("invalid").result()
    with pytest.raises(twostep.NotFound, match="not served here"):
        client.generate("ok", model="other").result()


def test_too_large_a_message_is_the_callers_mistake_and_not_retried(client: Client, server: tuple[ScriptedInference, str]) -> None:
    prompt = "x" * (5 << 20)
    with pytest.raises(twostep.InvalidRequest, match="too large"):
        client.generate(prompt).result()
    assert server[0].calls[prompt] == 0


def test_refused_requests_are_retried(client: Client, server: tuple[ScriptedInference, str]) -> None:
    assert client.generate("refuse-2").result().text == "one two three"
    assert server[0].calls["refuse-2"] == 3


def test_retries_are_bounded_by_count(client: Client, server: tuple[ScriptedInference, str]) -> None:
    with pytest.raises(twostep.ResourceExhausted, match="no worker has room"):
        client.generate("refuse-99").result()
    assert server[0].calls["refuse-99"] == 4


def test_retries_are_bounded_by_time(server: tuple[ScriptedInference, str]) -> None:
    with (
        Client(server[1], max_retries=1000) as client,
        pytest.raises((twostep.ResourceExhausted, twostep.DeadlineExceeded)),
    ):
        client.generate("refuse-999", timeout=0.5).result()
    # Each pause is 0.05 s at least.
    assert server[0].calls["refuse-999"] <= 10


def test_unary_retries(client: Client, server: tuple[ScriptedInference, str]) -> None:
    server[0].calls["tokenize"] = 0
    assert client.tokenize("refuse once").token_ids == tuple(b"refuse once")
    assert server[0].calls["tokenize"] == 2


def test_a_stream_that_breaks_carries_what_arrived_and_is_not_repeated(client: Client, server: tuple[ScriptedInference, str]) -> None:
    with pytest.raises(twostep.Unavailable, match="broke off after 2 tokens: the decode worker was lost") as caught:
        client.generate("break").result()
    assert isinstance(caught.value, twostep.StreamBroken)
    assert caught.value.text == "one two "
    assert caught.value.token_ids == (100, 101)
    assert server[0].calls["break"] == 1


def test_a_stream_that_breaks_goes_on_where_the_server_can(client: Client, server: tuple[ScriptedInference, str]) -> None:
    generation = client.generate("crash", max_tokens=9, temperature=0.7, stop="END")
    pieces = list(generation)
    assert [p.position for p in pieces] == [0, 1, 2]
    assert generation.result().text == "one two three"
    assert (generation.result().resumes, generation.seed) == (1, 1234)
    first, second = server[0].requests[-2:]
    assert list(second.resume_token_ids) == [100, 101]
    assert (second.sampling.seed, second.request_id) == (1234, "made-by-router")
    del second.resume_token_ids[:]
    second.sampling.ClearField("seed")
    second.request_id = ""
    assert second == first, "nothing else has changed"


def test_only_breaks_without_progress_between_them_count(server: tuple[ScriptedInference, str]) -> None:
    with Client(server[1], timeout=60, max_retries=1) as client:
        completion = client.generate("stumble").result()
    assert (completion.text, completion.resumes) == ("one two three", 2)


def test_cancel_does_not_wait_for_the_next_try(server: tuple[ScriptedInference, str], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("declined", [{"resume": False}, {"migrate": False}])
def test_going_on_can_be_declined_and_done_by_hand(
    client: Client, server: tuple[ScriptedInference, str], declined: dict[str, bool]
) -> None:
    with pytest.raises(twostep.StreamBroken) as caught:
        client.generate("crash", **declined).result()  # type: ignore[arg-type]
    assert server[0].requests[-1].no_migration == (not declined.get("migrate", True))
    broken = caught.value
    assert (broken.token_ids, broken.seed) == ((100, 101), 1234)
    with pytest.raises(twostep.InvalidRequest, match="seed"):
        client.generate("crash", resume_token_ids=broken.token_ids)
    rest = client.generate("crash", resume_token_ids=broken.token_ids, seed=broken.seed).result()
    assert (rest.text, rest.token_ids) == ("three", (102,))


def test_routers_stand_in_for_each_other(server: tuple[ScriptedInference, str]) -> None:
    with Client(["127.0.0.1:9", server[1]], timeout=60) as client:
        assert client.generate("ok").result().text == "one two three"
        # It stays with the one that answers.
        before = server[0].calls["ok"]
        assert client.generate("ok").result().text == "one two three"
        assert server[0].calls["ok"] == before + 1
        assert client.models()[0].name == "scripted"
        assert repr(client).startswith(f"Client(['127.0.0.1:9', '{server[1]}']")
    with pytest.raises(twostep.InvalidRequest, match="no target"):
        Client([])


def test_long_requests_are_compressed_if_asked(server: tuple[ScriptedInference, str]) -> None:
    with pytest.raises(twostep.InvalidRequest, match="compression is 'zip'"):
        Client(server[1], compression="zip")  # type: ignore[arg-type]
    with Client(server[1], compression="gzip", timeout=60) as client:
        prompt = "a long prompt " * 1000
        assert client.generate(prompt).result().text == "one two three"
        assert server[0].requests[-1].text == prompt
        assert len(client.tokenize(prompt)) == len(prompt)


@pytest.mark.parametrize("prompt", ["noend", "skip"])
def test_a_server_that_breaks_the_contract(client: Client, prompt: str) -> None:
    with pytest.raises(twostep.StreamBroken):
        client.generate(prompt).result()


def test_deadline(server: tuple[ScriptedInference, str]) -> None:
    # The server answers after a minute, and the client's own timeout is longer: only the call's own comes before.
    with Client(server[1], timeout=600) as client, pytest.raises(twostep.DeadlineExceeded):
        client.generate("silent", timeout=0.3).result()


def test_leaving_the_loop_cancels_the_call(client: Client, server: tuple[ScriptedInference, str]) -> None:
    before = server[0].cancelled["endless"]
    generation = client.generate("endless")
    for _ in generation:
        break
    until(lambda: server[0].cancelled["endless"] == before + 1)
    with pytest.raises(twostep.Cancelled):
        list(generation)


def test_cancel_from_another_thread() -> None:
    # A server of its own: what other tests left there may be cancelled at any moment.
    servicer = ScriptedInference()
    with serving_in_thread(servicer) as target, Client(target, timeout=600) as client, ThreadPoolExecutor(1) as threads:
        generation = client.generate("silent")
        answer = threads.submit(generation.result)
        until(lambda: servicer.calls["silent"] == 1)
        generation.cancel()
        with pytest.raises(twostep.Cancelled):
            answer.result(60)
        until(lambda: servicer.cancelled["silent"] == 1)


def test_dropping_or_leaving_a_generation_cancels(client: Client, server: tuple[ScriptedInference, str]) -> None:
    called, before = server[0].calls["endless"], server[0].cancelled["endless"]
    next(iter(client.generate("endless")))
    with client.generate("endless") as generation:
        next(iter(generation))
    dropped = client.generate("endless")
    # Until it is there: a call cancelled before the server has heard of it is no call.
    until(lambda: server[0].calls["endless"] == called + 3)
    del dropped
    until(lambda: server[0].cancelled["endless"] == before + 3)


class _Interrupted:
    """A call whose next() Ctrl-C strikes while grpc's code holds the lock that its own thread needs for every call of the channel."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __next__(self) -> None:
        self._call._state.condition.acquire()
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def test_after_an_interruption_the_next_call_takes_another_connection(client: Client) -> None:
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


def test_many_at_once_leave_no_threads(server: tuple[ScriptedInference, str]) -> None:
    before = threading.active_count()
    with Client(server[1], timeout=60) as client, ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda i: client.generate(f"many {i}").result().text, range(64)))
        open_ones = [client.generate(f"many {i}") for i in range(32)]
        texts += [g.result().text for g in open_ones]
    assert set(texts) == {"one two three"}
    until(lambda: threading.active_count() <= before)


def test_a_closed_client_says_so(server: tuple[ScriptedInference, str]) -> None:
    client = Client(server[1])
    client.close()
    with pytest.raises(twostep.InvalidRequest, match="closed"):
        client.models()
    with pytest.raises(twostep.InvalidRequest, match="closed"):
        client.generate("ok")


def test_models_and_tokenize(client: Client) -> None:
    (model,) = client.models()
    assert (model.name, model.max_model_len, model.decode_workers) == ("scripted", 512, 2)
    tokens = client.tokenize("abc")
    assert tokens.token_ids == (97, 98, 99)
    assert len(tokens) == 3


def test_nobody_there() -> None:
    with Client("127.0.0.1:9", max_retries=0) as client, pytest.raises(twostep.Unavailable, match=r"no server answers at 127\.0\.0\.1:9"):
        client.models()


@pytest.mark.parametrize("target", ["", "localhost", "http://localhost:50051", "localhost:http"])
def test_bad_target(target: str) -> None:
    with pytest.raises(twostep.InvalidRequest, match="host:port"):
        Client(target)


def test_tls_files() -> None:
    with pytest.raises(twostep.SetupError, match="/does/not/exist"):
        Client("localhost:1", tls_ca="/does/not/exist")
    with pytest.raises(twostep.SetupError, match="go together"):
        Client("localhost:1", tls_cert="/c.pem")


def test_reprs_can_be_read(client: Client, server: tuple[ScriptedInference, str]) -> None:
    assert repr(client) == f"Client('{server[1]}', timeout=60, max_retries=3, tls=False)"
    generation = client.generate("ok", request_id="r")
    generation.result()
    assert repr(generation) == "Generation(request_id='r', num_tokens=3, stop, text='one two three')"


def test_the_readmes_example_runs(server: tuple[ScriptedInference, str], capsys: pytest.CaptureFixture[str]) -> None:
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
