"""Tool calls in the text of an answer, found while it arrives.

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>      Qwen 2.5, Qwen 3, Hermes, SmolLM2 (there with a list inside)
    llama3_json   {"name": "f", "parameters": {...}}                             Llama 3.1, 3.2: all of the answer, or after <|python_tag|>
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}]                Mistral; newer ones: [TOOL_CALLS]f[ARGS]{...}

What precedes a call's arguments is held back until it is certain that there is a call: if not, it is given out as content, every character
of it, once. From then on arguments are passed on as the model writes them, also where it writes no valid JSON. What an answer that was cut
off has of a call that did not get so far is no content either.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from twostep.errors import SetupError


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The `index`-th call of this answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, a JSON object as the model writes it."""

    index: int
    text: str


Event = ContentDelta | CallBegun | CallArguments


Read = Generator[None, None, str]

_SPACE = " \t\r\n"
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
MAX_NAME = 256
# Of what may precede a call's arguments; a longer beginning is no call's.
_MAX_HELD = 1 << 16
_MAX_CALLS = 1024
_CALL_KEYS = frozenset({"name", "type", "id", "arguments", "parameters"})
_ARGUMENTS = frozenset({"arguments", "parameters"})


def _kind(event: Event) -> tuple[type[Event], int | None]:
    return type(event), None if isinstance(event, ContentDelta) else event.index


@lru_cache
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str]]:
    """Returns a pattern that finds the first of them, and all that may become one."""
    beginnings = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
    return re.compile("|".join(map(re.escape, markers))), beginnings


class NoCall(Exception):
    """Says that something else than a call follows the mark."""


