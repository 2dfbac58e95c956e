"""`twostep chat` at a terminal, as its user sees it, and what it is made of."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_server import ScriptedInference, serving_in_thread
from terminal_screen import Screen, Session

from twostep.cli import _input_history
from twostep.cli._chat import Pace, read_message
from twostep.cli._chat_session import Session as ChatSession
from twostep.cli._chat_session import commands
from twostep.cli._flow import Flow, Wrapper
from twostep.cli._terminal import Terminal, clipped, harmless, width_of
from twostep.client import Message, Piece
from twostep.errors import InvalidRequest

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
        # readline may be between two looks at what has come; it sees the signal at the next key then.
        give_up = time.monotonic() + 3
        while not terminal.screen.text().endswith("> half a li\n>"):
            terminal.read(0.1)
            if time.monotonic() > give_up:
                terminal.type(" ")
                give_up += 3
        say(terminal, "endless\n")
        terminal.expect("threeone")
        if term != "dumb":
            terminal.expect("tokens/s · ")
        terminal.type("\x03")
        terminal.expect("[cancelled · ")
        terminal.until(lambda: terminal.screen.text().endswith("\n>"))
        shown = terminal.screen.text()
        assert shown.count("tokens/s") == 1, "the status line is gone"
        assert "first after" in shown[shown.index("[cancelled") :]
        say(terminal, "ok\n")
        terminal.expect("[3 tokens")
        say(terminal, "/quit\n")
        assert terminal.wait() == 0
    deadline = time.monotonic() + 10
    while server[0].cancelled["endless"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_typed_too_early_waits_for_the_prompt(server: tuple[ScriptedInference, str], tmp_path: Path) -> None:
    with chat(server, tmp_path) as terminal:
        say(terminal, "later-2000\n")
        terminal.expect("waiting for the first token")
        terminal.type("ok\n")
        terminal.until(lambda: terminal.screen.text().count("[3 tokens") == 2)
        shown = terminal.screen.text()
        assert shown.count("ok\n") == 1, "and shown once"
        assert shown.index("[3 tokens") < shown.index("> ok")


def test_waiting_is_shown(server: tuple[ScriptedInference, str], tmp_path: Path) -> None:
    with chat(server, tmp_path) as terminal:
        say(terminal, "silent\n")
        terminal.expect("waiting for the first token · 0.")
        terminal.type("\x03")
        terminal.expect("[cancelled · 0 tokens]")


@pytest.mark.parametrize("width", [24, 40])
def test_narrow_and_resized(server: tuple[ScriptedInference, str], tmp_path: Path, width: int) -> None:
    with chat(server, tmp_path, width=width) as terminal:
        say(terminal, "endless\n")
        terminal.expect("tokens/s" if width > 30 else "tok")
        terminal.resize(100, 10)
        terminal.expect("first after")
        terminal.type("\x03")
        terminal.expect("[cancelled · ")


def test_what_a_model_says_does_not_command_the_terminal(server: tuple[ScriptedInference, str], tmp_path: Path) -> None:
    with chat(server, tmp_path) as terminal:
        say(terminal, "bare\n")
        terminal.expect("a␛[31mb␇c\ufffd2Jd")


def test_several_lines_and_a_paste(server: tuple[ScriptedInference, str], tmp_path: Path) -> None:
    with chat(server, tmp_path) as terminal:
        say(terminal, "one \\\ntwo\n")
        terminal.expect("[3 tokens")
        say(terminal, '"""first\n\n  second\n"""\n')
        terminal.until(lambda: terminal.screen.text().count("[3 tokens") == 2)
        say(terminal, "\x1b[200~pasted\nlines\x1b[201~\n")
        terminal.until(lambda: terminal.screen.text().count("[3 tokens") == 3)
    asked = [message.content for message in server[0].requests[-1].chat.messages if message.role == "user"]
    assert asked == ["one \ntwo", "first\n\n  second", "pasted\nlines"]


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
    done = subprocess.run([*COMMAND, "--target", server[1]], input=lines.encode(), capture_output=True, timeout=60, check=False)
    assert done.stdout == b"42\none two three\n"
    assert done.stderr == b"temperature: 0\n"
    assert server[0].requests[-1].chat.messages[-1].content == "/usr/bin is a folder"


def test_settings_from_flags_and_schema_files(server: tuple[ScriptedInference, str], tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    words = ["generate", "ok", "--target", server[1]]
    for schema in (str(tmp_path / "schema.json"), '{"type": "object"}'):
        subprocess.run([*COMMAND[:-1], *words, "--json-schema", schema], check=True, capture_output=True, timeout=60)
        assert server[0].requests[-1].sampling.grammar.json_schema == '{"type": "object"}'
    done = subprocess.run([*COMMAND[:-1], *words, "--json-schema", "missing.json"], check=False, capture_output=True, timeout=60)
    assert (done.returncode, b"give a file with a JSON Schema" in done.stderr) == (1, True)
    env = {**os.environ, "TWOSTEP_API_KEY": "sk-9"}
    subprocess.run([*COMMAND[:-1], *words, "--regex", "a+"], check=True, capture_output=True, timeout=60, env=env)
    assert server[0].requests[-1].sampling.grammar.regex == "a+"
    assert server[0].metadata[-1]["authorization"] == "Bearer sk-9"


# ---- what it is made of ---------------------------------------------------------------------------------------------------

WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=9), max_size=30)


@settings(max_examples=80)
@given(WORDS, st.integers(11, 60), st.integers(0, 1 << 30))
def test_wrapped_at_words_however_the_text_is_cut(words: list[str], width: int, seed: int) -> None:
    text, draw = " ".join(words), random.Random(seed)
    wrapper, screen = Wrapper(), Screen(width, 200)
    at = 0
    while at < len(text):
        end = min(len(text), at + draw.randint(1, 7))
        screen.feed(wrapper.feed(text[at:end], width).replace("\n", "\r\n"))
        assert screen.column == wrapper.column
        at = end
    assert screen.text().split("\n") == (textwrap.wrap(text, width - 1) or [""])


@settings(max_examples=60)
@given(st.lists(st.text("ab \n日本🙂é`", max_size=12), max_size=12), st.integers(10, 40))
def test_the_status_line_disturbs_nothing(pieces: list[str], width: int) -> None:
    """With and without it the text looks the same, at the screen's bottom too."""
    shown = []
    for line in ("", "status " * 9):
        screen = Screen(width, 4)
        terminal = Terminal(_Tty(screen, width), live=True, color=True)  # type: ignore[arg-type]
        flow = Flow(terminal)
        for piece in pieces:
            flow.write(piece)
            flow.status(line)
        flow.status("")
        shown.append((screen.text(), screen.column))
    assert shown[0] == shown[1]


