"""`twostep chat`: a conversation, at a terminal or through a pipe."""

from __future__ import annotations

import argparse
import importlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from twostep.cli import _input_history
from twostep.cli._chat_session import ChatSession, commands
from twostep.cli._connect import client_of
from twostep.cli._flags import sampling_of, urgency_of
from twostep.cli._terminal import Terminal, clipped, unechoed
from twostep.client import Client, Generation, Piece, SamplingOptions
from twostep.errors import InvalidRequest, TwostepError
from twostep.process.printable import harmless

_TICK_S = 0.1
_MAX_QUEUED_PIECES = 1024
_BLOCK = '"""'
_SPINNER = "|/-\\"


def run(args: argparse.Namespace) -> int:
    terminal = Terminal.of(sys.stdout, os.environ)
    session = ChatSession(model=args.model, system=args.system, settings=sampling_of(args))
    with client_of(args) as client:
        # Said now, not after the first question.
        names = [model.name for model in client.models(timeout=min(10.0, args.timeout))]
        chat = ChatLoop(client, session, terminal, urgency=dict(urgency_of(args)), migrate=not args.no_migrate)
        if not sys.stdin.isatty():
            return chat.through_pipe(sys.stdin)
        print(terminal.paint(f"{args.model or ', '.join(names) or 'no model yet'} at {args.target}", "bold"))
        print(terminal.paint("/help lists the commands, Ctrl-C cancels an answer, Ctrl-D leaves.", "dim"))
        history = None if args.no_history else _input_history.default_path(os.environ)
        with MessagePrompt(terminal, history) as prompt:
            return chat.at_terminal(prompt.message)


class ChatLoop:
    """Turns until the input ends. At a terminal an error ends the turn, in a pipe the conversation."""

    def __init__(self, client: Client, session: ChatSession, terminal: Terminal, *, urgency: dict[str, Any], migrate: bool) -> None:
        self._client, self._session, self._terminal = client, session, terminal
        self._options = {"migrate": migrate, **urgency}

    def through_pipe(self, lines: Iterator[str]) -> int:
        """One line, one turn; the answers alone go to standard output."""
        for line in map(str.strip, lines):
            if not line:
                continue
            outcome = self._session.take(line, strict=False)
            if outcome.said:
                print(outcome.said, file=sys.stderr)
            if outcome.leave:
                break
            if outcome.ask:
                answer = self._ask()
                for piece in answer:
                    self._terminal.write(harmless(piece.text) if self._terminal.stream.isatty() else piece.text)
                self._terminal.write("\n")
                self._session.answered(answer.text, answer.reasoning)
        return 0

    def at_terminal(self, read: Callable[[], str]) -> int:
        """`read` raises EOFError at the end, KeyboardInterrupt for a line given up."""
        while True:
            try:
                message = read()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                continue
            if not message.strip():
                continue
            try:
                outcome = self._session.take(message)
            except InvalidRequest as error:
                self._say(error.message, "red")
                continue
            if outcome.said:
                self._say(outcome.said, "dim")
            if outcome.leave:
                return 0
            if outcome.ask:
                self._turn()

    def _turn(self) -> None:
        try:
            with unechoed():
                answer = self._ask()
                cancelled, pace = self._show(answer)
        except TwostepError as error:
            self._session.failed()
            self._say(f"twostep: {error.message}", "red")
            return
        self._session.answered(answer.text, answer.reasoning)
        self._say(summary(answer, pace, cancelled=cancelled) + "\n", "dim")

    def _ask(self) -> Generation:
        sampling = cast(SamplingOptions, self._session.settings)
        return self._client.chat(self._session.conversation(), model=self._session.model, **self._options, **sampling)

    def _show(self, answer: Generation) -> tuple[bool, AnswerSpeed]:
        """Streams the answer. Raises what it raises, at the beginning of a line."""
        pace, shown, cancelled = AnswerSpeed(time.monotonic()), "", False
        thinking = False

        def show(text: str, *styles: str) -> None:
            nonlocal shown
            self._wait_line("" if shown else "\r")
            shown = text or shown
            self._terminal.write(self._terminal.paint(text, *styles))

        try:
            for piece in ticking(answer):
                if piece is None:
                    if not shown:
                        self._wait_line(pace.line(time.monotonic()))
                    continue
                pace.took(piece, time.monotonic())
                if piece.reasoning and self._session.show_reasoning:
                    show(harmless(piece.reasoning if thinking or self._terminal.color else f"(thinking) {piece.reasoning}"), "dim")
                    thinking = True
                if piece.text:
                    show(harmless(f"\n\n{piece.text}" if thinking else piece.text))
                    thinking = False
        except KeyboardInterrupt:
            answer.cancel()
            cancelled = True
        finally:
            if not shown:
                self._wait_line("\r")
            elif not shown.endswith("\n"):
                self._terminal.write("\n")
        return cancelled, pace

    def _wait_line(self, line: str) -> None:
        """Shows on a live terminal that the answer has not begun; a carriage return alone takes the line away."""
        if line and self._terminal.live:
            text = clipped(line.strip("\r"), self._terminal.size().columns - 1)
            self._terminal.write(f"\r\x1b[K{self._terminal.paint(text, 'dim')}")

    def _say(self, text: str, style: str) -> None:
        print(self._terminal.paint(text, style), file=sys.stderr if style == "red" else sys.stdout, flush=True)


