"""Several routers, either client: balance, health, resumes; and what every call carries."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from both_clients import Looped, until
from scripted_server import ScriptedInference

import twostep
from twostep import Client
from twostep.rpc.health import READINESS

Server = tuple[ScriptedInference, str]
Pair = tuple[Server, Server]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def client(kind: Any, pair: Pair) -> Any:
    with kind([target for _, target in pair], timeout=60) as client:
        yield client


def only_second_is_well(client: Any) -> bool:
    """On a busy machine a short deadline may pass without a word of the second too, until its health is asked for."""
    return [state.well for state in client.routers] == [False, True]


def none_open(client: Any) -> bool:
    return not any(state.num_open for state in client.routers)


def test_requests_are_spread_by_what_is_open(client: Any) -> None:
    answers = [client.generate("silent") for _ in range(10)]
    assert [state.num_open for state in client.routers] == [5, 5]
    for answer in answers:
        answer.cancel()
    until(lambda: none_open(client))
    with client.generate("silent"):
        assert sum(state.num_open for state in client.routers) == 1
    until(lambda: none_open(client))
    client.generate("ok").result()
    client.tokenize("abc")
    with pytest.raises(twostep.InvalidRequest):
        client.generate("invalid").result()
    until(lambda: none_open(client))
    assert all(state.well for state in client.routers), "a refusal is no illness"


def test_a_draining_router_gets_nothing_until_it_is_well(client: Any, pair: Pair) -> None:
    (ill, ill_target), (well, _) = pair
    ill.away = True
    ill.health.set(READINESS, False)
    until(lambda: client.generate("ok").result().text and ill.calls["ok"])
    assert [state.target for state in client.routers if not state.well] == [ill_target]
    asked = ill.calls["ok"]
    for _ in range(20):
        assert client.generate("ok").result().text == "one two three"
    # A question that is not answered within two seconds is put again, with another request.
    until(lambda: client.generate("ok").result().text and ill.checks)
    assert ill.calls["ok"] == asked, "it has said that it is away"
    ill.away = False
    ill.health.set(READINESS, True)
    until(lambda: client.generate("ok").result().text and ill.calls["ok"] > asked, client)
    assert all(state.well for state in client.routers)
    assert well.calls["ok"] >= 20


def test_a_failure_behind_a_healthy_router_does_not_take_it_out(client: Any, pair: Pair) -> None:
    (first, _), (second, _) = pair
    # Both are asked, without a pause between them, and then again.
    assert client.generate("down-1").result().text == "one two three"
    assert first.calls["down-1"] + second.calls["down-1"] == 3
    until(lambda: client.generate("ok").result().text and all(state.well for state in client.routers))


def test_there_is_no_pause_before_another_router_is_asked(kind: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (ill, _), _ = pair
    ill.away = True
    monkeypatch.setattr("twostep.client._channel._FIRST_DELAY_S", 1000.0)
    monkeypatch.setattr("twostep.client._channel._MAX_DELAY_S", 1000.0)

    def ask() -> bool:
        with kind([target for _, target in pair], timeout=60, max_retries=1) as client:
            assert client.generate("ok").result().text == "one two three"
            assert len(client.tokenize("abc")) == 3
        return bool(ill.calls["ok"])

    # Which of the two a new client asks first is drawn at random.
    until(ask)


def test_no_retries_are_none_elsewhere_either(kind: Any, pair: Pair) -> None:
    (ill, _), (also, _) = pair
    ill.away = also.away = True
    with kind([target for _, target in pair], timeout=60, max_retries=0) as client, pytest.raises(twostep.Unavailable):
        client.generate("ok").result()
    assert ill.calls["ok"] + also.calls["ok"] == 1


def test_a_frozen_router_is_left_alone_after_the_first_deadline(kind: Any, pair: Pair) -> None:
    """Something accepts connections there, and says nothing."""
    (_, target), _ = pair
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        with kind([f"127.0.0.1:{frozen.getsockname()[1]}", target], max_retries=0, timeout=60) as client:

            def struck() -> bool:
                with contextlib.suppress(twostep.DeadlineExceeded, twostep.Unavailable):
                    client.generate("ok", timeout=0.5).result()
                return only_second_is_well(client)

            until(struck)
            assert {client.generate("ok").result().text for _ in range(8)} == {"one two three"}


def test_a_slow_answer_is_no_illness(client: Any, pair: Pair) -> None:
    """The router has told that it took the request. On a busy machine that may take longer than the first of these."""
    for timeout in (0.3, 3.0, 30.0):
        answer = client.generate("silent", timeout=timeout)
        with pytest.raises(twostep.DeadlineExceeded):
            answer.result()
        told: Any = answer._call.initial_metadata
        metadata: Iterable[Any] = client.run(told) if isinstance(client, Looped) else told()
        if "x-request-id" in dict(metadata):
            assert all(state.well for state in client.routers)
            return
    pytest.fail("no router was heard of within any deadline")


@pytest.mark.parametrize("ending", ["crash", "reset"])
def test_a_resume_goes_to_another_router_with_what_time_is_left(
    client: Any, pair: Pair, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that stop, and proxies, end what still runs with CANCELLED ("reset"). On the client's clock a try takes 20 seconds."""
    (first, _), (second, _) = pair

    def monotonic() -> float:
        return time.monotonic() + 20 * (first.calls[ending] + second.calls[ending])

    monkeypatch.setattr("twostep.client._channel.time", SimpleNamespace(monotonic=monotonic))
    completion = client.generate(ending, temperature=0.5).result()
    assert (completion.text, completion.resumes) == ("one two three", 1)
    assert (first.calls[ending], second.calls[ending]) == (1, 1)
    (begun,), (resumed,) = sorted((first.requests, second.requests), key=lambda requests: len(requests[0].resume_token_ids))
    assert list(resumed.resume_token_ids) == [100, 101]
    assert (resumed.sampling.seed, begun.sampling.HasField("seed")) == (1234, False)
    left = sorted(first.remaining_s + second.remaining_s)
    # gRPC sends it in tenths of a second below 100 s, rounded up.
    assert 0 < left[0] <= 40.1, "the deadline is that of the whole request"
    assert left[0] < left[1] <= 60.1