class _Tty:
    """Standard output at a terminal whose driver makes \\r\\n of \\n."""

    def __init__(self, screen: Screen, width: int) -> None:
        self._screen, self._width = screen, width

    def write(self, text: str) -> None:
        self._screen.feed(text.replace("\n", "\r\n"))

    def flush(self) -> None: ...

    def fileno(self) -> int:
        raise OSError


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Terminal.size

    def size(self: Terminal) -> os.terminal_size:
        return os.terminal_size((self.stream._width, 4)) if isinstance(self.stream, _Tty) else original(self)

    monkeypatch.setattr(Terminal, "size", size)


def test_code_is_left_as_it_is() -> None:
    wrapper = Wrapper()
    code = "```python\nx = 1 + 2 + 3 + 4 + 5 + 6\n```\n"
    assert wrapper.feed(code, 12) == code
    assert "\n" in wrapper.feed("and words again", 12)


def test_widths_and_clips() -> None:
    assert [width_of(text) for text in ("abc", "日本", "e\u0301", "🙂", "")] == [3, 4, 1, 2, 0]
    assert [clipped("abcdef", width) for width in (6, 4, 1, 0)] == ["abcdef", "abc…", "…", ""]
    assert clipped("日本語", 4) == "日…"
    assert harmless("a\tb\nc\r\x1b\x7f\x85é") == "a\tb\nc␛␡\ufffdé"


def test_messages_of_several_lines() -> None:
    def read(*lines: str) -> str:
        left = list(lines)
        return read_message("> ", "… ", lambda _: left.pop(0))

    assert read("hello") == "hello"
    assert read("a\\", "b\\", "c") == "a\nb\nc"
    assert read('"""', "x", "", '  y"""') == "x\n\n  y"
    assert read('"""all at once"""') == "all at once"
    assert read('""" """') == " "


