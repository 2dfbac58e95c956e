"""The formats of tool calls, each as a coroutine over a Reader: see twostep/text/tool_calls.py for how they look."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator

from twostep.text.tool_call_reader import MAX_NAME, NoCall, Read, Reader

_NAME_CHAR = re.compile(r"[\w.:/-]")


def hermes_calls(reader: Reader) -> Iterator[None]:
    opening, closing = "<tool_call>", "</tool_call>"
    while (yield from reader.content_until(opening)):
        reader.mark(certain=True)
        yield from reader.follows(opening)
        try:
            if (yield from reader.skip_space()) == "[":
                yield from reader.call_list()
            else:
                yield from reader.call_object(bare=False)
        except NoCall:
            reader.rewind(len(opening))
            continue
        # What else is inside is content, and the tag goes with the call.
        if (yield from reader.content_until(closing, opening)) == closing:
            yield from reader.follows(closing)
    reader.last_words()


def llama3_json_calls(reader: Reader) -> Iterator[None]:
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


def mistral_calls(reader: Reader) -> Iterator[None]:
    opening = "[TOOL_CALLS]"
    while (yield from reader.content_until(opening)):
        reader.mark(certain=True)
        yield from reader.follows(opening)
        try:
            char = yield from reader.skip_space()
            if char == "[":
                yield from reader.call_list()
            elif char == "{":
                yield from reader.call_object(bare=False)
            else:
                yield from _named_call(reader)
        except NoCall:
            reader.rewind(len(opening))
    reader.last_words()


def _named_call(reader: Reader) -> Generator[None, None, None]:
    """f[CALL_ID]xyz[ARGS]{...}, the two marks optional."""
    name = yield from _word(reader)
    if (yield from reader.follows("[CALL_ID]")):
        yield from _word(reader)
    if not (yield from reader.follows("[ARGS]")) and reader.cut_in_call:
        raise NoCall  # the name may have gone on
    yield from reader.skip_space()
    yield from reader.arguments(name)


def _word(reader: Reader) -> Read:
    word = ""
    while (char := (yield from reader.peek())) and _NAME_CHAR.fullmatch(char):
        word += yield from reader.take()
        if len(word) > MAX_NAME:
            raise NoCall
    if not word:
        raise NoCall
    return word
