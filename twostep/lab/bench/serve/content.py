"""Makes prompts: seeded, and different from one another from the first token on."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from twostep.errors import InvalidRequest

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
