"""Several routers, one client: balance, health, resumes; and what every call carries."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator

import pytest
from scripted_server import ScriptedInference, serving, serving_in_thread

import twostep
from twostep import AsyncClient, Client
from twostep.rpc.health import READINESS

Server = tuple[ScriptedInference, str]
Pair = tuple[Server, Server]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        servers = [ScriptedInference(), ScriptedInference()]
        targets = [stack.enter_context(serving_in_thread(servicer)) for servicer in servers]
        yield (servers[0], targets[0]), (servers[1], targets[1])


@pytest.fixture
async def async_pair() -> AsyncIterator[Pair]:
    servers = [ScriptedInference(), ScriptedInference()]
    async with serving(servers[0]) as first, serving(servers[1]) as second:
        yield (servers[0], first), (servers[1], second)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def check_unwell(client: Client | AsyncClient, target: str) -> None:
    assert [state.target for state in client.routers if not state.well] == [target]


def only_second_is_well(client: Client | AsyncClient) -> bool:
    """On a busy machine a short deadline may pass without a word of the second too, until its health is asked for."""
    return [state.well for state in client.routers] == [False, True]


# A busy machine may take longer than the first for a router's first word.
LONGER_AND_LONGER = (0.3, 3.0, 30.0)


def told(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """The router's first word came before the call's deadline."""
    return "x-request-id" in dict(metadata)


# ---- balance and health ------------------------------------------------------------------------------------------------


def test_requests_are_spread_by_what_is_open(pair: Pair) -> None:
    with Client([target for _, target in pair], timeout=60) as client:
        answers = [client.generate("silent") for _ in range(10)]
        assert [state.num_open for state in client.routers] == [5, 5]
        for answer in answers:
            answer.cancel()
        until(lambda: all(not state.num_open for state in client.routers))
        with client.generate("silent"):
            assert sum(state.num_open for state in client.routers) == 1
        until(lambda: all(not state.num_open for state in client.routers))


def test_dropped_and_ended_answers_are_counted_out(pair: Pair) -> None:
    with Client([target for _, target in pair], timeout=60) as client:
        dropped = client.generate("silent")
        assert sum(state.num_open for state in client.routers) == 1
        del dropped
        client.generate("ok").result()
        client.tokenize("abc")
        with pytest.raises(twostep.InvalidRequest):
            client.generate("invalid").result()
        until(lambda: all(not state.num_open for state in client.routers))
        assert all(state.well for state in client.routers), "a refusal is no illness"


def test_a_draining_router_gets_nothing_until_it_is_well(pair: Pair) -> None:
    (ill, ill_target), (well, _) = pair
    ill.away = True
    ill.health.set(READINESS, False)
    with Client([target for _, target in pair], timeout=60) as client:
        until(lambda: client.generate("ok").result().text and ill.calls["ok"])
        check_unwell(client, ill_target)
        asked = ill.calls["ok"]
        for _ in range(20):
            assert client.generate("ok").result().text == "one two three"
        # A question that is not answered within two seconds is put again, with another request.
        until(lambda: client.generate("ok").result().text and ill.checks)
        assert ill.calls["ok"] == asked, "it has said that it is away"
        ill.away = False
        ill.health.set(READINESS, True)

        def back() -> bool:
            client.generate("ok").result()
            return ill.calls["ok"] > asked

        until(back)
        assert all(state.well for state in client.routers)
    assert well.calls["ok"] >= 20


def test_a_failure_behind_a_healthy_router_does_not_take_it_out(pair: Pair) -> None:
    (first, _), (second, _) = pair
    with Client([target for _, target in pair], timeout=60) as client:
        # Both are asked, without a pause between them, and then again.
        assert client.generate("down-1").result().text == "one two three"
        assert first.calls["down-1"] + second.calls["down-1"] == 3

        def all_well() -> bool:
            client.generate("ok").result()
            return all(state.well for state in client.routers)

        until(all_well)


def test_there_is_no_pause_before_another_router_is_asked(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (ill, _), _ = pair
    ill.away = True
    monkeypatch.setattr("twostep.client._channel._FIRST_DELAY_S", 1000.0)
    monkeypatch.setattr("twostep.client._channel._MAX_DELAY_S", 1000.0)

    def ask() -> bool:
        with Client([target for _, target in pair], timeout=60, max_retries=1) as client:
            assert client.generate("ok").result().text == "one two three"
            assert len(client.tokenize("abc")) == 3
        return bool(ill.calls["ok"])

    # Which of the two a new client asks first is drawn at random.
    until(ask)


def test_no_retries_are_none_elsewhere_either(pair: Pair) -> None:
    (ill, _), (also, _) = pair
    ill.away = also.away = True
    with Client([target for _, target in pair], timeout=60, max_retries=0) as client, pytest.raises(twostep.Unavailable):
        client.generate("ok").result()
    assert ill.calls["ok"] + also.calls["ok"] == 1


def test_a_frozen_router_is_left_alone_after_the_first_deadline(pair: Pair) -> None:
    """Something accepts connections there, and says nothing."""
    (_, target), _ = pair
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        with Client([address, target], max_retries=0, timeout=60) as client:

            def struck() -> bool:
                with contextlib.suppress(twostep.DeadlineExceeded, twostep.Unavailable):
                    client.generate("ok", timeout=0.5).result()
                return only_second_is_well(client)

            until(struck)
            assert {client.generate("ok").result().text for _ in range(8)} == {"one two three"}


def test_a_slow_answer_is_no_illness(pair: Pair) -> None:
    """The router has told that it took the request."""
    for timeout in LONGER_AND_LONGER:
        with Client([target for _, target in pair], max_retries=0) as client:
            answer = client.generate("silent", timeout=timeout)
            with pytest.raises(twostep.DeadlineExceeded):
                answer.result()
            if told(answer._call.initial_metadata()):
                assert all(state.well for state in client.routers)
                return
    pytest.fail("no router was heard of within any deadline")


def test_a_resume_goes_to_another_router_with_what_time_is_left(pair: Pair) -> None:
    (first, _), (second, _) = pair
    with Client([target for _, target in pair], timeout=60) as client:
        completion = client.generate("crash", temperature=0.5).result()
    assert (completion.text, completion.resumes) == ("one two three", 1)
    assert (first.calls["crash"], second.calls["crash"]) == (1, 1)
    (begun,), (resumed,) = sorted((first.requests, second.requests), key=lambda requests: len(requests[0].resume_token_ids))
    assert list(resumed.resume_token_ids) == [100, 101]
    assert (resumed.sampling.seed, begun.sampling.HasField("seed")) == (1234, False)
    left = sorted(first.remaining_s + second.remaining_s)
    # gRPC sends it in tenths of a second below 100 s, rounded up.
    assert 0 < left[0] < left[1] <= 60.1, "the deadline is that of the whole request"


def test_a_call_that_the_server_gives_up_goes_on_elsewhere(pair: Pair) -> None:
    """Servers that stop, and proxies, end what still runs with CANCELLED."""
    (first, _), (second, _) = pair
    with Client([target for _, target in pair], timeout=100) as client:
        completion = client.generate("reset").result()
    assert (completion.text, completion.resumes) == ("one two three", 1)
    assert (first.calls["reset"], second.calls["reset"]) == (1, 1)


def test_the_deadline_goes_along(pair: Pair) -> None:
    (first, target), _ = pair
    with Client(target, timeout=500) as client:
        client.generate("ok").result()
        client.generate("ok", timeout=60).result()
    assert 400 < first.remaining_s[0] <= 501
    assert 0 < first.remaining_s[1] <= 60.1


def test_a_name_with_several_addresses(pair: Pair) -> None:
    """As a headless Service's name resolves: gRPC spreads the calls over them, and goes around one that is gone."""
    (first, one), (second, other) = pair
    with Client(f"ipv4:{one},{other}", timeout=60) as client:
        until(lambda: client.generate("ok").result().text and first.calls["ok"] and second.calls["ok"])
    with Client(f"ipv4:127.0.0.1:9,{other}", timeout=60) as client:
        assert {client.generate("ok").result().text for _ in range(4)} == {"one two three"}


