"""Classes, targets and tenants as the SDK sends them, and what it makes of a refusal that says when to come again."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import ScriptedInference, serving, serving_in_thread

import twostep
from twostep import AsyncClient, Client
from twostep.cli._flags import parser, urgency_of
from twostep.client._channel import Attempts
from twostep.errors import ResourceExhausted, Unavailable, error_from_grpc, trailing_metadata
from twostep.rpc.v1 import inference_pb2 as pb


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[ScriptedInference, str]]:
    servicer = ScriptedInference()
    with serving_in_thread(servicer) as target:
        yield servicer, target


@pytest.fixture
def client(server: tuple[ScriptedInference, str]) -> Iterator[Client]:
    with Client(server[1], timeout=60) as client:
        yield client


@pytest.fixture
async def async_server() -> AsyncIterator[tuple[ScriptedInference, str]]:
    servicer = ScriptedInference()
    async with serving(servicer) as target:
        yield servicer, target


def check_sent(request: pb.GenerateRequest) -> None:
    assert request.request_class == pb.REQUEST_CLASS_BATCH
    assert (request.ttft_ms, request.tpot_ms, request.tenant) == (250.0, 12.5, "alice")


def test_what_is_sent(client: Client, server: tuple[ScriptedInference, str]) -> None:
    client.generate("ok", request_class="batch", ttft_ms=250, tpot_ms=12.5, tenant="alice").result()
    check_sent(server[0].requests[-1])
    client.chat([{"role": "user", "content": "ok"}], request_class="batch", ttft_ms=250, tpot_ms=12.5, tenant="alice").result()
    check_sent(server[0].requests[-1])
    client.generate("ok").result()
    plain = server[0].requests[-1]
    assert plain.request_class == pb.REQUEST_CLASS_STANDARD
    assert not plain.HasField("ttft_ms")
    assert not plain.HasField("tpot_ms")


async def test_what_is_sent_without_blocking(async_server: tuple[ScriptedInference, str]) -> None:
    async with AsyncClient(async_server[1]) as client:
        await client.generate("ok", request_class="batch", ttft_ms=250, tpot_ms=12.5, tenant="alice").result()
        check_sent(async_server[0].requests[-1])
        chat = client.chat([{"role": "user", "content": "ok"}], request_class="batch", ttft_ms=250, tpot_ms=12.5, tenant="alice")
        await chat.result()
        check_sent(async_server[0].requests[-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"request_class": "urgent"}, "request_class is 'urgent'; give one of 'interactive', 'standard', 'batch'"),
        ({"request_class": ["batch"]}, "request_class"),
        ({"ttft_ms": 0}, "ttft_ms is 0; give milliseconds above 0"),
        ({"ttft_ms": -5.0}, "ttft_ms"),
        ({"ttft_ms": float("nan")}, "ttft_ms"),
        ({"tpot_ms": float("inf")}, "tpot_ms"),
        ({"tpot_ms": "10"}, "tpot_ms"),
        ({"tpot_ms": True}, "tpot_ms"),
        ({"tenant": 7}, "tenant"),
        ({"tenant": "\ud800"}, "lone surrogate"),
    ],
)
def test_bad_input_never_leaves(client: Client, server: tuple[ScriptedInference, str], arguments: dict[str, object], message: str) -> None:
    before = len(server[0].requests)
    with pytest.raises(twostep.InvalidRequest, match=message):
        client.generate("ok", **arguments)  # type: ignore[arg-type]
    assert len(server[0].requests) == before


# ---- when to come again ----------------------------------------------------------------------------------------------------


def test_a_retry_comes_when_it_was_told_to(client: Client, server: tuple[ScriptedInference, str]) -> None:
    started = time.monotonic()
    assert client.generate("later-200").result().text == "one two three"
    assert time.monotonic() - started >= 0.2, "its own first pause is 0.1 s at most"
    assert server[0].calls["later-200"] == 2


async def test_a_retry_without_blocking_comes_when_it_was_told_to(async_server: tuple[ScriptedInference, str]) -> None:
    async with AsyncClient(async_server[1]) as client:
        started = time.monotonic()
        assert (await client.generate("later-200").result()).text == "one two three"
        assert time.monotonic() - started >= 0.2


def test_an_error_says_when(server: tuple[ScriptedInference, str]) -> None:
    with Client(server[1], max_retries=0) as client:
        with pytest.raises(ResourceExhausted, match="come again") as caught:
            client.generate("later-1234").result()
        assert caught.value.retry_after_s == 1.234
        with pytest.raises(ResourceExhausted) as silent:
            client.generate("refuse-9").result()
        assert silent.value.retry_after_s is None


def test_what_is_later_than_the_deadline_is_not_waited_for(client: Client, server: tuple[ScriptedInference, str]) -> None:
    with pytest.raises(ResourceExhausted) as caught:
        client.generate("later-30000", timeout=29).result()
    # No longer than anybody is given (half a minute), and yet longer than there is.
    assert caught.value.retry_after_s == 30.0
    assert server[0].calls["later-30000"] == 1


@given(st.floats(0.0, 100.0), st.integers(0, 5), st.integers(0, 1 << 30))
def test_pauses_keep_to_what_was_said_and_are_spread(after_s: float, num_retries: int, seed: int) -> None:
    random.seed(seed)
    attempts = Attempts(600.0, 10, num_retries)
    delay = attempts.delay_s(ResourceExhausted("full", retry_after_s=after_s))
    if after_s > 30.0:
        assert delay is None
        return
    assert delay is not None
    assert after_s <= delay <= max(5.0, after_s * 1.25)
    delays = {Attempts(600.0, 10).delay_s(ResourceExhausted("full", retry_after_s=1.0)) for _ in range(20)}
    assert len(delays) > 10, "those refused together do not come back together"


def test_metadata_there_and_back() -> None:
    assert trailing_metadata(ResourceExhausted("full")) == ()
    assert trailing_metadata(Unavailable("away")) == ()
    behind = trailing_metadata(ResourceExhausted("full", retry_after_s=0.2501))
    assert behind == (("x-twostep-retry-after-ms", "251"),), "rounded up: not before"
    back = error_from_grpc("RESOURCE_EXHAUSTED", "full", behind)
    assert isinstance(back, ResourceExhausted)
    assert back.retry_after_s == 0.251


@pytest.mark.parametrize("value", ["", "-1", "soon", "1.5", "9" * 30, b"\xff", "\u0663"])
def test_metadata_that_makes_no_sense_is_no_metadata(value: str | bytes) -> None:
    back = error_from_grpc("RESOURCE_EXHAUSTED", "full", [("x-twostep-retry-after-ms", value)])
    assert isinstance(back, ResourceExhausted)
    assert back.retry_after_s is None


# ---- the command line ------------------------------------------------------------------------------------------------------


def test_flags() -> None:
    args = parser().parse_args(["generate", "hi", "--request-class", "batch", "--ttft-ms", "250", "--tpot-ms", "12.5", "--tenant", "alice"])
    assert urgency_of(args) == {"request_class": "batch", "ttft_ms": 250.0, "tpot_ms": 12.5, "tenant": "alice"}
    assert urgency_of(parser().parse_args(["generate", "hi"])) == {
        "request_class": "standard",
        "ttft_ms": None,
        "tpot_ms": None,
        "tenant": "",
    }
    assert urgency_of(parser().parse_args(["chat"]))["request_class"] == "interactive"
    with pytest.raises(SystemExit):
        parser().parse_args(["chat", "--request-class", "urgent"])
