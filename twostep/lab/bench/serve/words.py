"""Texts of a known number of tokens: words that are one token each."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.errors import SetupError

if TYPE_CHECKING:
    from twostep.text.tokenizer import Tokenizer

_MAX_WORDS = 4096
_MIN_WORDS = 64
# How byte-level BPE and SentencePiece write the space before a word.
_SPACES = ("Ġ", "▁")
# One token each, with the space before, in every large English vocabulary that we know of.
_COMMON = """
the of and to in is that it for was on are as with they at be this from have or by one had not but what all were when we there
can an your which their said if do will each about how up out them then she many some so these would other into has more her
two like him see time could no make than first been its who now people my made over did down only way find use may water long
little very after words called just where most know
"""
COMMON = tuple(_COMMON.split())


class Words:
    """A word, with the space before it, for each id of an alphabet from 0."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = [" " + word for word in words]

    def __len__(self) -> int:
        return len(self._words)

    def text(self, ids: array[int]) -> str:
        words = self._words
        return "".join([words[i] for i in ids])

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Words:
        """Those of a tokenizer. Raises SetupError if texts of them are not cut into as many tokens."""
        found = []
        for token_id in range(tokenizer.vocab_size):
            token = tokenizer.token_text(token_id)
            word = token[1:]
            if not (token.startswith(_SPACES) and word.isascii() and word.isalpha() and word.islower()):
                continue
            if tokenizer.encode(" " + word, add_special_tokens=False) == [token_id]:
                found.append(word)
                if len(found) == _MAX_WORDS:
                    break
        if len(found) < _MIN_WORDS:
            raise SetupError("this tokenizer has too few words of one token each to make prompts of; leave out --tokenizer")
        text = "".join(" " + word for word in found)
        if (num := len(tokenizer.encode(text, add_special_tokens=False))) != len(found):
            raise SetupError(f"{len(found)} words of one token each make {num} tokens with this tokenizer; leave out --tokenizer")
        return cls(found)


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Raises SetupError if there is none, or nothing to read it with."""
    try:
        from twostep.text.tokenizer import Tokenizer  # noqa: PLC0415 - only --tokenizer needs the package
    except ModuleNotFoundError as error:
        raise SetupError("--tokenizer needs the package tokenizers; pip install 'twostep[router]', or leave it out") from error
    return Tokenizer.load(model_dir)
