"""The one exception tree, and the one table that maps it to gRPC and HTTP statuses.

    TwostepError
    ├── InvalidRequest         the request can never succeed as it is
    │   ├── ContextExceeded    prompt (+ max_tokens) is longer than the context
    │   └── AnswerCutOff       an answer ended before it was what is to be read from it; carries it
    ├── NotFound               no such model, request or lease
    │   └── UnknownModel       the model that the request names is not served here
    ├── Unauthenticated        a ticket, a key or a signature does not verify
    ├── PermissionDenied       a key that verifies, but allows less
    ├── ResourceExhausted      no room now: another worker, or later
    ├── Unavailable            a worker, Ray or the whole service is away: safe to repeat
    │   └── StreamBroken       an answer broke off half-way; carries what had arrived
    ├── DeadlineExceeded       the caller's time is up; carries what had arrived
    ├── Cancelled              the caller went away
    ├── NonFiniteLogits        the model gives no token for this request: repeating it does not help
    ├── Incompatible           two sides disagree on model, layout or epoch
    ├── DataLoss               bytes arrived that do not match their checksum
    ├── SetupError             a process cannot start: bad model directory, port in use, no Redis
    │   └── WrongSettings      flags, variables or lines of a --config file that make no sense; carries all of them
    └── InternalError          a bug of ours

Every message says what to do about it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# Trailing metadata of RESOURCE_EXHAUSTED: milliseconds after which it is worth trying again.
RETRY_AFTER = "x-twostep-retry-after-ms"
# "false": it is not, however long one waits. Also a header of HTTP, which OpenAI's clients go by.
SHOULD_RETRY = "x-should-retry"
# Of UNAUTHENTICATED: what a signature must name (twostep.rpc.call_signing).
CHALLENGE = "twostep-challenge-bin"
# Of a ContextExceeded, its numbers in order: "512,,512", empty where one is not known.
CONTEXT = "x-twostep-context-exceeded"
_MAX_DIGITS = 12
# Longer than any of ours, and what gRPC has room for.
_MAX_MESSAGE_CHARS = 2000


class TwostepError(Exception):
    """Base of everything this project raises on purpose."""

    @property
    def message(self) -> str:
        """Returns the message for clients and logs. It is cut off after a bounded length, enough to recognize what a client sent."""
        told = str(self.args[0]) if self.args else type(self).__name__
        return told if len(told) <= _MAX_MESSAGE_CHARS else told[:_MAX_MESSAGE_CHARS] + "…"

    def __str__(self) -> str:
        return self.message if self.args else ""


class InvalidRequest(TwostepError):
    """The request can never succeed as it is; the message names the field and what it may be."""


class ContextExceeded(InvalidRequest):
    """Prompt, or prompt and max_tokens, do not fit the model's context, which has `max_model_len` tokens: the prompt has `prompt_tokens` at
    least, and `max_tokens` more were asked for. The numbers are None where nobody counted or asked."""

    def __init__(
        self, message: str = "", *, prompt_tokens: int | None = None, max_tokens: int | None = None, max_model_len: int | None = None
    ) -> None:
        super().__init__(message)
        self.prompt_tokens, self.max_tokens, self.max_model_len = prompt_tokens, max_tokens, max_model_len

    @classmethod
    def of(cls, what: str, advice: str, *, max_model_len: int, prompt_tokens: int, max_tokens: int | None = None) -> ContextExceeded:
        """Says it in words that clients look for: "maximum context length" (LiteLLM), "prompt is too long" (LangChain)."""
        kind = "" if max_tokens else "the prompt is too long: "
        message = f"This model's maximum context length is {max_model_len} tokens, and {kind}{what}; {advice}"
        return cls(message, prompt_tokens=prompt_tokens, max_tokens=max_tokens, max_model_len=max_model_len)


class NotFound(TwostepError):
    """No such model, request or lease."""


class UnknownModel(NotFound):
    """The model that the request names is not served here."""


class Unauthenticated(TwostepError):
    """A ticket, a key or a signature does not verify. `challenge`: what whoever may sign is told, so that it can."""

    def __init__(self, message: str = "", *, challenge: bytes = b"") -> None:
        super().__init__(message)
        self.challenge = challenge


class PermissionDenied(TwostepError):
    """Who asks is known, and may not have that."""


class ResourceExhausted(TwostepError):
    """No room now. Another worker may have some; later, this one: after `retry_after_s` seconds, if whoever refused could tell. `hopeless`:
    not even then, because nobody who is there would have it."""

    def __init__(self, message: str, *, retry_after_s: float | None = None, hopeless: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.hopeless = hopeless


class Unavailable(TwostepError):
    """A worker, Ray or the whole service is away. Repeating the request is safe."""


class PartOfAnswer(TwostepError):
    """Base of what ends an answer half-way. `text` (and `reasoning`) and `token_ids` had arrived until then; the same request with
    `resume_token_ids` and `seed` goes on after them (a `seed` of None: the server did not tell it). Of several answers: the first's."""

    def __init__(
        self, message: str = "", *, text: str = "", reasoning: str = "", token_ids: Sequence[int] = (), seed: int | None = None
    ) -> None:
        super().__init__(message)
        self.text, self.reasoning = text, reasoning
        self.token_ids = tuple(token_ids)
        self.seed = seed


