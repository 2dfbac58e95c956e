"""Requests to protobuf and back: the only place where the SDK touches messages. Shared by both clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from twostep.client._types import (
    FinishReason,
    Message,
    Model,
    Phases,
    Piece,
    RequestClass,
    SamplingOptions,
    TokenLogprobs,
    Tokens,
    TopLogprob,
    Transfer,
    Usage,
)
from twostep.errors import InternalError, InvalidRequest
from twostep.request_class import MAX_TARGET_MS
from twostep.rpc.v1 import inference_pb2 as pb

Prompt = str | None
Messages = Iterable[Message | Mapping[str, str]]

_MAX_TOKEN_ID = (1 << 32) - 1
_CLASSES: dict[RequestClass, pb.RequestClass.ValueType] = {
    "interactive": pb.REQUEST_CLASS_INTERACTIVE,
    "standard": pb.REQUEST_CLASS_STANDARD,
    "batch": pb.REQUEST_CLASS_BATCH,
}
_FINISH: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


def generate_request(
    prompt: Prompt,
    token_ids: Sequence[int] | None,
    messages: Messages | None,
    *,
    model: str,
    request_id: str,
    cache_salt: str,
    sampling: SamplingOptions,
    migrate: bool = True,
    resume_token_ids: Sequence[int] = (),
    request_class: RequestClass = "standard",
    ttft_ms: float | None = None,
    tpot_ms: float | None = None,
    tenant: str = "",
) -> pb.GenerateRequest:
    """Exactly one of prompt, token_ids and messages is not None. Raises InvalidRequest for what no server could take."""
    if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
        raise InvalidRequest("give either a prompt or token_ids")
    request = pb.GenerateRequest(
        model=_text("model", model),
        request_id=_text("request_id", request_id),
        cache_salt=_text("cache_salt", cache_salt),
        sampling=_sampling(sampling),
        no_migration=not migrate,
        resume_token_ids=_token_ids("resume_token_ids", resume_token_ids),
        request_class=_request_class(request_class),
        ttft_ms=_milliseconds("ttft_ms", ttft_ms),
        tpot_ms=_milliseconds("tpot_ms", tpot_ms),
        tenant=_text("tenant", tenant),
    )
    drawn = not (request.sampling.HasField("temperature") and request.sampling.temperature == 0.0)
    if request.resume_token_ids and drawn and not request.sampling.HasField("seed"):
        raise InvalidRequest("resume_token_ids needs the seed that these tokens were drawn with: give StreamBroken.seed as seed")
    if prompt is not None:
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one character")
        request.text = _text("prompt", prompt)
    elif token_ids is not None:
        ids = _token_ids("token_ids", token_ids)
        if not ids:
            raise InvalidRequest("token_ids is empty; give at least one token")
        request.token_ids.ids.extend(ids)
    elif messages is not None:
        request.chat.CopyFrom(_chat(messages))
    return request


def tokenize_request(text: Prompt, messages: Messages | None, *, model: str) -> pb.TokenizeRequest:
    if (text is None) == (messages is None):
        raise InvalidRequest("give either a text or messages")
    request = pb.TokenizeRequest(model=_text("model", model))
    if text is not None:
        request.text = _text("text", text)
    elif messages is not None:
        request.chat.CopyFrom(_chat(messages))
    return request


def _token_ids(field: str, token_ids: Sequence[int]) -> list[int]:
    ids = list(token_ids)
    for token_id in ids:
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__") or not 0 <= token_id <= _MAX_TOKEN_ID:
            raise InvalidRequest(f"{field} has {token_id!r}; every id is a whole number from 0 up to the vocabulary's size")
    return ids


def _request_class(name: RequestClass) -> pb.RequestClass.ValueType:
    try:
        return _CLASSES[name]
    except (KeyError, TypeError):
        raise InvalidRequest(f"request_class is {name!r:.100}; give one of {', '.join(map(repr, _CLASSES))}") from None


def _milliseconds(field: str, value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_TARGET_MS:
        raise InvalidRequest(f"{field} is {value!r:.100}; give milliseconds above 0, up to {MAX_TARGET_MS}, or leave it out")
    return float(value)


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} is of type {type(value).__name__}; give a str")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} is not valid Unicode: lone surrogate {value[error.start]!r} at character {error.start}; "
            "decode the bytes it came from with errors='replace'"
        ) from error
    return value


def _chat(messages: Messages) -> pb.Chat:
    if isinstance(messages, str | bytes | Mapping | Message):
        raise InvalidRequest("messages is one value; give a list of messages, each with role and content")
    chat = pb.Chat()
    for index, message in enumerate(messages):
        if isinstance(message, Message):
            role, content = message.role, message.content
        elif isinstance(message, Mapping) and set(message) == {"role", "content"}:
            role, content = message["role"], message["content"]
        else:
            raise InvalidRequest(f"messages[{index}] is {message!r:.100}; give a Message or a mapping with exactly role and content")
        chat.messages.add(role=_text(f"messages[{index}].role", role), content=_text(f"messages[{index}].content", content))
    if not chat.messages:
        raise InvalidRequest("messages is empty; give at least one")
    return chat


def _sampling(options: SamplingOptions) -> pb.SamplingParams:
    """Ranges are the router's to judge; here only what cannot be written into the message at all."""
    unknown = set(options) - set(SamplingOptions.__annotations__)
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; there are {', '.join(SamplingOptions.__annotations__)}")
    params = pb.SamplingParams()
    values: Mapping[str, Any] = dict(options)
    for name, value in values.items():
        if value is None:
            continue
        try:
            if name == "stop":
                params.stop.extend(_text("stop", s) for s in ((value,) if isinstance(value, str) else value))
            elif name == "stop_token_ids":
                params.stop_token_ids.extend(value)
            else:
                setattr(params, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name} is {value!r:.100}: {error}") from error
    return params


def piece(message: pb.Piece) -> Piece:
    return Piece(
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(
            TokenLogprobs(entry.logprob, tuple(TopLogprob(top.token_id, top.logprob) for top in entry.top)) for entry in message.logprobs
        ),
        position=message.position,
    )


def finish_reason(end: pb.End) -> FinishReason:
    try:
        return _FINISH[end.finish_reason]
    except KeyError:
        raise InternalError(f"finish reason {end.finish_reason} is not one of {get_args(FinishReason)}; upgrade the client") from None


def usage(message: pb.Usage) -> Usage:
    return Usage(prompt_tokens=message.prompt_tokens, completion_tokens=message.completion_tokens, cached_tokens=message.cached_tokens)


def phases(message: pb.Phases) -> Phases:
    return Phases(**{field: getattr(message, field) for field in Phases.__dataclass_fields__})


def transfer(message: pb.Transfer) -> Transfer:
    return Transfer(**{field: getattr(message, field) for field in Transfer.__dataclass_fields__})


def models(response: pb.ListModelsResponse) -> list[Model]:
    return [Model(**{field: getattr(model, field) for field in Model.__dataclass_fields__}) for model in response.models]


def tokens(response: pb.TokenizeResponse) -> Tokens:
    return Tokens(token_ids=tuple(response.token_ids), max_model_len=response.max_model_len)