def test_many_streams_take_more_connections_and_no_threads(pair: Pair) -> None:
    (_, target), _ = pair
    before = threading.active_count()
    with Client(target, timeout=60, max_connections=2) as client:
        answers = [client.generate("silent") for _ in range(210)]
        (state,) = client.routers
        assert (state.num_open, state.num_connections) == (210, 2)
        assert threading.active_count() <= before + 4
        for answer in answers:
            answer.cancel()
    until(lambda: threading.active_count() <= before)
    with pytest.raises(twostep.InvalidRequest, match="max_connections is 0"):
        Client(target, max_connections=0)


def test_closing_while_others_ask(pair: Pair) -> None:
    client = Client([target for _, target in pair], timeout=60)
    errors: list[Exception] = []

    def ask() -> None:
        while not errors:
            try:
                client.generate("ok").result()
                client.models()
            except twostep.TwostepError as error:
                errors.append(error)
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


# ---- asyncio -------------------------------------------------------------------------------------------------------------


async def until_async(condition: Callable[[], object], ask: Callable[[], Awaitable[object]], seconds: float = 60.0) -> None:
    """Asks, which also has the client look for the health of those that are not well."""
    async with asyncio.timeout(seconds):
        while not condition():
            await ask()
            await asyncio.sleep(0.01)


async def test_async_requests_are_spread_by_what_is_open(async_pair: Pair) -> None:
    async with AsyncClient([target for _, target in async_pair], timeout=60) as client:
        answers = [client.generate("silent") for _ in range(10)]
        assert [state.num_open for state in client.routers] == [5, 5]
        for answer in answers:
            answer.cancel()
        dropped = client.generate("silent")
        del dropped
        await until_async(lambda: not any(state.num_open for state in client.routers), client.status)
    assert not client._tasks


