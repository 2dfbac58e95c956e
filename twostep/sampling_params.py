"""Sampling parameters: what a client may ask for, and what an engine is given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from twostep.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
# Log probabilities of one prompt: of each of its tokens, and of the likeliest beside it. Eight bytes each on their way.
MAX_PROMPT_LOGPROBS = 1 << 22


class GrammarKind(Enum):
    """How a grammar is written, by the names of the wire. JSON_OBJECT: any JSON object, there is no text."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"


# Characters: far more than OpenAI takes of a schema's names and values. Lark may have a schema inside.
MAX_GRAMMAR_CHARS = {
    GrammarKind.JSON_SCHEMA: 256 << 10,
    GrammarKind.JSON_OBJECT: 0,
    GrammarKind.REGEX: 16 << 10,
    GrammarKind.LARK: 320 << 10,
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """Describes the grammar that an answer must be a sentence of. Whether `text` is a valid grammar is known only once it is compiled
    (twostep/text/grammar.py)."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        most = MAX_GRAMMAR_CHARS[self.kind]
        if len(self.text) > most:
            raise InvalidRequest(f"grammar: the {self.kind.value} has {len(self.text)} characters; give at most {most}")
        if not self.text and self.kind is not GrammarKind.JSON_OBJECT:
            raise InvalidRequest(f"grammar: the {self.kind.value} is empty; give one, or no grammar at all")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Resolved parameters of one request: every field has a value.

    `seed` and a token's position alone decide its sampling noise (inverse transform of one uniform number),
    so that chunking, preemption, hand-over and migration repeat it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    # Added to the model's logits before all else, by token id, ascending.
    logit_bias: tuple[tuple[int, float], ...] = ()
    # As `logprobs`, of the prompt's tokens: its whole prompt is computed, whatever is cached.
    prompt_logprobs: int | None = None
    # Whether tokens may be drafted, where workers do that.
    speculate: bool = True
    # None: the answer is any text. What a grammar means for the other parameters: docs/structured-output.md.
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 1, (1 << 31) - 1)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, 0, 1 << 31)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if not 0 <= self.min_tokens <= self.max_tokens:
            # Who sent no max_tokens has one all the same.
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, and the answer may have {self.max_tokens} tokens at most; "
                f"give a value from 0 to {self.max_tokens}, or a larger max_tokens"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p is {self.top_p}; give a value above 0 and at most 1")
        # Logits are divided by it: what is next to nothing would make them infinite, which looks like a broken model.
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS or any(not 0 < len(s) <= MAX_STOP_STRING_CHARS for s in self.stop):
            raise InvalidRequest(f"stop takes up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_STRING_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS or any(not 0 <= t < 1 << 32 for t in self.stop_token_ids):
            raise InvalidRequest(f"stop_token_ids takes up to {MAX_STOP_TOKEN_IDS} ids, from 0 to 2^32 - 1")
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidRequest(f"logit_bias has {len(self.logit_bias)} tokens; give at most {MAX_LOGIT_BIASES}")
        for token_id, bias in self.logit_bias:
            _within(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.prompt_logprobs is not None:
            _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


# Parameters that came after 0.1: a worker's record says that it knows them, for one that does not would ignore them.
NEWER_PARAMETERS = ("logit_bias", "prompt_logprobs")


def newer_parameters(params: SamplingParams) -> frozenset[str]:
    """Returns those of NEWER_PARAMETERS that are set."""
    return frozenset(name for name in NEWER_PARAMETERS if getattr(params, name) not in ((), None))


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value}; give a value from {low} to {high}")
