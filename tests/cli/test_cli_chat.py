"""`twostep chat` at a terminal, as its user sees it, and what it is made of."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_server import ScriptedInference, serving_in_thread
from terminal_screen import Session

from twostep.cli import _input_history

# At terminals, with processes of their own: one of them is in the first tier.
pytestmark = pytest.mark.system
COMMAND = [sys.executable, "-P", "-W", "error", "-m", "twostep.cli", "chat"]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[ScriptedInference, str]]:
    servicer = ScriptedInference()
    with serving_in_thread(servicer) as target:
        yield servicer, target


def chat(server: tuple[ScriptedInference, str], tmp_path: Path, *words: str, width: int = 80, **env: str) -> Session:
    state = {"XDG_STATE_HOME": str(tmp_path), "NO_COLOR": "", "PYTHON_BASIC_REPL": "1"}
    return Session([*COMMAND, "--target", server[1], *words], width=width, env={**state, **env})


def say(terminal: Session, text: str) -> None:
    """Typed at the prompt, not before it is there."""
    terminal.until(lambda: terminal.screen.text().endswith("\n>"))
    terminal.type(text)


# ---- at a terminal --------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_conversation(server: tuple[ScriptedInference, str], tmp_path: Path) -> None:
    servicer, _ = server
    with chat(server, tmp_path, "--system", "be brief") as terminal:
        terminal.expect("scripted at ")
        say(terminal, "ok\n")
        terminal.expect("[3 tokens")
        assert "one two three\n[3 tokens" in terminal.screen.text()
        assert "2 of 5 prompt tokens cached" in terminal.screen.text()
        say(terminal, "think\n")
        terminal.expect("first to read after")
        assert "let me see\n\n42\n[3 tokens" in terminal.screen.text()
        say(terminal, "/set temperature 0.5\n")
        terminal.expect("temperature: 0.5")
        say(terminal, "/retry\n")
        terminal.until(lambda: terminal.screen.text().count("[3 tokens") == 3)
        first, second = servicer.requests[-2:]
        assert first.chat == second.chat, "the same question once more"
        assert [m.role for m in second.chat.messages] == ["system", "user", "assistant", "user"]
        assert second.sampling.temperature == 0.5
        say(terminal, "/nonsense\n")
        terminal.expect("there is no command /nonsense")
        say(terminal, "invalid\n")
        terminal.expect("twostep: temperature is -1; give a value")
        say(terminal, "/new\n")
        terminal.expect("A new conversation.")
        say(terminal, "//slash\n")
        terminal.until(lambda: terminal.screen.text().count("[3 tokens") == 4)
        assert [m.content for m in servicer.requests[-1].chat.messages] == ["be brief", "/slash"]
        say(terminal, "\x04")
        assert terminal.wait() == 0


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_ctrl_c_cancels_the_answer_and_nothing_else(server: tuple[ScriptedInference, str], tmp_path: Path, term: str) -> None:
    before = server[0].cancelled["endless"]
    with chat(server, tmp_path, TERM=term) as terminal:
        say(terminal, "half a li")
        terminal.expect("half a li")
        terminal.type("\x03")
        # readline may be between two looks at what has come, and then looks at signals at the next one only.
        give_up = time.monotonic() + 10
        last = give_up + 120
        while not re.search(r"> half a li\n(>\n)*>$", terminal.screen.text()):
            terminal.read(0.1)
            assert time.monotonic() < last, terminal.screen.text()
            if time.monotonic() > give_up:
                terminal.type("\x03")
                give_up += 10
        say(terminal, "endless\n")
        terminal.expect("threeone")
        terminal.type("\x03")
        terminal.expect("[cancelled · ")
        terminal.until(lambda: terminal.screen.text().endswith("\n>"))
        shown = terminal.screen.text()
        assert "first after" in shown[shown.index("[cancelled") :]
        say(terminal, "ok\n")
        terminal.expect("[3 tokens")
        say(terminal, "/quit\n")
        assert terminal.wait() == 0
    deadline = time.monotonic() + 60
    while server[0].cancelled["endless"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_typed_too_early_waits_for_the_prompt(server: tuple[ScriptedInference, str], tmp_path: Path) -> None:
    with chat(server, tmp_path) as terminal:
        say(terminal, "later-2000\n")
        # It may be over before this process looks at the screen.
        terminal.until(lambda: "waiting for the first token" in terminal.raw)
        terminal.type("ok\n")
        terminal.until(lambda: terminal.screen.text().count("[3 tokens") == 2)
        shown = terminal.screen.text()
        assert shown.count("ok\n") == 1, "and shown once"
        assert shown.index("[3 tokens") < shown.index("> ok")


def test_waiting_is_shown(server: tuple[ScriptedInference, str], tmp_path: Path) -> None:
    with chat(server, tmp_path) as terminal:
        say(terminal, "silent\n")
        terminal.expect("waiting for the first token · ")
        terminal.type("\x03")
        terminal.expect("[cancelled · 0 tokens]")


def test_history_is_kept_and_is_the_users_own(server: tuple[ScriptedInference, str], tmp_path: Path) -> None:
    path = tmp_path / "twostep" / "chat_history"
    for number, _ in enumerate(range(2)):
        with chat(server, tmp_path) as terminal:
            if number:
                say(terminal, "\x1b[A\x1b[A")
                terminal.expect("> question 0")
                terminal.type("\n")
            else:
                say(terminal, "question 0\n")
            terminal.expect("[3 tokens")
            say(terminal, "/help\n")
            terminal.expect("/save FILE")
            say(terminal, "\x04")
            assert terminal.wait() == 0
    assert _input_history.load(path) == ["question 0", "/help", "question 0", "/help"]
    assert path.stat().st_mode & 0o777 == 0o600
    with chat(server, tmp_path, "--no-history") as terminal:
        say(terminal, "secret\n")
        terminal.expect("[3 tokens")
        say(terminal, "\x04")
        assert terminal.wait() == 0
    assert "secret" not in _input_history.load(path)


def test_commands_complete(server: tuple[ScriptedInference, str], tmp_path: Path) -> None:
    with chat(server, tmp_path) as terminal:
        say(terminal, "/he\t\n")
        terminal.expect("/save FILE")


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_color_and_no_sequences_at_all(server: tuple[ScriptedInference, str], tmp_path: Path, env: dict[str, str]) -> None:
    with chat(server, tmp_path, **env) as terminal:
        say(terminal, "think\n")
        terminal.expect("[3 tokens")
        assert "(thinking) let me see\n\n42\n[3 tokens" in terminal.screen.text()
        assert "\x1b[2m" not in terminal.raw
        assert "\x1b[0m" not in terminal.raw
        if "TERM" in env:
            assert "\x1bD" not in terminal.raw
            assert "\x1b[J" not in terminal.raw


def test_in_a_pipe_there_is_text_and_nothing_else(server: tuple[ScriptedInference, str]) -> None:
    lines = "think\n/set temperature 0\n/usr/bin is a folder\n/quit\nnever\n"
    done = subprocess.run([*COMMAND, "--target", server[1]], input=lines.encode(), capture_output=True, timeout=120, check=False)
    assert done.stdout == b"42\none two three\n"
    assert done.stderr == b"temperature: 0\n"
    assert server[0].requests[-1].chat.messages[-1].content == "/usr/bin is a folder"


def test_settings_from_flags_and_schema_files(server: tuple[ScriptedInference, str], tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    words = ["generate", "ok", "--target", server[1]]
    for schema in (str(tmp_path / "schema.json"), '{"type": "object"}'):
        subprocess.run([*COMMAND[:-1], *words, "--json-schema", schema], check=True, capture_output=True, timeout=120)
        assert server[0].requests[-1].sampling.grammar.json_schema == '{"type": "object"}'
    done = subprocess.run([*COMMAND[:-1], *words, "--json-schema", "missing.json"], check=False, capture_output=True, timeout=120)
    assert (done.returncode, b"give a file with a JSON Schema" in done.stderr) == (1, True)
    env = {**os.environ, "TWOSTEP_API_KEY": "sk-9"}
    subprocess.run([*COMMAND[:-1], *words, "--regex", "a+"], check=True, capture_output=True, timeout=120, env=env)
    assert server[0].requests[-1].sampling.grammar.regex == "a+"
    assert server[0].metadata[-1]["authorization"] == "Bearer sk-9"