class ToolCallReader:
    """Gives formats the characters of an answer as they come, and collects the events that they find. A format is a coroutine: it yields
    where it needs more text, and is resumed when there is some or none will come. Before a call has begun it reads behind a mark: `NoCall`
    takes it back there, and what it has read is content. After that nothing is taken back."""

    def __init__(self, *, names: frozenset[str], parallel: bool, new_id: Callable[[], str]) -> None:
        self.names = names
        self.num_calls = 0
        self._parallel = parallel
        self._new_id = new_id
        self._text = ""
        self._at = 0  # next character to read
        self._mark: int | None = None  # text from here on is kept, where it stands
        self._certain = False  # what follows the mark is a call, as far as it goes
        self._ended = False
        self.cut_in_call = False
        self._events: list[Event] = []
        # White space that is dropped if it turns out to stand next to a call.
        self._space: list[str] = []
        self._says_something = False  # content since the beginning or the last call
        self._num_found = 0

    # ---- for the parser ----------------------------------------------------------------------------------------------

    def feed(self, text: str) -> None:
        if self._mark is None:
            self._text, self._at = self._text[self._at :], 0
        self._text += text

    def end(self, *, cut: bool = False, must: bool = False) -> None:
        """`cut`: more would have followed. `must`: there is nothing but calls."""
        self._ended = True
        if cut and (must or self._num_found or (self._mark is not None and self._certain)):
            self.cut_in_call = True
            self._text = self._text[: self._at if self._mark is None else self._mark]

    def taken(self) -> list[Event]:
        """Events since the last time; deltas of one kind that follow each other are one."""
        merged: list[Event] = []
        for (kind, index), run in groupby(self._events, key=_kind):
            if kind is CallBegun:
                merged += run
            else:
                text = "".join(event.text for event in run if not isinstance(event, CallBegun))
                merged.append(ContentDelta(text) if index is None else CallArguments(index, text))
        self._events = []
        return merged

    # ---- reading -----------------------------------------------------------------------------------------------------

    def mark(self, *, certain: bool = False) -> None:
        """The place to come back to. Places in the text are good until it is released. `certain`: only a call looks as what comes next."""
        self._mark, self._certain = self._at, certain

    def release(self) -> None:
        self._mark = None

    def rewind(self, num_chars: int = 0) -> None:
        """Back to the mark; so many characters from there are content, and what follows is read again."""
        assert self._mark is not None, "nothing is marked"
        self._at, start = self._mark + num_chars, self._mark
        self.say(self._text[start : self._at])
        self.release()

    def peek(self) -> Read:
        """The next character, empty at the end."""
        while self._at >= len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def take(self) -> Read:
        char = yield from self.peek()
        self._at += len(char)
        return char

    def skip_space(self) -> Read:
        """The character after it, not taken."""
        while (char := (yield from self.peek())) and char in _SPACE:
            self._at += 1
        return char

    def follows(self, marker: str) -> Generator[None, None, bool]:
        """Takes `marker` if it comes next."""
        while not self._text.startswith(marker, self._at):
            rest = self._text[self._at : self._at + len(marker)]
            if self._ended or not marker.startswith(rest):
                return False
            yield
        self._at += len(marker)
        return True

    def content_until(self, *markers: str) -> Read:
        """Says everything before the first of `markers`, which is not taken; empty at the end of the text."""
        pattern, beginnings = _patterns(markers)
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self.say(self._text[self._at : found.start()])
                self._at = found.start()
                return found.group()
            text = self._text[self._at :]
            keep = 0
            if not self._ended:
                longest = min(len(text), max(map(len, markers)) - 1)
                keep = next((n for n in range(longest, 0, -1) if text[-n:] in beginnings), 0)
            self.say(text[: len(text) - keep])
            self._at += len(text) - keep
            if self._ended:
                return ""
            yield

    def string(self) -> Read:
        """A JSON string, decoded. Raises NoCall for anything else."""
        start = self._at
        if (yield from self.take()) != '"':
            raise NoCall
        while True:
            char = yield from self.take()
            if not char or self._at - start > _MAX_HELD:
                raise NoCall
            if char == "\\":
                yield from self.take()
            elif char == '"':
                break
        try:
            value = json.loads(self._text[start : self._at])
        except ValueError:
            raise NoCall from None
        assert isinstance(value, str), "what begins and ends with a quote is a string"
        return value

    def value(self) -> Read:
        """Any JSON value, as it is written. Raises NoCall if there is none."""
        start = self._at
        char = yield from self.peek()
        if char == '"':
            yield from self.string()
        elif char and char in "{[":
            brackets = Brackets()
            while not brackets.closed:
                if not (yield from self.peek()) or self._at - start > _MAX_HELD:
                    raise NoCall
                self._at = brackets.scan(self._text, self._at)
        else:
            while (char := (yield from self.peek())) and (char.isalnum() or char in "+-."):
                self._at += 1
                if self._at - start > 64:
                    raise NoCall
        if self._at == start:
            raise NoCall
        return self._text[start : self._at]

    # ---- what is found -----------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        if not self._says_something:
            self._space.append(text)
            if not text.strip(_SPACE):
                return
            self._says_something = True
            text, self._space = "".join(self._space), []
        if text:
            self._events.append(ContentDelta(text))

    def begin_call(self, name: str) -> None:
        self._space, self._says_something = [], False
        self._num_found += 1
        if self._wanted:
            self._events.append(CallBegun(self.num_calls, self._new_id(), name))
            self.num_calls += 1

    def argue(self, text: str) -> None:
        """More of the arguments of the call that has begun."""
        if text and self._wanted:
            self._events.append(CallArguments(self.num_calls - 1, text))

    @property
    def _wanted(self) -> bool:
        return self._num_found <= (_MAX_CALLS if self._parallel else 1)

    def last_words(self) -> None:
        """The text is over. White space around calls is dropped; without any, it is content like everything else."""
        space, self._space = "".join(self._space), []
        if space and not self._num_found and not self.cut_in_call:
            self._events.append(ContentDelta(space))

    # ---- a call ------------------------------------------------------------------------------------------------------

    def arguments(self, name: str) -> Generator[None, None, None]:
        """At the value of the call's arguments, which are passed on while they come. The call begins with it. Raises NoCall if there is
        neither an object nor a string with one inside."""
        char = yield from self.peek()
        if char == "{" or (not char and self.cut_in_call):
            self.begin_call(name)
            self.release()
            brackets = Brackets()
            while not brackets.closed and (yield from self.peek()):
                at = brackets.scan(self._text, self._at)
                self.argue(self._text[self._at : at])
                self._at = at
            return
        if char == '"':
            text = yield from self.string()
        elif (yield from self.value()) == "null":
            text = "{}"
        else:
            raise NoCall
        self.begin_call(name)
        self.release()
        self.argue(text or "{}")

    def call_object(self, *, bare: bool) -> Generator[None, None, None]:
        """{"name": "f", "arguments": {...}}, in any order and with other keys. `bare`: nothing but what is in it tells that it is a call.
        Raises NoCall, only before the call has begun."""
        if (yield from self.take()) != "{":
            raise NoCall
        name: str | None = None
        held: str | None = None
        begun = False
        try:
            while (yield from self.skip_space()) == '"':
                key = yield from self.string()
                if bare and key not in _CALL_KEYS:
                    raise NoCall
                if (yield from self.skip_space()) != ":":
                    raise NoCall
                self._at += 1
                yield from self.skip_space()
                if key == "name" and not begun:
                    name = yield from self.string()
                    if not 0 < len(name) <= MAX_NAME or (bare and self.names and name not in self.names):
                        raise NoCall
                    self._certain = self._certain or name in self.names
                elif key in _ARGUMENTS and not begun and name is not None:
                    yield from self.arguments(name)
                    begun = True
                elif key in _ARGUMENTS and not begun:
                    held = yield from self.value()
                else:
                    yield from self.value()
                if begun:
                    self.mark()
                if (yield from self.skip_space()) == ",":
                    self._at += 1
            if (yield from self.take()) != "}":
                raise NoCall
        except NoCall:
            if begun:
                self.rewind()  # behind the last key: the call stands, the rest is content
                return
            if self.cut_in_call and name is not None:
                self.begin_call(name)
                self.release()
                self.argue(held if held is not None and held.startswith("{") else "")
                return
            raise
        if begun:
            self.release()
        else:
            if name is None or (held is None and bare) or (held is not None and not held.startswith("{")):
                raise NoCall
            self.begin_call(name)
            self.release()
            self.argue(held or "{}")

    def call_list(self) -> Generator[None, None, None]:
        """[{...}, {...}]. Raises NoCall, only before the first call has begun."""
        if (yield from self.take()) != "[":
            raise NoCall
        num_before = self._num_found
        while True:
            yield from self.skip_space()
            try:
                yield from self.call_object(bare=False)
            except NoCall:
                if self._num_found == num_before:
                    raise
                self.rewind()
                return
            self.mark()
            if (yield from self.skip_space()) == ",":
                self._at += 1
                continue
            if (yield from self.peek()) == "]":
                self._at += 1
                self.release()
            else:
                self.rewind()
            return