@pytest.mark.parametrize("ending", ["crash", "reset"])
async def test_async_resume(async_pair: Pair, ending: str) -> None:
    (one, _), (other, _) = async_pair
    async with AsyncClient([target for _, target in async_pair], timeout=60) as client:
        completion = await client.generate(ending).result()
    assert (completion.text, one.calls[ending], other.calls[ending]) == ("one two three", 1, 1)


async def test_async_draining_router_gets_nothing_until_it_is_well(async_pair: Pair) -> None:
    (ill, ill_target), (well, _) = async_pair
    async with AsyncClient([target for _, target in async_pair], timeout=60) as client:

        async def ask() -> None:
            assert (await client.generate("ok").result()).text == "one two three"

        ill.away = True
        ill.health.set(READINESS, False)
        await until_async(lambda: ill.calls["ok"], ask)
        check_unwell(client, ill_target)
        asked = ill.calls["ok"]
        for _ in range(20):
            await ask()
        assert ill.calls["ok"] == asked, "it has said that it is away"
        ill.away = False
        ill.health.set(READINESS, True)
        await until_async(lambda: ill.calls["ok"] > asked, ask)
        assert ill.checks
        assert all(state.well for state in client.routers)
        assert well.calls["ok"] >= 20
        assert (await client.status()).model == "scripted"
    assert not client._tasks


async def test_async_slow_answers_and_frozen_routers(async_pair: Pair) -> None:
    (_, target), _ = async_pair
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        async with AsyncClient([f"127.0.0.1:{frozen.getsockname()[1]}", target], max_retries=0, timeout=60) as client:

            async def ask() -> None:
                with contextlib.suppress(twostep.DeadlineExceeded, twostep.Unavailable):
                    await client.generate("ok", timeout=0.5).result()

            for timeout in LONGER_AND_LONGER:
                await until_async(lambda: only_second_is_well(client), ask)
                assert (await client.generate("ok").result()).text == "one two three"
                answer = client.generate("silent", timeout=timeout)
                with pytest.raises(twostep.DeadlineExceeded):
                    await answer.result()
                if told(await answer._call.initial_metadata()):
                    assert only_second_is_well(client)
                    return
            pytest.fail("the router was not heard of within any deadline")


async def test_async_many_streams(async_pair: Pair) -> None:
    (_, target), _ = async_pair
    async with AsyncClient(target, timeout=60, max_connections=2) as client:
        answers = [client.generate("silent") for _ in range(210)]
        (state,) = client.routers
        assert (state.num_open, state.num_connections) == (210, 2)
        del answers


# ---- what calls carry ----------------------------------------------------------------------------------------------------

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_key_and_the_trace_go_along(pair: Pair) -> None:
    (first, target), _ = pair
    with Client(target, api_key="sk-secret", timeout=60) as client:
        assert "secret" not in repr(client)
        client.generate("ok", traceparent=PARENT).result()
        client.generate("down-1", traceparent=PARENT).result()
        client.status()
    assert [m["authorization"] for m in first.metadata] == ["Bearer sk-secret"] * 4
    assert [m.get("traceparent") for m in first.metadata] == [PARENT] * 3 + [None]
    with Client(target, timeout=60) as client:
        client.generate("ok").result()
    assert not {"authorization", "traceparent"} & set(first.metadata[-1])
    with Client(target, timeout=60) as client, pytest.raises(twostep.InvalidRequest, match="traceparent"):
        client.generate("ok", traceparent="mine")


def test_open_telemetrys_span_goes_along_if_there_is_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    context = trace.SpanContext(
        trace_id=int(PARENT[3:35], 16), span_id=int(PARENT[36:52], 16), is_remote=False, trace_flags=trace.TraceFlags(1)
    )
    (first, target), _ = pair
    with Client(target, timeout=60) as client:
        with trace.use_span(trace.NonRecordingSpan(context)):
            client.generate("ok").result()
        client.generate("ok").result()
        assert [m.get("traceparent") for m in first.metadata] == [PARENT, None]
        # A module half imported, say, is not worth a request.
        monkeypatch.setitem(__import__("sys").modules, "opentelemetry.trace", types.ModuleType("opentelemetry.trace"))
        assert client.generate("ok").result().text == "one two three"


def test_status(pair: Pair) -> None:
    (_, target), _ = pair
    with Client(target, timeout=60) as client:
        status = client.status()
    assert (status.model, status.ready, [worker.worker_id for worker in status.workers]) == (
        "scripted",
        True,
        ["prefill-0", "decode-0", "decode-1"],
    )
    assert status.workers[0].transports == ("cuda_ipc", "ray")
    assert status.workers[1].num_free_blocks == 400
    assert status.load.ttft_s.p95 == pytest.approx(0.31)
    assert status.load.slo_attainment == pytest.approx(0.985)


def test_status_without_targets_or_work_has_none(pair: Pair) -> None:
    (first, target), _ = pair
    first.cluster.load.ClearField("slo_attainment")
    first.cluster.load.ClearField("prefill_decode_load_ratio")
    with Client(target, timeout=60) as client:
        load = client.status().load
    assert load.slo_attainment is None
    assert load.prefill_decode_load_ratio is None
