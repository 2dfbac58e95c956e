"""Requests of all kinds at random, for a model whose answers have mostly some few tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twostep.client import RequestOptions

_SCHEMAS: Sequence[dict[str, Any]] = (
    # Routers close objects that say nothing of other properties.
    {
        "type": "object",
        "properties": {"kind": {"enum": ["river", "sea"]}, "deep": {"type": "boolean"}},
        "required": ["kind", "deep"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 4},
)
_REGEXES = ("(north|south) of the [a-f]{2,5}", "[0-9]{3}-[0-9]{4}(, or so)?", "(ab|ba){1,6}")
_LARK = 'start: "yes" | "no" ", " REST\nREST: /[a-z ]{1,12}/'


@dataclass(frozen=True)
class RandomRequest:
    """`options` are the client's, with `n`. `breaks_after`: its client leaves once it has so many tokens, and comes back with them; 0: it
    stays."""

    token_ids: Sequence[int]
    options: RequestOptions
    breaks_after: int = 0


class Requests:
    """Draws them one after the other. Some prompts begin like others; `longest`: of prompt and answer, in tokens."""

    def __init__(
        self, rng: random.Random, vocab_size: int, usual: Sequence[int], text_of: Callable[[list[int]], str], longest: int
    ) -> None:
        self._rng, self._vocab_size, self._usual, self._longest = rng, vocab_size, usual, longest
        # What answers are likely to have in them.
        self._stops = [text for token in usual if (text := text_of([token])) and "\ufffd" not in text]
        self._beginnings = [self._tokens(longest // 3) for _ in range(3)]

    def next(self) -> RandomRequest:
        rng = self._rng
        max_tokens = min(rng.choice([1, 2, 8, 16, 24, 40, 60]), self._longest // 2)
        options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
        options |= {"seed": rng.randrange(1 << 62), "n": rng.choice([1, 1, 1, 1, 2, 3]), "ignore_eos": rng.random() < 0.6}
        if rng.random() < 0.5:
            options |= {"temperature": rng.choice([0.3, 0.8, 1.2]), "top_k": rng.choice([0, 0, 5]), "top_p": rng.choice([1.0, 1.0, 0.9])}
            options |= {"min_p": rng.choice([0.0, 0.0, 0.05])}
        if rng.random() < 0.25:
            options |= {"repetition_penalty": rng.choice([1.0, 1.2]), "presence_penalty": rng.choice([0.0, 0.5])}
            options |= {"frequency_penalty": rng.choice([0.0, 0.3])}
        if rng.random() < 0.3:
            options["logprobs"] = rng.choice([0, 1, 3])
        if rng.random() < 0.3:
            options["stop"] = [self._stop() for _ in range(rng.randrange(1, 3))]
        if rng.random() < 0.15:
            options["stop_token_ids"] = rng.sample(self._usual, 2)
        if rng.random() < 0.15:
            options["min_tokens"] = rng.randrange(max_tokens)
        if rng.random() < 0.2:
            options["logit_bias"] = {token: rng.choice([-3.0, 4.0, 30.0]) for token in rng.sample(self._usual, 4)}
        if rng.random() < 0.2:
            options |= self._grammar() | {"max_tokens": min(60, self._longest // 2)}
            # A grammar may need each token: without some, it can be a dead end, which is refused.
            options.pop("stop_token_ids", None)
        options |= {"request_class": rng.choice(["interactive", "standard", "batch"]), "speculate": rng.random() < 0.95}
        breaks_after = rng.randrange(1, 8) if options["n"] == 1 and rng.random() < 0.4 else 0
        return RandomRequest(self._prompt(self._longest - options["max_tokens"]), options, breaks_after)  # type: ignore[arg-type]

    def _grammar(self) -> dict[str, Any]:
        rng = self._rng
        return rng.choice([{"json_schema": json.dumps(rng.choice(_SCHEMAS))}, {"regex": rng.choice(_REGEXES)}, {"lark": _LARK}])

    def _stop(self) -> str:
        return "".join(self._rng.choice(self._stops) for _ in range(self._rng.choice([1, 1, 2])))

    def _prompt(self, most: int) -> list[int]:
        rng = self._rng
        beginning = rng.choice(self._beginnings) if rng.random() < 0.4 else []
        return (beginning + self._tokens(rng.randrange(1, most)))[:most]

    def _tokens(self, count: int) -> list[int]:
        if self._rng.random() < 0.5:
            return [self._rng.choice(self._usual) for _ in range(count)]
        return [self._rng.randrange(3, self._vocab_size) for _ in range(count)]