class Brackets:
    """Where a JSON object or list ends. It looks at brackets and strings only, so that mistakes inside it go by."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def closed(self) -> bool:
        return self._depth < 0

    def scan(self, text: str, at: int) -> int:
        """Goes on at `at`; returns where the text, or the value, ends."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            char = found.group()
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._escaped = True
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self._depth = -1
                    return at
        return at


_NAME_CHAR = re.compile(r"[\w.:/-]")


def _marked_calls(reader: ToolCallReader, opening: str, read: Callable[[], Iterator[None]]) -> Iterator[None]:
    """Calls behind a mark each, which `read` reads; elsewhere all is content."""
    while (yield from reader.content_until(opening)):
        reader.mark(certain=True)
        yield from reader.follows(opening)
        try:
            yield from read()
        except NoCall:
            reader.rewind(len(opening))
    reader.last_words()


def hermes_calls(reader: ToolCallReader) -> Iterator[None]:
    opening, closing = "<tool_call>", "</tool_call>"

    def calls() -> Iterator[None]:
        if (yield from reader.skip_space()) == "[":
            yield from reader.call_list()
        else:
            yield from reader.call_object(bare=False)
        # What else is inside is content, and the tag goes with the call.
        if (yield from reader.content_until(closing, opening)) == closing:
            yield from reader.follows(closing)

    yield from _marked_calls(reader, opening, calls)


