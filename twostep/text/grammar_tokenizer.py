"""A model's tokens as llguidance sees them: the bytes that each adds to an answer, by whatever decoder the model has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from twostep.errors import InvalidRequest, SetupError
from twostep.text.grammar import library
from twostep.text.token_bytes import TokenBytes
from twostep.text.tokenizer import Tokenizer


def grammar_tokenizer(model_dir: Path, eos_token_ids: Iterable[int] = ()) -> Any:
    """An LLTokenizer. Takes a second for 100,000 tokens. Raises SetupError, and InvalidRequest for a model that knows no grammars."""
    tokenizer = Tokenizer.load(model_dir)
    if tokenizer.anchor is None or tokenizer.spaces_words:
        raise InvalidRequest(
            "grammar: answers of this model cannot be held to one: its tokens are words, between which its decoder (tokenizer.json) puts "
            "spaces; leave the grammar out"
        )
    try:
        return _of(tokenizer, eos_token_ids)
    except ValueError as error:
        raise SetupError(f"{model_dir} cannot be used for grammars: {error}") from error


def _of(tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> Any:
    vocabulary = _Vocabulary(tokenizer)
    # The ends only have to be among those of the model that have no text: which of them come is the engine's business.
    ends = sorted(i for i in eos_token_ids if 0 <= i < tokenizer.vocab_size)
    return library().LLTokenizer(vocabulary, eos_token=ends or [tokenizer.vocab_size])


class _Vocabulary:
    """What llguidance asks for, by the names that it has for it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        token_bytes = TokenBytes(tokenizer)
        self._tokenizer = tokenizer
        # The last one stands for the end where the model has none.
        self.tokens: Sequence[bytes] = [*map(token_bytes.of, range(tokenizer.vocab_size)), b"<end>"]
        self.eos_token_id = tokenizer.vocab_size
        self.special_token_ids = sorted((*tokenizer.special_ids, tokenizer.vocab_size))
        plain = ((token, i) for i, token in enumerate(self.tokens) if i not in tokenizer.added_ids and i < tokenizer.vocab_size)
        self._ids = {token: i for token, i in reversed(list(plain)) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> Sequence[int]:
        """As the model has read such a text where one goes before it."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        wanted, got = text.encode(), b"".join(self.tokens[i] for i in ids)
        if got == wanted:
            return ids
        if ids and got == b" " + wanted:
            # The space that the tokenizer puts before a text.
            return [*self._greedy(self.tokens[ids[0]][1:]), *ids[1:]]
        return self._greedy(wanted)

    def _greedy(self, text: bytes) -> list[int]:
        """The longest token first; what none begins with is left out."""
        found, start = [], 0
        while start < len(text):
            sizes = range(min(self._longest, len(text) - start), 0, -1)
            size = next((n for n in sizes if text[start : start + n] in self._ids), 0)
            if not size:
                break
            found.append(self._ids[text[start : start + size]])
            start += size
        return found
