"""Makes prompts, of token ids or of words that are one token each: seeded, and different from one another from the first token on."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.errors import InvalidRequest, SetupError

if TYPE_CHECKING:
    from twostep.text.tokenizer import Tokenizer

_POOL = 1 << 17
# So many tokens at a prompt's beginning are drawn one by one, so that no two prompts begin alike.
_HEAD = 8


class PromptContent:
    """Draws from an alphabet: ids that the model has and that mean nothing special.

    A long prompt is a slice, at a random place, of a pool drawn once: drawing each of its thousands of tokens would take the load
    generator longer than sending them."""

    def __init__(self, seed: str, alphabet: Sequence[int]) -> None:
        if len(alphabet) < 2:
            raise InvalidRequest("prompts need an alphabet of at least two token ids")
        self._seed = seed
        self._alphabet = alphabet
        self._rng = random.Random(f"prompts/{seed}")
        self._pool: array[int] = array("I", random.Random(f"pool/{seed}").choices(alphabet, k=_POOL))

    def draw(self, num_tokens: int) -> array[int]:
        """The next random tokens. Lengths are drawn elsewhere, so that runs of different seeds can have the same."""
        return self._draw(self._rng, num_tokens)

    def block(self, name: str, num_tokens: int) -> array[int]:
        """Always the same for the same name; of two lengths, the shorter is a beginning of the longer."""
        return self._draw(random.Random(f"block/{self._seed}/{name}"), num_tokens)

    def _draw(self, rng: random.Random, num_tokens: int) -> array[int]:
        out: array[int] = array("I", rng.choices(self._alphabet, k=min(num_tokens, _HEAD)))
        while len(out) < num_tokens:
            start = rng.randrange(_POOL)
            out.extend(self._pool[start : start + num_tokens - len(out)])
        return out


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
