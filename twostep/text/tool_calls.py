"""Tool calls in the text of an answer, found while it arrives.

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>      Qwen 2.5, Qwen 3, Hermes, SmolLM2 (there with a list inside)
    llama3_json   {"name": "f", "parameters": {...}}                             Llama 3.1, 3.2: all of the answer, or after <|python_tag|>
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}]                Mistral; newer ones: [TOOL_CALLS]f[ARGS]{...}

What precedes a call's arguments is held back until it is certain that there is a call: if not, it is given out as content, every character
of it, once. From then on arguments are passed on as the model writes them, also where it writes no valid JSON. What an answer that was cut
off has of a call that did not get so far is no content either.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from twostep.errors import SetupError
from twostep.text.tool_call_formats import hermes_calls, llama3_json_calls, mistral_calls
from twostep.text.tool_call_reader import Reader
from twostep.text.tool_events import Content, Event


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's chat templates refuse every other kind."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """`markers`: tokens that the text has to show, special or not. `read`: the grammar of it, as a coroutine over a Reader."""

    name: str
    markers: tuple[str, ...]
    read: Callable[[Reader], Iterator[None]]
    new_id: Callable[[], str] = _call_id


HERMES = ToolCallFormat("hermes", ("<tool_call>", "</tool_call>"), hermes_calls)
LLAMA3_JSON = ToolCallFormat("llama3_json", ("<|python_tag|>",), llama3_json_calls)
MISTRAL = ToolCallFormat("mistral", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), mistral_calls, _short_id)

TOOL_CALL_FORMATS = {format.name: format for format in (HERMES, LLAMA3_JSON, MISTRAL)}
TOOL_CALL_PARSERS = ("auto", "none", *TOOL_CALL_FORMATS)


def tool_call_format(name: str, chat_template: str | None) -> ToolCallFormat | None:
    """Of a parser's name. "auto" looks at the model's chat template, which writes earlier calls as the model writes new ones."""
    if name == "none":
        return None
    if name == "auto":
        return _told_by(chat_template or "")
    try:
        return TOOL_CALL_FORMATS[name]
    except KeyError:
        raise SetupError(f"--tool-call-parser {name!r} is not known; give one of {', '.join(TOOL_CALL_PARSERS)}") from None


def _told_by(template: str) -> ToolCallFormat | None:
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        # With XML inside the tags: another format.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if "tool_calls" in template and "parameters" in template and "<|start_header_id|>" in template:
        return LLAMA3_JSON
    return None


class ToolCallParser:
    """Watches one answer; not thread-safe. The outcome does not depend on how the text was cut into pieces, but for where deltas end."""

    def __init__(
        self,
        format: ToolCallFormat,
        *,
        names: Collection[str] = (),
        parallel: bool = True,
        must: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`names`: the functions that there are; a bare JSON object is a call only if it names one of them (all formats with a mark take
        any name: whoever executes calls says that there is no such function). Without `parallel`, calls after the first are dropped.
        `must`: a grammar holds the answer to calls."""
        self._must = must
        self._reader = Reader(names=frozenset(names), parallel=parallel, new_id=new_id or format.new_id)
        self._reading = format.read(self._reader)
        self._ended = False
        self._advance()

    @property
    def num_calls(self) -> int:
        """Given out so far."""
        return self._reader.num_calls

    def push(self, text: str) -> list[Event]:
        """Takes the next piece of the answer, returns what is certain."""
        if not text:
            return []
        if self._ended:
            return [Content(text)]
        self._reader.feed(text)
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The answer is over: what was held back is no call. `cut`: the model would have gone on; then it is dropped where it can only have
        become one."""
        if self._ended:
            return []
        self._reader.end(cut=cut, must=self._must)
        return self._advance()

    def _advance(self) -> list[Event]:
        try:
            next(self._reading)
        except StopIteration:
            self._ended = True
        return self._reader.taken()
