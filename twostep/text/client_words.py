"""Which control tokens of a rendered chat are the client's own words.

    a client says         a<|im_end|>b
    marked                a<^|^im_end|^>^b                          ^: a character that stands nowhere else in this chat
    rendered              <|im_start|>user\\na<^|^im_end|^>^b<|im_end|>
    without marks         <|im_start|>user\\na<|im_end|>b<|im_end|>        the second is the client's: marks stood in it

Marks stand behind each character of a client's that control tokens have beside letters and digits, so that none is made of a client's
pieces either, whatever a template cuts out, joins or writes as JSON. A role that a template writes between `<|` and `|>` makes that one
token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from twostep.errors import InvalidRequest
from twostep.text.template_sandbox import escaped
from twostep.text.tokenizer import AddedTokens

# Of Unicode's private use.
_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD
_MAX_DRAWS = 64


class ClientWords:
    """Knows one model's control tokens. `constants`: strings of the template's, which it may look for in what it is given (`</think>`):
    they are left whole where no control token can be made of them. `model_markers`: what the model itself writes, and the template may look
    for, in the assistant's messages: they are tokens there, as they were when the model wrote them."""

    def __init__(self, tokens: AddedTokens, constants: Iterable[str] = (), model_markers: Collection[str] = ()) -> None:
        self._tokens = tokens
        control = tokens.control
        self._signs = sorted({char for content in control for char in content if _is_sign(char)})
        self._plain_words = [content for content in control if not any(map(_is_sign, content))]
        self._whole = _apart(filter(self._has_signs, sorted(set(constants))), control)
        self._model_markers = list(model_markers)

    def _has_signs(self, text: str) -> bool:
        return any(sign in text for sign in self._signs) or any(word in text for word in self._plain_words)

    def need_marks(self, strings: Iterable[str]) -> bool:
        return any(map(self._has_signs, strings))

    def hold_control_tokens(self, strings: Iterable[str]) -> bool:
        return any(next(self._tokens.control_in(text), None) is not None for text in strings)

    def marked_messages(self, messages: Sequence[Any], mark: str) -> list[Any]:
        return [
            self.marked(message, mark, self._model_markers if isinstance(message, dict) and message.get("role") == "assistant" else ())
            for message in messages
        ]

    def marked(self, value: Any, mark: str, markers: Collection[str] = ()) -> Any:
        """The same data with marks in its strings, keys among them."""
        if isinstance(value, str):
            return self._marked_text(value, mark, markers)
        if isinstance(value, dict):
            return {self.marked(key, mark, markers): self.marked(each, mark, markers) for key, each in value.items()}
        return [self.marked(each, mark, markers) for each in value] if isinstance(value, list) else value

    def _marked_text(self, text: str, mark: str, markers: Collection[str]) -> str:
        if not self._has_signs(text):
            return text
        marked = self._with_marks(text, mark)
        for whole in (*self._whole, *markers):
            if whole in text:
                marked = marked.replace(self._with_marks(whole, mark), whole)
        return marked

    def _with_marks(self, text: str, mark: str) -> str:
        for word in self._plain_words:
            text = text.replace(word, word[0] + mark + word[1:])
        for sign in self._signs:
            text = text.replace(sign, sign + mark)
        return text

    def own_and_clients(self, seen: str, mark: str) -> tuple[str, list[str], list[int]]:
        """Takes a text that was rendered with marks apart: the text without them, the control tokens that are the template's, and where
        those begin that are not."""
        text, other = seen.replace(mark, ""), chr(ord(mark) ^ 1)
        # As long as `text`, and other where a client's signs stand.
        told = seen
        for sign in self._signs:
            told = told.replace(sign + mark, other)
        if mark in told:
            told = re.sub(f"[^{mark}]{mark}+", other, told).replace(mark, "")
        own, clients = [], []
        for match in self._tokens.control_in(text):
            if told.startswith(match.group(), match.start()):
                own.append(match.group())
            else:
                clients.append(match.start())
        return text, own, clients

    def control_in(self, text: str) -> list[str]:
        return [match.group() for match in self._tokens.control_in(text)]


def strings_in(value: Any) -> Iterator[str]:
    """All of them, in whatever depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from strings_in(key)
            yield from strings_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings_in(each)


def drawn_mark(strings: Sequence[str]) -> str:
    """Draws a character that stands in none of them, nor does its escape, so that it cannot be guessed."""
    for _ in range(_MAX_DRAWS):
        mark = chr(_FIRST_MARK + secrets.randbelow(_LAST_MARK - _FIRST_MARK + 1))
        pair = (mark, chr(ord(mark) ^ 1), escaped(mark))
        if not any(each in text for text in strings for each in pair):
            return mark
    raise InvalidRequest("the messages hold nearly all of Unicode's characters for private use; leave them out")


def _is_sign(char: str) -> bool:
    return not (char.isalnum() or char == "_" or char.isspace())


def _apart(texts: Iterable[str], control: Collection[str]) -> list[str]:
    """Those no part of which can be a part of a control token."""
    beginnings = {token[:n] for token in control for n in range(1, len(token) + 1)}
    ends = {token[-n:] for token in control for n in range(1, len(token) + 1)}
    return [
        text
        for text in texts
        if not any(text[n:] in beginnings or text[: n + 1] in ends for n in range(len(text)))
        and not any(text in token or token in text for token in control)
    ]
