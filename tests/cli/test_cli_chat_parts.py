"""Tests of the parts of `twostep chat`: wrapping, the status line, commands, history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostep.cli import _input_history
from twostep.cli._chat import AnswerSpeed, read_message
from twostep.cli._chat_session import ChatSession, commands
from twostep.cli._terminal import clipped, width_of
from twostep.client import Message, Piece
from twostep.errors import InvalidRequest
from twostep.process.printable import harmless


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
    pace = AnswerSpeed(10.0)
    assert "waiting for the first token · 0.5 s" in pace.line(10.5)
    pace.took(Piece("", (1, 2), reasoning="hm"), 11.0)
    assert "thinking · 2 tokens" in pace.line(11.5)
    pace.took(Piece("x", (3,)), 12.0)
    assert (pace.first_visible, pace.rate(12.0)) == (12.0, 2.0)


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


def test_the_last_question_is_asked_again_without_its_answer() -> None:
    session = ChatSession()
    for question in ("hi", "ho"):
        session.take(question)
        session.answered("hello", "")
    assert session.take("/retry").ask
    assert [message.content for message in session.messages] == ["hi", "hello", "ho"]


def test_a_failed_question_is_taken_back() -> None:
    session = ChatSession()
    session.take("hi")
    session.failed()
    session.take("ho")
    session.answered("", "")
    assert session.messages == []


def test_histories_have_bounds(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    _input_history.save(path, [f"line {n}" for n in range(3 * _input_history.MAX_ENTRIES)])
    kept = _input_history.load(path)
    assert (len(kept), kept[-1]) == (_input_history.MAX_ENTRIES, "line 2999")
    for number in range(5):
        _input_history.save(path, ["x" * 600_000 + str(number)])
    assert path.stat().st_size <= 2 * _input_history.MAX_BYTES
    assert _input_history.load(path)[-1].endswith("4")
    path.write_text('"fine"\nnot json\n7\n"fine"\n"\\ud800"\n')
    assert _input_history.load(path) == ["fine", "\ud800"]
    _input_history.save(path, ["one more"])
    assert json.loads(path.read_text().splitlines()[-1]) == "one more"
    # Nowhere to write is no reason to fail.
    _input_history.save(Path("/proc/none/history"), ["x"])
