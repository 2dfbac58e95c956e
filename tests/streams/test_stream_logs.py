"""A request's lines in the logs of all processes carry one id, and nothing of what its client sent or got."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from whole_system import SECRET, WholeSystem, whole_system

from twostep.errors import Unavailable
from twostep.process.log import JsonLines
from twostep.rpc.channel import open_channel
from twostep.rpc.v1 import inference_pb2, inference_pb2_grpc

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PROMPT = "rivers run to the sea " * 20


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonLines("all"))
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text.append(self.format(record))

    def of(self, *packages: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.text]
        return [line for line in found if line["logger"].split(".")[0] in packages]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.setLevel(before)
    root.removeHandler(handler)


async def generate(system: WholeSystem, request_id: str, *, traceparent: str = "") -> str:
    """The answer's text."""
    sampling = inference_pb2.SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, stop=["never to be found"])
    request = inference_pb2.GenerateRequest(text=PROMPT, request_id=request_id, sampling=sampling)
    metadata = (("traceparent", traceparent), ("authorization", "Bearer sk-very-secret")) if traceparent else ()
    text = ""
    async with open_channel(system.target()) as channel:
        async for response in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120, metadata=metadata):
            text += response.piece.text
    return text


async def lose_first(system: WholeSystem, answer: asyncio.Task[Any]) -> None:
    """The first decode worker that decodes fails all it has. The answer has not begun, and is longer than some tokens."""
    system.brake.hold_at(10)
    while not answer.done():
        for worker in system.decodes:
            if worker.engine.stats().num_running:
                worker.edge.fail_all(Unavailable("lost on purpose"))
                system.brake.open()
                return
        await asyncio.sleep(0.002)
    pytest.fail("the answer was over before its worker could be lost")


@pytest.mark.smoke
async def test_one_id_in_every_process(fake_model_dir: Path, tmp_path: Path, lines: Lines) -> None:
    async with whole_system(fake_model_dir, tmp_path, num_decode=2) as system:
        answer = asyncio.create_task(generate(system, "asked", traceparent=f"00-{TRACE}-00f067aa0ba902b7-01"))
        await lose_first(system, answer)
        text = await answer
        await system.settled()
    told = [line for line in lines.of("router", "prefill_worker", "decode_worker", "kv_transfer") if "request_id" in line]
    ids = {line["request_id"] for line in told}
    assert len(ids) == 1, ids
    (name,) = ids
    assert name.startswith("asked~")
    assert {line["trace_id"] for line in told} == {TRACE}
    # Placement and the lost attempt; the failed sequence; both sides of the hand-overs.
    messages = {package: [line["message"] for line in told if line["logger"].startswith(package)] for package in ("router", "decode", "kv")}
    assert any("lost on purpose" in message for message in messages["router"])
    assert any("lost on purpose" in message for message in messages["decode"])
    assert {direction for m in messages["kv"] for direction in ("publish", "fetch") if f"direction={direction}" in m} == {
        "publish",
        "fetch",
    }
    # No line names it without carrying it.
    every = lines.of("router", "prefill_worker", "decode_worker", "kv_transfer", "twostep")
    assert [line for line in every if name in line["message"] and line.get("request_id") != name] == []
    everything = "\n".join(lines.text)
    for secret in ("rivers run", "never to be found", "sk-very-secret", SECRET.own.decode(), text[:20]):
        assert secret not in everything


async def test_what_is_refused_is_logged_with_its_id(fake_model_dir: Path, tmp_path: Path, lines: Lines, monkeypatch: Any) -> None:
    async with whole_system(fake_model_dir, tmp_path, aggregated=True) as system:

        async def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError("a bug, for the test")

        monkeypatch.setattr(system.routers[0].inference.prompts, "resume", fails)
        with pytest.raises(Exception, match="internal error"):
            await generate(system, "asked")
        await system.settled()
    (line,) = [line for line in lines.of("twostep") if "unexpected error" in line["message"]]
    assert line["request_id"].startswith("asked~")
    assert "a bug, for the test" in line["traceback"]