class AnswerCutOff(PartOfAnswer, InvalidRequest):
    """An answer ended before it was what is to be read from it: most likely, max_tokens was too low."""


class StreamBroken(PartOfAnswer, Unavailable):
    """An answer broke off half-way."""


class DeadlineExceeded(PartOfAnswer):
    """The caller's time is up; everything the request held is free."""


class Cancelled(TwostepError):
    """The caller went away or cancelled; everything the request held is free."""


class NonFiniteLogits(TwostepError):
    """The model's logits for this request are not finite, so that there is no next token; the model is well otherwise. Repeating the
    request gives the same."""


class Incompatible(TwostepError):
    """Two sides disagree on model, KV layout or epoch."""


class DataLoss(TwostepError):
    """Bytes arrived that do not match their checksum, and fetching again did not help."""


class SetupError(TwostepError):
    """A process cannot start; the message says what to change."""


class WrongSettings(SetupError):
    """Flags, variables or lines of a --config file make no sense; each of `problems` says which, and what to give instead."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        several = f"{len(self.problems)} things are wrong:" if len(self.problems) > 1 else ""
        super().__init__("\n  ".join(filter(None, (several, *self.problems))))


class InternalError(TwostepError):
    """A bug of ours."""


@dataclass(frozen=True, slots=True)
class Status:
    """How an error looks on the wire. `grpc` is the name of a grpc.StatusCode."""

    grpc: str
    http: int


STATUS: dict[type[TwostepError], Status] = {
    InvalidRequest: Status("INVALID_ARGUMENT", 400),
    NotFound: Status("NOT_FOUND", 404),
    Unauthenticated: Status("UNAUTHENTICATED", 401),
    PermissionDenied: Status("PERMISSION_DENIED", 403),
    ResourceExhausted: Status("RESOURCE_EXHAUSTED", 429),
    Unavailable: Status("UNAVAILABLE", 503),
    DeadlineExceeded: Status("DEADLINE_EXCEEDED", 504),
    Cancelled: Status("CANCELLED", 499),
    NonFiniteLogits: Status("OUT_OF_RANGE", 422),
    Incompatible: Status("FAILED_PRECONDITION", 409),
    DataLoss: Status("DATA_LOSS", 500),
    SetupError: Status("FAILED_PRECONDITION", 500),
    InternalError: Status("INTERNAL", 500),
}

_BY_GRPC: dict[str, type[TwostepError]] = {s.grpc: e for e, s in reversed(STATUS.items())} | {
    "UNIMPLEMENTED": InvalidRequest,
    "UNKNOWN": InternalError,
}


def status_of(error: BaseException) -> Status:
    """The wire status of an exception; anything not ours is INTERNAL."""
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cls]
    return STATUS[InternalError]


def error_from_grpc(code: str, message: str, metadata: Iterable[tuple[str, str | bytes]] | None = None) -> TwostepError:
    """The exception for a grpc status code's name, as a client should see it. `metadata` is what came behind the status."""
    kind = _BY_GRPC.get(code, InternalError)
    behind = dict(metadata or ())
    if kind is ResourceExhausted:
        return ResourceExhausted(message, retry_after_s=_retry_after_s(behind), hopeless=_text(behind.get(SHOULD_RETRY, "")) == "false")
    if kind is InvalidRequest and CONTEXT in behind:
        numbers = [*map(_whole, _text(behind[CONTEXT]).split(",")), None, None, None]
        return ContextExceeded(message, prompt_tokens=numbers[0], max_tokens=numbers[1], max_model_len=numbers[2])
    return kind(message)


def trailing_metadata(error: TwostepError) -> tuple[tuple[str, str | bytes], ...]:
    """Returns the metadata that goes behind the status of `error`."""
    if isinstance(error, Unauthenticated) and error.challenge:
        return ((CHALLENGE, error.challenge),)
    if isinstance(error, ContextExceeded):
        numbers = (error.prompt_tokens, error.max_tokens, error.max_model_len)
        return ((CONTEXT, ",".join("" if number is None else str(number) for number in numbers)),)
    if isinstance(error, ResourceExhausted) and error.hopeless:
        return ((SHOULD_RETRY, "false"),)
    if not isinstance(error, ResourceExhausted) or error.retry_after_s is None:
        return ()
    return ((RETRY_AFTER, str(math.ceil(error.retry_after_s * 1000))),)


def _retry_after_s(behind: Mapping[str, str | bytes]) -> float | None:
    milliseconds = _whole(_text(behind.get(RETRY_AFTER, "")))
    return None if milliseconds is None else milliseconds / 1000


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS else None
