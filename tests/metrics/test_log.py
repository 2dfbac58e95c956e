"""Lines of the log: what they look like, and whom they are about."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from twostep.process.log import JsonLines, Plain, concerning, forget


def record(message: str, *args: object, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("router.dispatch", logging.WARNING, __file__, 1, message, args, None)
    made.__dict__.update(extra)
    return made


def in_a_task(work: Any) -> Any:
    """What it returns, run by itself: nothing of it stays."""

    async def run() -> Any:
        return work()

    return asyncio.run(run())


def test_a_line_about_nobody() -> None:
    assert Plain("router").format(record("%d workers", 2)).endswith(" W router router.dispatch: 2 workers")
    line = json.loads(JsonLines("router").format(record("%d workers", 2, data={"n": 2})))
    assert (line["message"], line["level"], line["process"], line["logger"]) == ("2 workers", "warning", "router", "router.dispatch")
    assert line["data"] == {"n": 2}
    assert "request_id" not in line
    assert "trace_id" not in line


@pytest.mark.parametrize(("trace_id", "behind"), [("", " [request_id=r1]"), ("ab" * 16, f" [request_id=r1 trace_id={'ab' * 16}]")])
def test_a_line_about_a_request(trace_id: str, behind: str) -> None:
    def work() -> tuple[str, dict[str, Any]]:
        concerning("r1", trace_id)
        return Plain("").format(record("no room")), json.loads(JsonLines("").format(record("no room")))

    plain, line = in_a_task(work)
    assert plain.endswith(f"router.dispatch: no room{behind}")
    assert (line["request_id"], line.get("trace_id", "")) == ("r1", trace_id)


def test_an_id_that_the_message_names_is_not_said_twice() -> None:
    def work() -> str:
        concerning("r1", "ab" * 16)
        return Plain("").format(record("request %s: no room", "r1"))

    assert in_a_task(work).endswith(f": request r1: no room [trace_id={'ab' * 16}]")


def test_a_traceback_comes_behind_the_id() -> None:
    def work() -> str:
        concerning("r1")
        made = record("failed")
        try:
            raise RuntimeError("why")
        except RuntimeError as error:
            made.exc_info = (RuntimeError, error, error.__traceback__)
        return Plain("").format(made)

    first, *rest = in_a_task(work).splitlines()
    assert first.endswith("failed [request_id=r1]")
    assert rest[-1] == "RuntimeError: why"


def test_tasks_inherit_it_and_their_neighbours_do_not() -> None:
    async def child() -> str:
        await asyncio.sleep(0)
        return str(json.loads(JsonLines("").format(record("m"))).get("request_id"))

    async def serve(name: str) -> str:
        concerning(name)
        return await asyncio.create_task(child())

    async def run() -> list[str]:
        return [*await asyncio.gather(serve("a"), serve("b")), await child()]

    assert asyncio.run(run()) == ["a", "b", "None"]


def test_forget_brings_back_what_was_before() -> None:
    def work() -> list[str]:
        concerning("outer")
        token = concerning("inner")
        inner = Plain("").format(record("m"))
        forget(token)
        return [inner, Plain("").format(record("m"))]

    inner, outer = in_a_task(work)
    assert inner.endswith("[request_id=inner]")
    assert outer.endswith("[request_id=outer]")
