"""An answer's characters as they come, and what formats are read with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby

from twostep.text.tool_formats.events import CallArguments, CallBegun, ContentDelta, Event
from twostep.text.tool_formats.values import MAX_HELD, ArgumentTypes, Parameters

Read = Generator[None, None, str]
Reading = Generator[None, None, None]

_SPACE = " \t\r\n"
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_IN_LINE = re.compile(r'["\\\n]')
_SOME_SPACE = re.compile(r"\s{0,64}")
MAX_NAME = 256
_NAME_CHAR = re.compile(r"[\w.:/-]")
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

    def __init__(self, *, functions: Mapping[str, Parameters], parallel: bool, new_id: Callable[[], str], markers: tuple[str, ...]) -> None:
        """`markers`: what the format makes calls of. In arguments that are not closed, the next call's ends them."""
        self.functions, self.markers = functions, markers
        self.num_calls = 0
        self._parallel = parallel
        self._new_id = new_id
        self._text = ""
        self._at = 0  # next character to read
        self._mark: int | None = None  # text from here on is kept, where it stands
        self._certain = False  # what follows the mark is a call, as far as it goes
        self._string_end = 0  # up to here markers are words within a string
        self._ended = False
        self.cut_in_call = False
        self._call_open = False  # the arguments of a call that counts have begun, and not ended
        # The answer was cut off in a call. Known once it has ended.
        self.unfinished = False
        self._events: list[Event] = []
        # White space that is dropped if it turns out to stand next to a call.
        self._space: list[str] = []
        self._says_something = False  # content since the beginning or the last call
        self._num_found = 0
        self._types: dict[str, ArgumentTypes] = {}

    # ---- for the parser ----------------------------------------------------------------------------------------------

    def feed(self, text: str) -> None:
        if self._mark is None:
            self._string_end -= self._at
            self._text, self._at = self._text[self._at :], 0
        self._text += text

    def end(self, *, cut: bool = False, must: bool = False) -> None:
        """`cut`: more would have followed. `must`: there is nothing but calls."""
        self._ended = True
        if not cut:
            return
        held = "" if self._mark is None else self._text[self._mark :]
        nothing_but_calls = must or self._num_found > 0
        begun = bool(held) and (self._certain or (nothing_but_calls and not held.isspace()))
        another_counts = self._parallel or not self._num_found
        self.unfinished = self._call_open or (begun and another_counts)
        if nothing_but_calls or (held and self._certain):
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

    def suspect(self, name: str) -> None:
        """From here on it looks like a call of this function."""
        self._certain = self._certain or name in self.functions

    def may_be(self, name: str) -> bool:
        """Whether there is such a function, as far as it is known which there are."""
        return not self.functions or name in self.functions

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
        """The character after it, not taken. Raises NoCall where too much would have to be kept."""
        while (char := (yield from self.peek())) and char in _SPACE:
            self._at += 1
            if self._mark is not None and self._at - self._mark > MAX_HELD:
                raise NoCall
        return char

    def ahead(self, marker: str) -> Generator[None, None, bool]:
        """Whether `marker` comes next."""
        while not self._text.startswith(marker, self._at):
            rest = self._text[self._at : self._at + len(marker)]
            if self._ended or not marker.startswith(rest):
                return False
            yield
        return True

    def follows(self, marker: str) -> Generator[None, None, bool]:
        """Takes `marker` if it comes next."""
        there = yield from self.ahead(marker)
        self._at += len(marker) if there else 0
        return there

    def need(self, marker: str) -> Reading:
        """Takes `marker`. Raises NoCall if something else comes next."""
        if not (yield from self.follows(marker)):
            raise NoCall

    def drop(self, marker: str) -> Reading:
        """Takes `marker`, and space before it, if it comes next. Raises NoCall as `skip_space` does."""
        self.mark()
        yield from self.skip_space()
        if (yield from self.follows(marker)):
            self.release()
        else:
            self.rewind()

    def content_until(self, *markers: str) -> Read:
        """Says everything before the first of `markers`, which is not taken; empty at the end of the text."""
        return self.pass_until(self.say, *markers)

    def pass_until(self, sink: Callable[[str], None], *markers: str) -> Read:
        """As `content_until`, to `sink`."""
        pattern, beginnings = _patterns(markers)
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                sink(self._text[self._at : found.start()])
                self._at = found.start()
                return found.group()
            text = self._text[self._at :]
            keep = 0
            if not self._ended:
                longest = min(len(text), max(map(len, markers)) - 1)
                keep = next((n for n in range(longest, 0, -1) if text[-n:] in beginnings), 0)
            sink(text[: len(text) - keep])
            self._at += len(text) - keep
            if self._ended:
                return ""
            yield

    def is_within_string(self, marker: str) -> Generator[None, None, bool]:
        """At a marker in a JSON string that has begun: whether the marker is a word of the string. The closing quote then comes on the same
        line, with what may follow a string after it; else the quote was left out. Takes nothing."""
        ahead = len(marker)
        while self._string_end <= self._at:
            limit = self._at + MAX_HELD
            found = _IN_LINE.search(self._text, self._at + ahead, limit)
            if found is None:
                if self._ended or len(self._text) >= limit:
                    return False
                ahead = max(ahead, len(self._text) - self._at)
                yield
            elif found.group() == "\n":
                return False
            elif found.group() == "\\":
                ahead = found.end() + 1 - self._at
            else:
                space = _SOME_SPACE.match(self._text, found.end())
                assert space is not None, "none will do"
                if (char := self._text[space.end() : space.end() + 1]) and char not in ",:}]":
                    return False
                if char or self._ended:
                    self._string_end = found.start()
                else:
                    yield
        return True

    def matching(self, pattern: re.Pattern[str], begun: re.Pattern[str]) -> Read:
        """Takes what matches next, empty if nothing does. `begun`: all that may yet become a longer match, not itself long."""
        while not self._ended and begun.fullmatch(self._text, self._at):
            yield
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found.group()

    def word(self) -> Read:
        """The name of a function or an argument. Raises NoCall if there is none."""
        word = ""
        while (char := (yield from self.peek())) and _NAME_CHAR.fullmatch(char):
            word += yield from self.take()
            if len(word) > MAX_NAME:
                raise NoCall
        if not word:
            raise NoCall
        return word

    def string(self) -> Read:
        """A JSON string, decoded. Raises NoCall for anything else."""
        start = self._at
        if (yield from self.take()) != '"':
            raise NoCall
        while True:
            char = yield from self.take()
            if not char or self._at - start > MAX_HELD:
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
            if not (yield from self._object(None)):
                raise NoCall
        else:
            while (char := (yield from self.peek())) and (char.isalnum() or char in "+-."):
                self._at += 1
                if self._at - start > 64:
                    raise NoCall
        if self._at == start:
            raise NoCall
        return self._text[start : self._at]

    def _object(self, sink: Callable[[str], None] | None) -> Generator[None, None, bool]:
        """Takes a JSON object or list, as it is written, and gives `sink` its parts as they come. Returns whether it is closed: else a
        marker follows, or nothing. Without a sink it stands behind a mark, and too much of it raises NoCall."""
        brackets, start = Brackets(), self._at
        pattern, beginnings = _patterns(self.markers)
        longest = max(map(len, self.markers)) - 1
        while not brackets.closed and (yield from self.peek()):
            found = pattern.search(self._text, self._at)
            if found is not None and found.start() == self._at:
                if not (brackets.in_string and (yield from self.is_within_string(found.group()))):
                    return False
                end = self._at + len(found.group())
            elif found is not None:
                end = found.start()
            else:
                end = len(self._text)
                if not self._ended:
                    end -= next((n for n in range(min(end - self._at, longest), 0, -1) if self._text[end - n :] in beginnings), 0)
                if end == self._at:
                    yield
                    continue
            at = brackets.scan(self._text, self._at, end)
            if sink is not None:
                sink(self._text[self._at : at])
            elif at - start > MAX_HELD:
                raise NoCall
            self._at = at
        return brackets.closed

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
            self._call_open = True

    def argue(self, text: str) -> None:
        """More of the arguments of the call that has begun."""
        if text and self._wanted:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end_call(self, text: str = "") -> None:
        """The last of the arguments: the call can be made."""
        self.argue(text)
        self._call_open = False

    @property
    def _wanted(self) -> bool:
        return self._num_found <= (_MAX_CALLS if self._parallel else 1)

    def last_words(self) -> None:
        """The text is over. White space around calls is dropped; without any, it is content like everything else."""
        space, self._space = "".join(self._space), []
        if space and not self._num_found and not self.cut_in_call:
            self._events.append(ContentDelta(space))

    def types(self, name: str) -> ArgumentTypes:
        """Returns those of a function's arguments, as far as they are known."""
        if name not in self._types:
            self._types[name] = ArgumentTypes(self.functions[name]() if name in self.functions else None)
        return self._types[name]

    # ---- calls -------------------------------------------------------------------------------------------------------

    def calls_behind(self, openings: Sequence[str], read: Callable[[str], Reading]) -> Reading:
        """Calls that begin with one of these marks each, which `read` reads what follows of; elsewhere all is content."""
        while opening := (yield from self.content_until(*openings)):
            self.mark(certain=True)
            yield from self.follows(opening)
            try:
                yield from read(opening)
            except NoCall:
                self.rewind(1)
        self.last_words()

    def calls_from_the_start(self, first: str, tags: Sequence[str], read: Callable[[bool], Reading]) -> Reading:
        """Calls that are all of an answer, which then begins with `first`, or follow a tag; `read` is told whether there is one."""
        self.mark()
        try:
            bare = (yield from self.skip_space()) == first
        except NoCall:
            bare = False
        self.rewind()
        if bare:
            self.mark()
            try:
                yield from self.skip_space()
                yield from read(False)
            except NoCall:
                self.rewind()
        yield from self.calls_behind(tags, lambda tag: read(True))

    def arguments(self, name: str) -> Reading:
        """At the value of the call's arguments, which are passed on while they come. The call begins with it. Raises NoCall if there is
        neither an object nor a string with one inside."""
        char = yield from self.peek()
        if char == "{" or (not char and self.cut_in_call):
            self.begin_call(name)
            self.release()
            if (yield from self._object(self.argue)):
                self.end_call()
            return
        if char == '"':
            text = yield from self.string()
        elif (yield from self.value()) == "null":
            text = "{}"
        else:
            raise NoCall
        self.begin_call(name)
        self.release()
        self.end_call(text or "{}")

    def call_object(self, *, bare: bool) -> Reading:
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
                    if not 0 < len(name) <= MAX_NAME or (bare and not self.may_be(name)):
                        raise NoCall
                    self.suspect(name)
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
            self.end_call(held or "{}")

    def call_list(self, read: Callable[[], Reading]) -> Reading:
        """[..., ...], each of which `read` reads. Raises NoCall, only before the first call has begun."""
        if (yield from self.take()) != "[":
            raise NoCall
        num_before = self._num_found
        try:
            while True:
                yield from self.skip_space()
                yield from read()
                self.mark()
                if (yield from self.skip_space()) == ",":
                    self._at += 1
                    continue
                if (yield from self.peek()) != "]":
                    raise NoCall
                self._at += 1
                self.release()
                return
        except NoCall:
            if self._num_found == num_before:
                raise
            self.rewind()


class Brackets:
    """Where a JSON object or list ends. It looks at brackets and strings only, so that mistakes inside it go by."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    @property
    def closed(self) -> bool:
        return self._depth < 0

    @property
    def in_string(self) -> bool:
        return self._in_string and self._depth > 0

    def scan(self, text: str, at: int, end: int) -> int:
        """Goes on from `at` to `end`; returns where it is then, or the value ends."""
        while at < end:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at, end)
            if found is None:
                return end
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