def test_the_deadline_goes_along(kind: Any, pair: Pair) -> None:
    (first, target), _ = pair
    with kind(target, timeout=500) as client:
        client.generate("ok").result()
        client.generate("ok", timeout=60).result()
    assert 400 < first.remaining_s[0] <= 501
    assert 0 < first.remaining_s[1] <= 60.1


def test_routers_stand_in_for_each_other(kind: Any, pair: Pair) -> None:
    (server, target), _ = pair
    with kind(["127.0.0.1:9", target], timeout=60) as client:
        assert client.generate("ok").result().text == "one two three"
        # It stays with the one that answers.
        assert client.generate("ok").result().text == "one two three"
        assert server.calls["ok"] == 2
        assert client.models()[0].name == "scripted"
        assert repr(client).startswith(f"Client(['127.0.0.1:9', '{target}']")
    with pytest.raises(twostep.InvalidRequest, match="no target"):
        kind([])


def test_a_name_with_several_addresses(kind: Any, pair: Pair) -> None:
    """As a headless Service's name resolves: gRPC spreads the calls over them, and goes around one that is gone."""
    (first, one), (second, other) = pair
    with kind(f"ipv4:{one},{other}", timeout=60) as client:
        until(lambda: client.generate("ok").result().text and first.calls["ok"] and second.calls["ok"])
    with kind(f"ipv4:127.0.0.1:9,{other}", timeout=60) as client:
        assert {client.generate("ok").result().text for _ in range(4)} == {"one two three"}


def test_many_streams_take_more_connections_and_no_threads(kind: Any, pair: Pair) -> None:
    (_, target), _ = pair
    before = threading.active_count()
    with kind(target, timeout=60, max_connections=2) as client:
        answers = [client.generate("silent") for _ in range(210)]
        (state,) = client.routers
        assert (state.num_open, state.num_connections) == (210, 2)
        assert threading.active_count() <= before + 4
        for answer in answers:
            answer.cancel()
    until(lambda: threading.active_count() <= before + (kind is Looped))
    with pytest.raises(twostep.InvalidRequest, match="max_connections is 0"):
        kind(target, max_connections=0)


def test_closing_while_others_ask(pair: Pair) -> None:
    client = Client([target for _, target in pair], timeout=60)
    errors: list[Exception] = []

    def ask() -> None:
        while not errors:
            try:
                client.generate("ok").result()
                client.models()
            except Exception as error:  # noqa: BLE001  whatever it is, it is what the test is after
                errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    client.close()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert all(isinstance(error, twostep.InvalidRequest | twostep.Cancelled) for error in errors), errors


def test_the_key_and_the_trace_go_along(kind: Any, pair: Pair) -> None:
    (first, target), _ = pair
    with kind(target, api_key="sk-secret", timeout=60) as client:
        assert "secret" not in repr(client)
        client.generate("ok", traceparent=PARENT).result()
        client.generate("down-1", traceparent=PARENT).result()
        client.status()
    assert [m["authorization"] for m in first.metadata] == ["Bearer sk-secret"] * 4
    assert [m.get("traceparent") for m in first.metadata] == [PARENT] * 3 + [None]
    with kind(target, timeout=60) as client:
        client.generate("ok").result()
        assert not {"authorization", "traceparent"} & set(first.metadata[-1])
        with pytest.raises(twostep.InvalidRequest, match="traceparent"):
            client.generate("ok", traceparent="mine")