def llama3_json_calls(reader: ToolCallReader) -> Iterator[None]:
    tag = "<|python_tag|>"
    reader.mark()
    first = yield from reader.skip_space()
    tagged = first == tag[0]
    reader.rewind()
    if not tagged and first != "{":
        tagged = True  # a call may still come, but only with a tag
    while True:
        if tagged and not (yield from reader.content_until(tag)):
            break
        reader.mark(certain=tagged)
        if tagged:
            yield from reader.follows(tag)
        yield from reader.skip_space()
        try:
            yield from reader.call_object(bare=not tagged)
            while True:
                reader.mark()
                if (yield from reader.skip_space()) in (";", ","):
                    yield from reader.take()
                if (yield from reader.skip_space()) != "{":
                    reader.rewind()
                    break
                yield from reader.call_object(bare=True)
        except NoCall:
            reader.rewind(1 if tagged else 0)
        tagged = True
    reader.last_words()


def mistral_calls(reader: ToolCallReader) -> Iterator[None]:
    def calls() -> Iterator[None]:
        char = yield from reader.skip_space()
        if char == "[":
            yield from reader.call_list()
        elif char == "{":
            yield from reader.call_object(bare=False)
        else:
            yield from _named_call(reader)

    yield from _marked_calls(reader, "[TOOL_CALLS]", calls)


def _named_call(reader: ToolCallReader) -> Generator[None, None, None]:
    """f[CALL_ID]xyz[ARGS]{...}, the two marks optional."""
    name = yield from _word(reader)
    if (yield from reader.follows("[CALL_ID]")):
        yield from _word(reader)
    if not (yield from reader.follows("[ARGS]")) and reader.cut_in_call:
        raise NoCall  # the name may have gone on
    yield from reader.skip_space()
    yield from reader.arguments(name)


def _word(reader: ToolCallReader) -> Read:
    word = ""
    while (char := (yield from reader.peek())) and _NAME_CHAR.fullmatch(char):
        word += yield from reader.take()
        if len(word) > MAX_NAME:
            raise NoCall
    if not word:
        raise NoCall
    return word


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's chat templates refuse every other kind."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """`markers`: tokens that the text has to show, special or not. `read`: its syntax, as a coroutine over a ToolCallReader."""

    name: str
    markers: tuple[str, ...]
    read: Callable[[ToolCallReader], Iterator[None]]
    new_id: Callable[[], str] = _call_id


HERMES = ToolCallFormat("hermes", ("<tool_call>", "</tool_call>"), hermes_calls)
LLAMA3_JSON = ToolCallFormat("llama3_json", ("<|python_tag|>",), llama3_json_calls)
MISTRAL = ToolCallFormat("mistral", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), mistral_calls, _short_id)

TOOL_CALL_FORMATS = {format.name: format for format in (HERMES, LLAMA3_JSON, MISTRAL)}
TOOL_CALL_PARSERS = ("auto", "none", *TOOL_CALL_FORMATS)


def tool_call_format(name: str, chat_template: str | None) -> ToolCallFormat | None:
    """Returns the format of a parser's name. "auto" looks at the model's chat template, which writes earlier calls as the model writes new
    ones."""
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
        any name: the client, who executes calls, knows which there are). Without `parallel`, calls after the first are dropped.
        `must`: a grammar holds the answer to calls."""
        self._must = must
        self._reader = ToolCallReader(names=frozenset(names), parallel=parallel, new_id=new_id or format.new_id)
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
            return [ContentDelta(text)]
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
