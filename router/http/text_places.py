"""Finds the place in the text at which each token of a completion begins: `text_offset` of its log probabilities. Pure."""

from __future__ import annotations

from twostep.text.detokenizer import Detokenizer
from twostep.text.tokenizer import TokenBytes, Tokenizer

# Of an echoed prompt, bytes that a normalizer may have changed before a token is found again.
_MAX_CHANGED = 256


def _num_chars(raw: bytes) -> int:
    """Counts the characters that begin in a part of valid UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


class TextPlaces:
    """Finds the places of one answer's tokens, in characters. Each token is asked for once and in order, an echoed prompt's first. A token
    that holds only a part of a character has the place of that character; a token without a text, that of the next one. Places never
    decrease."""

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer, *, echo: str = "") -> None:
        """`tokenizer` shows the special tokens that the text shows. `detokenizer`: a new one that goes on from the prompt. `echo`: what the
        text begins with."""
        self._special_ids = tokenizer.special_ids
        self._bytes, self._detokenizer = TokenBytes(tokenizer), detokenizer
        self._echo = echo.encode()
        self._at = self._num_before = 0  # place in the echo, in bytes, and the characters that begin before it
        self._length = len(echo)
        self._last = 0

    def in_echo(self, token_id: int) -> int:
        """Returns the place of the prompt's next token."""
        echo, raw = self._echo, self._bytes.of(token_id)
        if not echo.startswith(raw, self._at):
            if raw.startswith(b" ") and echo.startswith(raw[1:], self._at):
                raw = raw[1:]  # the tokenizer puts a space before a text
            elif token_id in self._special_ids or (found := echo.find(raw, self._at, self._at + _MAX_CHANGED)) < 0:
                raw = b""
            else:
                self._pass(found)
        is_inside = self._at < len(echo) and echo[self._at] & 0xC0 == 0x80
        place = self._num_before - is_inside
        self._pass(self._at + len(raw))
        return self._not_before(place)

    def in_answer(self, token_id: int) -> int:
        """Returns the place of the answer's next token."""
        before, piece = self._length, self._detokenizer.push((token_id,))
        self._length += len(piece)
        # Characters that were never completed may come before the token's own.
        text = self._bytes.text(token_id)
        return self._not_before(self._length - len(text) if text and piece.endswith(text) else before)

    def _pass(self, at: int) -> None:
        self._num_before += _num_chars(self._echo[self._at : at])
        self._at = at

    def _not_before(self, place: int) -> int:
        self._last = max(self._last, place)
        return self._last
