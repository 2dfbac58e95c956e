"""Token ids to text while they arrive.

Two things keep a piece of text from being decoded by itself: bytes of one character may lie in several tokens, and many
decoders treat a text's first token differently (they strip its leading space). So each piece is decoded in a window:

    prompt | sent for good | context | pending          text = decode(context + pending) after decode(context)
                                     ^ a character boundary

`context` are tokens that stand for all text before; where a decoder looks at neighbours, it is what was pending when text last
ended on a character boundary. What is new in `text` is sent except a tail of U+FFFD, which may be a character still in the
making. A token is decoded a bounded number of times, so a stream costs O(1) for each token. Where the tokenizer knows what a
token adds at a character boundary, whatever the context, nothing is decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from twostep.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# UTF-8 needs at most three bytes more than it has shown: so many replacement characters may still change.
_MAX_UNSTABLE = 3
_MAX_SPLIT = 4
# Pending tokens at which a shorter window is looked for: junk, or tokens that straddle characters, one after the other.
_LONG = 16


class Detokenizer:
    """One stream of one request; not thread-safe.

    The concatenation of all pieces is what `tokenizer.decode` of prompt and ids has more than that of the prompt, for byte-level
    vocabularies whatever the ids, and for byte-fallback ones (SentencePiece) for all valid text without U+FFFD; there, an invalid byte
    does not undo characters already sent. Special tokens and ids outside the vocabulary add nothing.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt`: what the stream goes on with."""
        self._tokenizer = tokenizer
        self._context = _end_of(tokenizer, prompt)
        self._base = tokenizer.decode(self._context) if self._context else ""
        self._pending: list[int] = []
        self._sent = 0  # characters of the pending text already returned
        self._next_split = _LONG
        # Whether the next token is a text's first, which decoders may read in another way.
        self._first = not self._context and tokenizer.anchor != ()

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds ids and returns the text that they settle, possibly empty."""
        whole_text = self._tokenizer.whole_text
        pieces = []
        for token_id in token_ids:
            text = whole_text(token_id)
            if text is None:
                pieces.append(self._push(token_id))
            elif not text:
                continue  # nothing to read
            elif self._pending or self._first:
                pieces.append(self._push(token_id))
            else:
                pieces.append(text)
        return pieces[0] if len(pieces) == 1 else "".join(pieces)

    def _push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode_pending()
        unstable = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_UNSTABLE)
        stable = max(self._sent, len(text) - unstable)
        piece = text[self._sent : stable]
        self._sent = stable
        if text and not unstable:
            self._move(len(self._pending), 0)
        elif len(self._pending) >= self._next_split:
            self._next_split = len(self._pending) + _LONG
            piece += self._split(text)
        return piece

    def finish(self) -> str:
        """Ends the stream: returns the text held back, with U+FFFD for a character that never became whole."""
        text = self._decode_pending()[self._sent :] if self._pending else ""
        self._pending, self._sent, self._next_split = [], 0, _LONG
        return text

    def _decode_pending(self) -> str:
        text = self._tokenizer.decode(self._context + self._pending)
        if text.startswith(self._base):
            return text[len(self._base) :]
        # Byte fallback: an invalid byte spoils the whole run of bytes, also those of the context. That was sent already.
        return self._tokenizer.decode_after(self._pending)

    def _split(self, text: str) -> str:
        """Shortens a long window of text that never ended on a character boundary; returns text that became stable.

        First choice: a boundary among the last tokens. It is where both sides decoded apart give the text of both together: a
        sequence of bytes that went on across it would give one replacement character more.

        Second: tokens that each end one character and begin the next. UTF-8 synchronizes itself: whatever the tail begins with,
        from its first whole character on it reads as the full text does."""
        decode, decode_after = self._tokenizer.decode, self._tokenizer.decode_after
        for size in range(1, _MAX_SPLIT + 1):
            head, tail_text = self._pending[:-size], decode_after(self._pending[-size:])
            head_text = text[: len(text) - len(tail_text)]
            if text == head_text + tail_text and decode(self._context + head) == self._base + head_text:
                piece = head_text[self._sent :]
                self._move(len(head), max(0, self._sent - len(head_text)))
                return piece
        tail_text = decode_after(self._pending[-_LONG // 2 :])
        whole = tail_text.lstrip(_REPLACEMENT)
        if whole and text.endswith(whole):
            sent = len(tail_text) - (len(text) - self._sent)
            self._move(len(self._pending) - _LONG // 2, sent)
            if self._tokenizer.anchor is None:
                self._context, self._base = [], ""
        return ""

    def _move(self, num_tokens: int, sent: int) -> None:
        """The first `num_tokens` pending tokens become text that has been read."""
        read, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        anchor = self._tokenizer.anchor
        if anchor is None or self._first:
            self._context = read if anchor is None else list(anchor)
            self._base = self._tokenizer.decode(self._context)
            self._first = False
        self._sent = sent
        self._next_split = _LONG


def _end_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Tokens that stand for the prompt's text; none where it has no text."""
    if tokenizer.anchor == ():
        return []
    texts = (i for i in reversed(prompt) if i not in tokenizer.special_ids and tokenizer.token_text(i))
    if tokenizer.anchor is not None:
        return list(tokenizer.anchor) if next(texts, None) is not None else []
    return list(itertools.islice(texts, _LONG))[::-1]