def test_the_pace() -> None:
    pace = Pace(10.0)
    assert "waiting for the first token · 0.5 s" in pace.line(10.5)
    pace.took(Piece("", (1, 2), reasoning="hm"), 11.0)
    assert "thinking · " in pace.line(11.5)
    pace.took(Piece("x", (3,)), 12.0)
    assert "2.0 tokens/s · 3 tokens · first after 1.00 s" in pace.line(12.0)
    assert pace.first_visible == 12.0


def test_saved_and_loaded(tmp_path: Path) -> None:
    session = ChatSession(system="be brief", settings={"temperature": 0.5})
    assert session.take("hi").ask
    session.answered("hello", "why not")
    path = tmp_path / "talk.json"
    assert "2 messages" in session.take(f"/save {path}").said
    assert path.stat().st_mode & 0o777 == 0o600
    other = ChatSession()
    assert "2 messages" in other.take(f"/load {path}").said
    assert (other.conversation(), other.settings) == (session.conversation(), session.settings)
    assert other.messages[1] == Message("assistant", "hello", reasoning="why not")
    for bad in ("[]", "{", '{"messages": [{"role": 1}], "settings": {}}', '{"messages": 7, "settings": {}}'):
        path.write_text(bad)
        with pytest.raises(InvalidRequest, match="no conversation that /save wrote"):
            other.take(f"/load {path}")
    assert other.conversation() == session.conversation(), "what failed changed nothing"
    for line in ("/load", "/save", f"/load {tmp_path}/missing", f"/save {tmp_path}/no/where"):
        with pytest.raises(InvalidRequest, match=r"give a file|choose another file"):
            other.take(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set heat 3", "there is no setting 'heat'"),
        ("/set temperature hot", "give a number"),
        ("/set temperature nan", "give a number"),
        ("/set seed 1.5", "give a whole number"),
        ("/set reasoning maybe", "show or hide"),
        ("/retry", "nothing was asked yet"),
        ("/nope", "there is no command /nope"),
    ],
)
def test_commands_that_cannot_be(line: str, message: str) -> None:
    session = ChatSession()
    with pytest.raises(InvalidRequest, match=message):
        session.take(line)
    assert session == ChatSession()


def test_settings_and_system() -> None:
    session = ChatSession()
    assert session.take("/set top-p 0.9").said == "top_p: 0.9"
    assert session.settings == {"top_p": 0.9}
    assert "top_p               0.9" in session.take("/set").said
    session.take("/set top_p default")
    session.take("/set model small")
    assert (session.settings, session.model) == ({}, "small")
    assert session.take("/system").said == "There is no system message."
    session.take("/system be brief")
    assert session.conversation() == [Message("system", "be brief")]
    session.take("/system off")
    assert session.conversation() == []
    assert session.take("/quit").leave
    assert {"/help", "/new", "/system", "/save", "/load", "/retry", "/set", "/quit"} <= set(commands())


def test_a_failed_question_is_taken_back() -> None:
    session = ChatSession()
    session.take("hi")
    session.failed()
    session.take("ho")
    session.answered("", "")
    assert session.messages == []


@settings(max_examples=60)
@given(st.lists(st.text(max_size=20), max_size=20), st.lists(st.text(max_size=20), max_size=20))
def test_histories_merge_to_what_is_newest(old: list[str], new: list[str]) -> None:
    merged = _input_history.merged(old, new)
    once = [entry for before, entry in zip(["", *old, *new], [*old, *new], strict=False) if entry and entry != before]
    assert [entry for before, entry in zip(["", *merged], merged, strict=False) if entry != before] == merged
    assert set(merged) == set(once)
    assert _input_history.merged(merged, []) == merged


def test_histories_have_bounds(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    _input_history.save(path, [f"line {n}" for n in range(3 * _input_history.MAX_ENTRIES)])
    kept = _input_history.load(path)
    assert (len(kept), kept[-1]) == (_input_history.MAX_ENTRIES, "line 2999")
    _input_history.save(path, ["x" * 60_000 + str(n) for n in range(30)])
    assert path.stat().st_size <= _input_history.MAX_BYTES
    assert _input_history.load(path)[-1].endswith("29")
    path.write_text('"fine"\nnot json\n7\n"\\ud800"\n')
    assert _input_history.load(path) == ["fine", "\ud800"]
    _input_history.save(path, ["one more"])
    assert json.loads(path.read_text().splitlines()[-1]) == "one more"
    # Nowhere to write is no reason to fail.
    _input_history.save(Path("/proc/none/history"), ["x"])


def test_signals_are_as_they_were() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
