"""A conversation and its settings, and what its commands do to them. No terminal, no client."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twostep.cli._flags import SAMPLING
from twostep.client import Message
from twostep.errors import InvalidRequest

_MAX_FILE_BYTES = 16 << 20
_COMMAND = re.compile(r"/[a-z]+(\s|$)")

SETTINGS: dict[str, Callable[[str], Any]] = {**SAMPLING, "regex": str, "json_schema": str}

HELP = """\
  /new              begin again, with the same system message
  /system [TEXT]    show the system message, or set it ("off": none)
  /set [NAME VALUE] show the settings, or set one ("default": the model's own)
  /retry            ask the last question again
  /save FILE        write the conversation, as JSON
  /load FILE        go on with one that was written
  /quit             leave; so does Ctrl-D
  //TEXT            a message that begins with a slash
Ctrl-C cancels an answer. A line that ends with \\ goes on in the next one;
\"\"\" begins and ends a message of several lines, and so does pasting it."""


@dataclass(frozen=True, slots=True)
class LineResult:
    """Says what is to be done after a line. `ask`: send the conversation; `leave`: end it; `said`: show this."""

    ask: bool = False
    leave: bool = False
    said: str = ""


@dataclass(slots=True)
class ChatSession:
    """`messages` are the turns so far, without the system message."""

    model: str = ""
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    show_reasoning: bool = True
    messages: list[Message] = field(default_factory=list)

    def conversation(self) -> list[Message]:
        return [*([Message("system", self.system)] if self.system else []), *self.messages]

    def take(self, line: str, *, strict: bool = True) -> LineResult:
        """A message or a command. Raises InvalidRequest for a command that cannot be carried out, and changes nothing then.

        Not `strict`: what is no known command is a message, as it is best in a pipe."""
        word, _, rest = line.partition(" ")
        command = _COMMANDS.get(word) if _COMMAND.match(line) else None
        if command is not None:
            return command(self, rest.strip())
        if strict and _COMMAND.match(line):
            raise InvalidRequest(f"there is no command {word}; /help lists them, and a message may begin with //")
        self.messages.append(Message("user", line[1:] if line.startswith("//") else line))
        return LineResult(ask=True)

    def answered(self, text: str, reasoning: str) -> None:
        """An answer, whole or cut short. An empty one takes its question back."""
        if text:
            self.messages.append(Message("assistant", text, reasoning=reasoning))
        else:
            self.failed()

    def failed(self) -> None:
        if self.messages and self.messages[-1].role == "user":
            self.messages.pop()

    # ---- commands -----------------------------------------------------------------------------------------------------

    def _do_help(self, _: str) -> LineResult:
        return LineResult(said=HELP)

    def _do_quit(self, _: str) -> LineResult:
        return LineResult(leave=True)

    def _do_new(self, _: str) -> LineResult:
        self.messages = []
        return LineResult(said="A new conversation.")

    def _do_system(self, text: str) -> LineResult:
        if not text:
            return LineResult(said=f"The system message: {self.system}" if self.system else "There is no system message.")
        self.system = "" if text == "off" else text
        return LineResult(said="The system message is set." if self.system else "No system message any more.")

    def _do_set(self, text: str) -> LineResult:
        if not text:
            return LineResult(said=self._settings())
        name, _, value = text.partition(" ")
        name, value = name.replace("-", "_"), value.strip()
        if name == "reasoning":
            if value not in ("show", "hide"):
                raise InvalidRequest(f"reasoning {value!r}: give show or hide")
            self.show_reasoning = value == "show"
        elif name == "model":
            self.model = "" if value == "default" else value
        elif name not in SETTINGS:
            raise InvalidRequest(f"there is no setting {name!r}; there are {', '.join(SETTINGS)}, model and reasoning")
        elif value == "default":
            self.settings.pop(name, None)
        else:
            self.settings[name] = _value(name, value)
        return LineResult(said=f"{name}: {value}")

    def _do_retry(self, _: str) -> LineResult:
        at = max((index for index, message in enumerate(self.messages) if message.role == "user"), default=None)
        if at is None:
            raise InvalidRequest("nothing was asked yet")
        self.messages = self.messages[: at + 1]
        same = "seed" in self.settings or self.settings.get("temperature") == 0.0
        return LineResult(ask=True, said="With this seed or temperature the answer will be the same." if same else "")

    def _do_save(self, name: str) -> LineResult:
        if not name:
            raise InvalidRequest("give a file: /save FILE")
        path = Path(name).expanduser()
        written = {"model": self.model, "settings": self.settings, "messages": [_plain(message) for message in self.conversation()]}
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(written, file, ensure_ascii=False, indent=1)
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror}; choose another file") from error
        return LineResult(said=f"Written to {path}: {_count(len(self.messages))}.")

    def _do_load(self, name: str) -> LineResult:
        if not name:
            raise InvalidRequest("give a file: /load FILE")
        path = Path(name).expanduser()
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise InvalidRequest(f"{path} has more than {_MAX_FILE_BYTES >> 20} MiB; choose another file")
            read = json.loads(path.read_text(encoding="utf-8"))
            model, settings = str(read.get("model", "")), {name: value for name, value in read["settings"].items() if name in SETTINGS}
            messages = [Message(str(m["role"]), str(m["content"]), reasoning=str(m.get("reasoning", ""))) for m in read["messages"]]
        except OSError as error:
            raise InvalidRequest(f"{path}: {error.strerror}; choose another file") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(f"{path} is no conversation that /save wrote: {error}") from error
        system = messages.pop(0).content if messages and messages[0].role == "system" else ""
        self.model, self.settings, self.system, self.messages = model, settings, system, messages
        return LineResult(said=f"Read from {path}: {_count(len(messages))}.")

    def _settings(self) -> str:
        lines = [f"  {name:<20}{self.settings.get(name, 'default')}" for name in SETTINGS]
        lines += [f"  {'model':<20}{self.model or 'default'}", f"  {'reasoning':<20}{'show' if self.show_reasoning else 'hide'}"]
        return "\n".join(lines)


_COMMANDS: dict[str, Callable[[ChatSession, str], LineResult]] = {
    "/exit": ChatSession._do_quit,
    "/help": ChatSession._do_help,
    "/load": ChatSession._do_load,
    "/new": ChatSession._do_new,
    "/quit": ChatSession._do_quit,
    "/retry": ChatSession._do_retry,
    "/save": ChatSession._do_save,
    "/set": ChatSession._do_set,
    "/system": ChatSession._do_system,
}


def commands() -> list[str]:
    return list(_COMMANDS)


def _value(name: str, text: str) -> Any:
    try:
        value = SETTINGS[name](text)
    except ValueError:
        raise InvalidRequest(f"{name} {text!r}: give a {'whole number' if SETTINGS[name] is int else 'number'}, or default") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidRequest(f"{name} {text!r}: give a number, or default")
    return value


def _plain(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content, **({"reasoning": message.reasoning} if message.reasoning else {})}


def _count(num_messages: int) -> str:
    return "1 message" if num_messages == 1 else f"{num_messages} messages"
