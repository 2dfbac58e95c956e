"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from router.http.errors import HttpError
from router.http.fields import CommonBody, TokenId
from twostep.sampling_params import MAX_LOGPROBS

MAX_PROMPTS = 2048
# What OpenAI's API has always cut such answers to.
DEFAULT_MAX_TOKENS = 16

Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionBody(CommonBody):
    refused: ClassVar[dict[str, tuple[Any, str]]] = CommonBody.refused | {
        "suffix": ("", "nothing is inserted between two texts here; leave it out"),
        "prompt_embeds": ([], "send text or token ids"),
    }

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    """A text, several, the token ids of one, or of several. Choice i of prompt p has the index p * n + i."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    """The text begins with the prompt's."""
    best_of: int | None = Field(default=None, ge=1)
    """Refused if above n."""
    suffix: str | None = None
    """Refused unless empty."""
    add_special_tokens: bool | None = None
    """false: the tokenizer adds nothing to the prompt, such as a token that begins a text."""

    @property
    def token_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Raises HttpError 400 for what cannot be done with them."""
        n = self.n or 1
        if self.best_of is not None and self.best_of > n:
            raise HttpError(400, f"best_of is {self.best_of} and n is {n}; answers are not ranked here: leave best_of out", param="best_of")
        if self.echo and self.logprobs is not None:
            raise HttpError(400, "echo with logprobs: log probabilities of a prompt are not computed; leave one of them out", param="echo")
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
