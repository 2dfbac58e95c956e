"""The examples of docs/sdk.md, each run as it is printed, against a scripted router."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import ScriptedInference, serving_in_thread

import twostep

PAGE = (Path(__file__).parents[2] / "docs" / "sdk.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# Everything that each of them prints with that router.
SAID = [
    "one two threestop 3 0.013\n",
    "one two three['one two three', 'one two three']\n",
    "one two three 0\n{target} True 0\n",
    "one two three\n",
    "one two three\n",
    "Bonn\n",
    "0 one \n1 one \n0 two \n1 two \n0 three\n1 three\n['one two three', 'one two three']\n",
    "weather {'city': 'Bonn'}\none two three\n",
    "let me see420 0.0\n",
    "['scripted']\n",
    "2 of 31 numbers, 53 tokens\n",
    "prefill-0 prefill 3 750 of 1000 blocks free\ndecode-0 decode 12 400 of 1000 blocks free\n"
    "decode-1 decode 0 0 of 1000 blocks free\n0.31 1.25\n0\n",
]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[ScriptedInference, str]]:
    servicer = ScriptedInference()
    with serving_in_thread(servicer) as target:
        yield servicer, target


def test_there_are_as_many_as_are_run() -> None:
    assert len(EXAMPLES) == len(SAID)


@pytest.mark.parametrize("number", range(len(SAID)))
def test_an_example_runs_as_printed(
    server: tuple[ScriptedInference, str], number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TWOSTEP_API_KEY", raising=False)
    example = EXAMPLES[number]
    ours = re.sub(r"localhost:50051|router-[ab]:50051", server[1], example)
    assert ours != example, "it is for a router"
    exec(compile(ours, "docs/sdk.md", "exec"), {"__name__": "example"})
    said = capsys.readouterr().out
    # The router's count of what is open falls a moment after the answer's end.
    assert re.sub(r" True \d+", " True 0", said) == SAID[number].replace("{target}", server[1])
    for what, sent in (("response_format", "people"), ("tools=tools", "weather")):
        if what in example:
            assert sent in str(server[0].requests[-1])


def test_the_error_tree_is_the_one_there_is() -> None:
    drawn = re.findall(r"^[├│└─ ]*([A-Z]\w+)\s", PAGE.split("## Errors")[1].split("## Options")[0], re.MULTILINE)
    for name in drawn:
        if name not in ("An",):
            assert issubclass(getattr(twostep, name), twostep.TwostepError), name


def test_every_option_is_on_the_page() -> None:
    table = PAGE.split("## Options of a request")[1].split("**Answers of a form.**")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert set(twostep.ChatOptions.__annotations__) <= named | {"model"}
