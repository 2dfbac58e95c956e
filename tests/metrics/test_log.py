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


def lines(made: logging.LogRecord, *about: str) -> tuple[str, dict[str, Any]]:
    """The record, plain and as JSON, in a task of its own: about a request of this id and trace, if any."""

    async def run() -> tuple[str, dict[str, Any]]:
        if about:
            concerning(*about)
        return Plain("router").format(made), json.loads(JsonLines("router").format(made))

    return asyncio.run(run())


def test_a_line_about_nobody() -> None:
    plain, line = lines(record("%d workers", 2, data={"n": 2}))
    assert plain.endswith(" W router router.dispatch: 2 workers")
    assert (line["message"], line["level"], line["process"], line["logger"]) == ("2 workers", "warning", "router", "router.dispatch")
    assert line["data"] == {"n": 2}
    assert not {"request_id", "trace_id"} & line.keys()


@pytest.mark.parametrize(("trace_id", "behind"), [("", " [request_id=r1]"), ("ab" * 16, f" [request_id=r1 trace_id={'ab' * 16}]")])
def test_a_line_about_a_request(trace_id: str, behind: str) -> None:
    plain, line = lines(record("no room"), "r1", trace_id)
    assert plain.endswith(f"router.dispatch: no room{behind}")
    assert (line["request_id"], line.get("trace_id", "")) == ("r1", trace_id)
    named, _ = lines(record("request %s: no room", "r1"), "r1", trace_id)
    assert named.endswith(f": request r1: no room [trace_id={trace_id}]" if trace_id else ": request r1: no room"), "not said twice"


def test_a_traceback_comes_behind_the_id() -> None:
    made = record("failed")
    try:
        raise RuntimeError("why")
    except RuntimeError as error:
        made.exc_info = (RuntimeError, error, error.__traceback__)
    first, *rest = lines(made, "r1")[0].splitlines()
    assert first.endswith("failed [request_id=r1]")
    assert rest[-1] == "RuntimeError: why"


def test_no_line_commands_a_terminal() -> None:
    plain, line = lines(record("%s", "\x1b[2J\x9b1m\tend"))
    assert plain.endswith("\u241b[2J\ufffd1m\tend")
    assert "\x9b" not in line["message"]


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
    async def run() -> list[str]:
        concerning("outer")
        token = concerning("inner")
        inner = Plain("").format(record("m"))
        forget(token)
        return [inner, Plain("").format(record("m"))]

    inner, outer = asyncio.run(run())
    assert inner.endswith("[request_id=inner]")
    assert outer.endswith("[request_id=outer]")