@dataclass(slots=True)
class AnswerSpeed:
    """How fast an answer comes, as this terminal sees it. Instants are time.monotonic() seconds."""

    started: float
    first: float = 0.0
    first_visible: float = 0.0
    last: float = 0.0
    num_tokens: int = 0

    def took(self, piece: Piece, now: float) -> None:
        self.first = self.first or now
        if piece.text:
            self.first_visible = self.first_visible or now
        self.last = now
        self.num_tokens += len(piece.token_ids)

    def rate(self, now: float) -> float:
        """Tokens per second after the first one; 0 if that cannot be said yet."""
        return (self.num_tokens - 1) / (now - self.first) if self.num_tokens > 1 and now > self.first else 0.0

    def line(self, now: float) -> str:
        sign = _SPINNER[int((now - self.started) / _TICK_S) % len(_SPINNER)]
        if not self.first:
            return f"{sign} waiting for the first token · {now - self.started:.1f} s · Ctrl-C cancels"
        return f"{sign} thinking · {_tokens(self.num_tokens)} · Ctrl-C cancels"


def summary(answer: Generation, pace: AnswerSpeed, *, cancelled: bool) -> str:
    parts = ["cancelled"] if cancelled else []
    parts.append(_tokens(pace.num_tokens))
    if pace.rate(pace.last):
        parts.append(f"{pace.rate(pace.last):.1f} tokens/s")
    if pace.first:
        parts.append(f"first after {pace.first - pace.started:.2f} s")
    if pace.first_visible > pace.first:
        parts.append(f"first to read after {pace.first_visible - pace.started:.2f} s")
    if answer.finish_reason == "length":
        parts.append("ended by its length")
    if answer.finish_reason and answer.usage.cached_tokens:
        parts.append(f"{answer.usage.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens cached")
    return f"[{' · '.join(parts)}]"


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def ticking(answer: Generation) -> Iterator[Piece | None]:
    """The pieces, and None whenever a moment has passed without one. Raises what iterating raises."""
    pieces: queue.Queue[Piece | BaseException | None] = queue.Queue(_MAX_QUEUED_PIECES)

    def read() -> None:
        try:
            for piece in answer:
                pieces.put(piece)
            pieces.put(None)
        except BaseException as error:  # noqa: BLE001  raised where the answer is shown
            pieces.put(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    ended = False
    try:
        while not ended:
            try:
                piece = pieces.get(timeout=_TICK_S)
            except queue.Empty:
                yield None
                continue
            ended = piece is None or isinstance(piece, BaseException)
            if isinstance(piece, BaseException):
                raise piece
            if piece is not None:
                yield piece
    finally:
        if not ended:
            answer.cancel()
            # The reader may wait for room.
            while reader.is_alive():
                try:
                    pieces.get(timeout=_TICK_S)
                except queue.Empty:
                    continue
        reader.join()


class MessagePrompt:
    """Asks for messages, with line editing, a history, and commands that complete. A context: leaving it writes the history."""

    def __init__(self, terminal: Terminal, history: Path | None) -> None:
        self._history, self._new = history, list[str]()
        # readline must know what takes no room.
        paint = terminal.paint
        self._first, self._next = (
            (f"\001{text[0]}\002{text[1]}\001{text[2]}\002" if terminal.color else text[1])
            for text in (paint("\0> \0", "bold", "cyan").split("\0"), paint("\0… \0", "dim").split("\0"))
        )
        try:
            self._readline: Any = importlib.import_module("readline")
        except ImportError:
            self._readline = None

    def __enter__(self) -> MessagePrompt:
        readline = self._readline
        if readline is not None:
            readline.set_auto_history(False)
            readline.set_completer_delims(" ")
            readline.set_completer(self._complete)
            readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
            for entry in _input_history.load(self._history) if self._history else []:
                readline.add_history(entry)
        return self

    def __exit__(self, *_: object) -> None:
        if self._history:
            _input_history.save(self._history, self._new)

    def message(self) -> str:
        """One line, or several: ended by a backslash each but the last, pasted at once, or between triple quotes."""
        message = read_message(self._first, self._next, input)
        if message.strip():
            self._new.append(message)
            if self._readline is not None:
                self._readline.add_history(message)
        return message

    @staticmethod
    def _complete(text: str, state: int) -> str | None:
        fitting = [f"{command} " for command in commands() if text.startswith("/") and command.startswith(text)]
        return fitting[state] if state < len(fitting) else None


def read_message(first: str, following: str, read: Callable[[str], str]) -> str:
    """`read` shows a prompt and returns a line without its end. Raises what it raises."""
    line = read(first)
    if line.lstrip().startswith(_BLOCK):
        lines = [line.lstrip().removeprefix(_BLOCK)]
        while not lines[-1].rstrip().endswith(_BLOCK):
            lines.append(read(following))
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read(following))
    return "\n".join(lines).strip()
