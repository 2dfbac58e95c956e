"""docs/access.md and docs/batches.md: what they name is there, what they print works."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from batch_fakes import ENDED
from http_fakes import url
from router_fakes import Cluster

from router.config import RouterConfig, parse_config
from router.http.admin import routes
from twostep.cli._flags import parser
from twostep.hold_back import Held, HeldRequest, Stop
from twostep.keys.api_keys import make_key

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("access.md", "batches.md")}
UNITS = {"": 1, "MiB": 1 << 20, "GiB": 1 << 30}


def python_of(page: str) -> str:
    (program,) = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    return str(program)


def commands() -> list[str]:
    """Those on lines of their own, without the remark behind."""
    found = [line for page in PAGES.values() for line in re.findall(r"^    (?:twostep|python) .*$", page, re.MULTILINE)]
    return [re.split(r" {3,}", line.strip())[0] for line in found]


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "twostep":
        assert parser().parse_args(words[1:]).command == words[1]
    else:
        assert words[:4] == ["python", "-P", "-m", "router"]
        assert parse_config(["--model", "DIR", *(word for word in words[4:] if word != "...")])


@pytest.mark.parametrize("page", PAGES)
def test_flags_are_there_and_have_the_defaults_that_are_told(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for help_of in (
        lambda: parse_config(["--help"]),
        lambda: parser().parse_args(["keys", "change", "--help"]),
        lambda: parser().parse_args(["keys", "list", "--help"]),
        lambda: parser().parse_args(["chat", "--help"]),
    ):
        with pytest.raises(SystemExit):
            help_of()
    known = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGES[page]))
    assert len(named) > 4
    assert named <= known, named - known
    default = RouterConfig(model=Path())
    for flag, number, unit in re.findall(r"`--([a-z-]+)` \(?(\d+)(?: (MiB|GiB))?", PAGES[page]):
        assert getattr(default, flag.replace("-", "_")) == int(number) * UNITS[unit], flag


def test_the_table_of_a_key_has_all_that_operators_may_say() -> None:
    table = PAGES["access.md"].split("### What a key says")[1].split("###")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == set(make_key()[1].to_dict()) - {"id", "created"}


def test_the_table_of_the_operators_port_has_all_of_it() -> None:
    table = PAGES["access.md"].split("## The operators' port")[1].split("##")[0]
    named = set()
    for row in re.findall(r"^\| (`[GPD].*?) \|", table, re.MULTILINE):
        methods: list[str] = []
        for method, path in re.findall(r"`(?:([A-Z]+))?(?: ?(/[^`]+))?`", row):
            methods = [*methods, method] if method else methods
            named |= {(each, path) for each in methods if path}
    assert named == {(route.method, route.path) for route in routes if isinstance(route, web.RouteDef)}


async def test_the_hook_does_what_it_says() -> None:
    known: dict[str, Any] = {}
    exec(compile(python_of("access.md"), "docs/access.md", "exec"), known)
    request = HeldRequest(request_id="r", model="m", tenant="", key_id="", request_class="standard")
    held = Held(request=request, kind="text", sent="It is ", waiting="the launch ", piece="code 1234", last=False)
    assert await known["check"](held) == Stop("[This cannot be told.]")
    assert await known["check"](dataclasses.replace(held, piece="pad")) is None


async def test_a_batch_goes_as_printed(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.prefill()
    await cluster.decode()
    sent, told = (json.loads(line.replace("{…}", "{}")) for line in re.findall(r"```json\n(.*?)\n```", PAGES["batches.md"], re.DOTALL))
    (tmp_path / "requests.jsonl").write_text(json.dumps(sent) + "\n")
    monkeypatch.chdir(tmp_path)
    async with cluster.serving(batch_dir=tmp_path / "batches"):
        *begin, last = python_of("batches.md").replace("http://localhost:8000", url(cluster)).splitlines()
        known: dict[str, Any] = {}

        await asyncio.to_thread(exec, "\n".join(begin), known)
        async with asyncio.timeout(120):
            while known["batch"].status not in ENDED:
                await asyncio.to_thread(exec, begin[-1], known)
        await asyncio.to_thread(exec, last, known)
        known["client"].close()
    (answer,) = map(json.loads, known["answers"].splitlines())
    assert set(answer) == set(told)
    assert set(answer["response"]) == set(told["response"])
    assert (answer["custom_id"], answer["response"]["status_code"]) == (sent["custom_id"], 200)
