"""The fault matrix's harness: what it calls right and wrong, and one fault from beginning to end."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import namespaces
import pytest
from cells import STATES, Injection, Timing
from fault_system import Held
from faulty_requests import Ask, FakeOracle, Outcome
from gates import Gate, Gates
from report import markdown, totals, with_two_raylets

from twostep import DeadlineExceeded, Piece, Unavailable
from twostep.engine.fake import fake_next_token

_HERE = Path(__file__).parent


def test_the_oracle_is_the_fake_model() -> None:
    rng = random.Random(1)
    for _ in range(20):
        prompt = [rng.randrange(500) for _ in range(rng.randrange(1, 40))]
        tokens = list(prompt)
        for token in FakeOracle(500).answer(prompt, 30):
            assert token == fake_next_token(tokens, 500)
            tokens.append(token)


@dataclass
class ScriptedAnswer:
    """As the SDK's: pieces, then its end."""

    pieces: list[tuple[int, tuple[int, ...]]]
    end: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[Piece]:
        for position, token_ids in self.pieces:
            yield Piece("", token_ids, position=position)
        if self.end is not None:
            raise self.end

    async def result(self) -> Any:
        return Outcome(attempts=1)


@pytest.mark.parametrize(
    ("answer", "status", "num_wrong"),
    [
        (ScriptedAnswer([(0, (1, 2)), (2, (3,))]), "OK", 0),
        (ScriptedAnswer([(0, (1, 2))]), "OK", 1),
        (ScriptedAnswer([(0, (1, 9)), (2, (3,))]), "OK", 1),
        (ScriptedAnswer([(0, (1, 2)), (1, (2, 3))]), "OK", 3),
        (ScriptedAnswer([(0, (1, 2)), (2, (3, 4))]), "OK", 1),
        (ScriptedAnswer([(0, (1, 2))], Unavailable("gone")), "UNAVAILABLE", 0),
        (ScriptedAnswer([(0, (1, 7))], Unavailable("gone")), "UNAVAILABLE", 1),
        (ScriptedAnswer([], DeadlineExceeded("late")), "DEADLINE_EXCEEDED", 0),
    ],
)
async def test_lost_doubled_and_wrong_tokens_are_counted(answer: ScriptedAnswer, status: str, num_wrong: int) -> None:
    class Client:
        def generate(self, **_: Any) -> ScriptedAnswer:
            return answer

    ask = Ask("decoding", [5], 3, [1, 2, 3], 1.0)
    await ask.run(Client())  # type: ignore[arg-type]
    assert (ask.outcome.status, ask.outcome.num_wrong) == (status, num_wrong)
    assert ask.outcome.recovered == (status == "OK" and num_wrong == 0)
    assert ask.outcome.hung == (status == "DEADLINE_EXCEEDED")


def good(**changes: Any) -> Injection:
    cells = {state: Outcome(status="OK", seconds=1.0) for state in STATES}
    return replace(Injection(fault="kill -9", target="Redis", cells=cells, recovered_s=0.0, whole_s=1.0), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"cells": {}},
        {"cells": {state: Outcome(status="OK", num_wrong=1) for state in STATES}},
        {"cells": {state: Outcome(status="DEADLINE_EXCEEDED") for state in STATES}},
        {"recovered_s": None},
        {"whole_s": None},
        {"num_probe_tokens_wrong": 1},
        {"held": Held(blocks=1)},
        {"held": Held(bytes=100, objects=1)},
        {"held": Held(strays=1)},
        {"held": Held(unknown="prefill-0")},
        {"problem": "could not be done"},
    ],
)
def test_whatever_is_not_as_it_should_be_fails(changes: dict[str, Any]) -> None:
    assert good().good
    assert good(held=Held(markers=3)).good
    assert not good(**changes).good


def test_the_page_ends_with_the_totals() -> None:
    failed = {state: Outcome(status="UNAVAILABLE", seconds=2.0) for state in STATES}
    injections = [good(), good(cells=failed), good(cells={}), good(held=Held(blocks=3, bytes=70, objects=2))]
    page = markdown(injections, Timing(), made="today", seconds=9.0)
    assert page.splitlines()[-1] == totals(injections, 9.0)
    assert len({row.count("|") for row in page.splitlines() if row.startswith("|")}) == 1
    line = totals(injections, 9.0)
    for part in ("20 cells (4 faults)", "10 recovered", "5 failed clearly", "0 hung", "5 not run", "3 blocks", "70 object-store bytes"):
        assert part in line


def test_a_section_of_the_page_is_replaced() -> None:
    old, new = (markdown([good()], Timing(), made="today", seconds=9.0, two_raylets=said) for said in ("one\ntwo", "three"))
    assert "two" in old
    assert with_two_raylets(old, "three") == new


async def test_a_gate_holds_the_first_who_comes_until_it_is_opened(tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gates")
    mine, others = Gate(gates.directory, "prefill-0"), Gate(gates.directory, "prefill-1")
    await mine.wait("ready")
    gates.arm("ready")
    waiting = asyncio.create_task(mine.wait("ready"))
    assert await gates.held("ready", 60) == "prefill-0"
    await others.wait("ready")
    assert not waiting.done()
    gates.open_all()
    await waiting


# In test_system_both_ways.py a decode worker is killed at whatever states its requests are.
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_killed_decode_worker_at_every_state(tiny_llama_dir: Path, tmp_path: Path) -> None:
    if reason := namespaces.why_not():
        pytest.skip(reason)
    page = tmp_path / "matrix.md"
    flags = ["--only", "kill -9", "--target", "decode worker", "--model", str(tiny_llama_dir), "--output", str(page)]
    done = subprocess.run(
        [sys.executable, str(_HERE / "fault_matrix.py"), *flags], capture_output=True, text=True, timeout=570, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "**Totals**: 5 cells (1 faults): 5 recovered, 0 failed clearly, 0 hung" in page.read_text().splitlines()[-1]
