"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from router.http.errors import HttpError
from router.http.fields import MAX_TOKEN_ID, CommonBody, IdArray, Misfit, Refused, ids_of, packed
from twostep.sampling_params import MAX_LOGPROBS

MAX_PROMPTS = 2048
# To all prompts together.
MAX_ANSWERS = 4096
# What OpenAI's API has always cut such answers to.
DEFAULT_MAX_TOKENS = 16


def _in_range(ids: list[int]) -> IdArray:
    # Of all at once: prompts may have a million.
    if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        raise ValueError(f"token ids are from 0 to {MAX_TOKEN_ID}")
    return ids_of(ids)


_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}}
# The first wrong item is enough: a list of ids is not told of each that it is no text.
Ids = Annotated[IdArray, packed(_in_range, Annotated[list[int], Field(min_length=1, fail_fast=True)]), WithJsonSchema(_SCHEMA)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
ListOfIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


_MIXED = "a list is of texts, of token ids, or of lists of token ids, and not of several of these"
_KINDS = "give a text, a list of texts, the token ids of one prompt, or a list of such lists"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def _misfit_id(value: Any, *path: int | str) -> Misfit:
    if isinstance(value, (str, list)):
        return Misfit(path, _MIXED, value)
    return Misfit(path, "a token id is a whole number from 0 up to the vocabulary's size", value)


def _misfit(prompt: Any) -> Misfit | None:
    """What a prompt is meant to be, its first item says."""
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        return Misfit(("prompt",), _KINDS, prompt)
    if not prompt:
        return Misfit(("prompt",), f"the list is empty; {_KINDS}", prompt)
    kind = type(prompt[0])
    if kind not in (str, list, int, float, bool):
        return Misfit(("prompt", 0), _KINDS, prompt[0])
    if kind is not str and kind is not list:
        at = next((i for i, item in enumerate(prompt) if not _is_id(item)), None)
        return None if at is None else _misfit_id(prompt[at], "prompt", at)
    if len(prompt) > MAX_PROMPTS:
        return Misfit(("prompt",), f"there are {len(prompt)} prompts; send at most {MAX_PROMPTS} at a time", prompt)
    for i, item in enumerate(prompt):
        if type(item) is not kind:
            return Misfit(("prompt", i), _MIXED, item)
        if kind is list and not item:
            return Misfit(("prompt", i), "a prompt has no token ids; give at least one", item)
        if kind is list and (at := next((j for j, token_id in enumerate(item) if not _is_id(token_id)), None)) is not None:
            return _misfit_id(item[at], "prompt", i, at)
    return None


class CompletionBody(CommonBody):
    prompt: str | Texts | Ids | ListOfIds
    """A text, several, the token ids of one, or of several. Choice i of prompt p has the index p * n + i."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    """The text begins with the prompt's."""
    best_of: int | None = Field(default=None, ge=1)
    """Refused if above n."""
    add_special_tokens: bool | None = None
    """false: the tokenizer adds nothing to the prompt, such as a token that begins a text."""

    suffix: Annotated[Any, Refused("nothing is inserted between two texts here; leave it out", unless="")] = None
    prompt_embeds: Annotated[Any, Refused("send text or token ids", unless=[])] = None

    @classmethod
    def misfit(cls, field: str, value: Any) -> Misfit | None:
        return _misfit(value) if field == "prompt" else super().misfit(field, value)

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | IdArray]:
        """Raises HttpError 400 for what cannot be done with them."""
        n = self.n or 1
        if self.best_of is not None and self.best_of > n:
            raise HttpError(400, f"best_of is {self.best_of} and n is {n}; answers are not ranked here: leave best_of out", param="best_of")
        if self.echo and self.logprobs is not None:
            raise HttpError(400, "echo with logprobs: log probabilities of a prompt are not computed; leave one of them out", param="echo")
        if isinstance(self.prompt, list) and len(self.prompt) * n > MAX_ANSWERS:
            raise HttpError(
                400, f"n is {n} and there are {len(self.prompt)} prompts; ask for at most {MAX_ANSWERS} answers at a time", param="n"
            )
        return list(self.prompt) if isinstance(self.prompt, list) else [self.prompt]
