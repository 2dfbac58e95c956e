"""Requests to protobuf and back: the only place where the SDK touches messages. Shared by both clients."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from twostep.client._types import (
    ChatOptions,
    Embeddings,
    EmbedOptions,
    FinishReason,
    Message,
    Piece,
    RequestClass,
    RequestOptions,
    SamplingOptions,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
    read_message,
)
from twostep.errors import InternalError, InvalidRequest
from twostep.request_class import MAX_TARGET_MS
from twostep.rpc.v1 import inference_pb2 as pb

Messages = str | Iterable[Message | Mapping[str, Any]]

_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"})
_MAX_TOKEN_ID = (1 << 32) - 1
_CLASSES: dict[RequestClass, pb.RequestClass.ValueType] = {
    "interactive": pb.REQUEST_CLASS_INTERACTIVE,
    "standard": pb.REQUEST_CLASS_STANDARD,
    "batch": pb.REQUEST_CLASS_BATCH,
}
_FINISH: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CONTENT_FILTER: "content_filter",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def generate_request(prompt: str | None, token_ids: Sequence[int] | None, options: RequestOptions) -> pb.GenerateRequest:
    """Exactly one of prompt and token_ids is not None. Raises InvalidRequest for what no server could take, TypeError for an option that
    there is not."""
    if (prompt is None) == (token_ids is None):
        raise InvalidRequest("give either a prompt or token_ids")
    request = _request(options, RequestOptions)
    if prompt is not None:
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one character")
        request.text = text("prompt", prompt)
    elif token_ids is not None:
        ids = _token_ids("token_ids", token_ids)
        if not ids:
            raise InvalidRequest("token_ids is empty; give at least one token")
        request.token_ids.ids.extend(ids)
    return request


def chat_request(messages: Messages, options: ChatOptions) -> pb.GenerateRequest:
    """Raises as generate_request does."""
    request = _request(options, ChatOptions)
    request.chat.CopyFrom(
        _chat(
            messages,
            tools=options.get("tools"),
            template_kwargs=options.get("template_kwargs"),
            continue_final_message=options.get("continue_final_message"),
        )
    )
    tool_use = _tool_use(options)
    if tool_use is not None:
        request.chat.tool_use.CopyFrom(tool_use)
    return request


def embed_request(inputs: str | Sequence[str] | Sequence[Sequence[int]], options: EmbedOptions) -> pb.EmbedRequest:
    """Raises as generate_request does."""
    unknown = options.keys() - EmbedOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"there is no option {', '.join(sorted(unknown))}; there are {', '.join(EmbedOptions.__annotations__)}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    many: list[str | Sequence[int]] = [inputs] if isinstance(inputs, str) else list(inputs)
    if not many:
        raise InvalidRequest("inputs is empty; give at least one")
    request = pb.EmbedRequest(
        model=text("model", given.get("model", "")),
        inputs=[_embed_input(i, each) for i, each in enumerate(many)],
        request_id=text("request_id", given.get("request_id", "")),
        cache_salt=text("cache_salt", given.get("cache_salt", "")),
        request_class=_request_class(given.get("request_class", "standard")),
        ttft_ms=_milliseconds("ttft_ms", given.get("ttft_ms")),
        tenant=text("tenant", given.get("tenant", "")),
    )
    for name in ("dimensions", "normalize", "truncate_prompt_tokens"):
        if name in given:
            try:
                setattr(request, name, given[name])
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"{name} is {given[name]!r:.100}: {error}") from error
    return request


def _embed_input(index: int, given: str | Sequence[int]) -> pb.EmbedInput:
    name = f"inputs[{index}]"
    if isinstance(given, str):
        return pb.EmbedInput(text=text(name, given))
    if isinstance(given, int):
        raise InvalidRequest(f"{name} is {given!r:.100}; every input is a text, or a list of token ids")
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=_token_ids(name, given)))


def embeddings(response: pb.EmbedResponse) -> Embeddings:
    return Embeddings(vectors=tuple(tuple(each.values) for each in response.embeddings), usage=read_message(response.usage, Usage))


def _tool_use(options: ChatOptions) -> pb.ToolUse | None:
    """None: calls, if there are any, are text."""
    choice, parallel, given = options.get("tool_choice"), options.get("parallel_tool_calls"), options.get("tool_calls") or "parsed"
    if given not in ("parsed", "text"):
        raise InvalidRequest(f"tool_calls is {given!r:.100}; give 'parsed' or 'text'")
    if given == "text" and (choice is not None or parallel is not None):
        raise InvalidRequest("tool_choice and parallel_tool_calls need calls that are parsed; leave tool_calls='text' out")
    if given == "text" or (choice is None and not options.get("tools")):
        return None
    if isinstance(choice, Mapping):
        function = choice.get("function")
        if choice.get("type") != "function" or not isinstance(function, Mapping) or not function.get("name"):
            raise InvalidRequest(f"tool_choice is {choice!r:.100}; give {{'type': 'function', 'function': {{'name': ...}}}}")
        return pb.ToolUse(function=text("tool_choice.function.name", function["name"]))
    return pb.ToolUse(tool_choice=text("tool_choice", choice or ""), single=parallel is False)


def tokenize_request(
    given: str | None, messages: Messages | None, *, model: str, tools: Sequence[Mapping[str, Any]] | None
) -> pb.TokenizeRequest:
    if (given is None) == (messages is None):
        raise InvalidRequest("give either a text or messages")
    request = pb.TokenizeRequest(model=text("model", model))
    if given is not None:
        request.text = text("text", given)
    elif messages is not None:
        request.chat.CopyFrom(_chat(messages, tools=tools))
    return request


def _request(options: RequestOptions, kind: type[RequestOptions]) -> pb.GenerateRequest:
    """All of a request but its prompt. An option that is None is one left out."""
    unknown = set(options) - set(kind.__annotations__)
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}; there are {', '.join(kind.__annotations__)}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    n = given.get("n", 1)
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _MAX_TOKEN_ID:
        raise InvalidRequest(f"n is {n!r:.100}; give a number of answers, 1 or more")
    if n > 1 and given.get("resume_token_ids"):
        raise InvalidRequest("resume_token_ids is of one answer, and n asks for several; ask for the rest of each by itself")
    request = pb.GenerateRequest(
        model=text("model", given.get("model", "")),
        request_id=text("request_id", given.get("request_id", "")),
        cache_salt=text("cache_salt", given.get("cache_salt", "")),
        sampling=_sampling({name: value for name, value in given.items() if name in SamplingOptions.__annotations__}),
        no_migration=not given.get("migrate", True),
        resume_token_ids=_token_ids("resume_token_ids", given.get("resume_token_ids", ())),
        request_class=_request_class(given.get("request_class", "standard")),
        ttft_ms=_milliseconds("ttft_ms", given.get("ttft_ms")),
        tpot_ms=_milliseconds("tpot_ms", given.get("tpot_ms")),
        gap_ms=_milliseconds("gap_ms", given.get("gap_ms")),
        tenant=text("tenant", given.get("tenant", "")),
        keep_special_tokens=bool(given.get("keep_special_tokens", False)),
        n=n if n > 1 else 0,
    )
    drawn = not (request.sampling.HasField("temperature") and request.sampling.temperature == 0.0)
    if request.resume_token_ids and drawn and not request.sampling.HasField("seed"):
        raise InvalidRequest("resume_token_ids needs the seed that these tokens were drawn with: give StreamBroken.seed as seed")
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


_GRAMMARS = ("json_schema", "json_object", "response_format", "regex", "lark")


def _sampling(options: Mapping[str, Any]) -> pb.SamplingParams:
    """Ranges are the router's to judge; here only what cannot be written into the message at all."""
    params = pb.SamplingParams()
    for name, value in options.items():
        if name in _GRAMMARS:
            continue
        try:
            if name == "stop":
                params.stop.extend(text("stop", s) for s in ((value,) if isinstance(value, str) else value))
            elif name == "stop_token_ids":
                params.stop_token_ids.extend(value)
            elif name == "logit_bias":
                params.logit_bias.update(value)
            else:
                setattr(params, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name} is {value!r:.100}: {error}") from error
    grammar = _grammar({name: options[name] for name in _GRAMMARS if options.get(name, False) is not False})
    if grammar is not None:
        params.grammar.CopyFrom(grammar)
    return params


def _grammar(given: Mapping[str, Any]) -> pb.Grammar | None:
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} are given; an answer keeps to one of them at most")
    ((name, value),) = given.items()
    if name == "response_format" and isinstance(value, Mapping):
        # As OpenAI's API has it.
        kind, schema = value.get("type"), value.get("json_schema")
        if kind == "text":
            return None
        if kind == "json_object":
            return pb.Grammar(json_object=True)
        if kind != "json_schema" or not isinstance(schema, Mapping) or "schema" not in schema:
            raise InvalidRequest(f"response_format is {value!r:.100}; its type is 'text', 'json_object', or 'json_schema' with a schema")
        name, value = "json_schema", schema["schema"]
    if name == "response_format" and not hasattr(value, "model_json_schema"):
        raise InvalidRequest(f"response_format is {value!r:.100}; give a class as pydantic makes them, or a mapping")
    if name in ("json_schema", "response_format"):
        return pb.Grammar(json_schema=_schema(value))
    if name == "json_object":
        if value is not True:
            raise InvalidRequest(f"json_object is {value!r:.100}; give True, or a schema as json_schema")
        return pb.Grammar(json_object=True)
    written = text(name, value)
    return pb.Grammar(regex=written) if name == "regex" else pb.Grammar(lark=written)


def _schema(schema: Any) -> str:
    """A schema's JSON text; of a class as pydantic makes them, that of its instances."""
    if isinstance(schema, str):
        return text("json_schema", schema)
    made = getattr(schema, "model_json_schema", None)
    if isinstance(schema, type) and callable(made):
        schema = made()
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"json_schema is {schema!r:.100}; give a mapping, JSON text, or a class that has model_json_schema")
    return _as_json("json_schema", dict(schema))


def form_of(options: SamplingOptions) -> type[Any] | None:
    """Returns the class that the answer is to be an instance of; None: there is none."""
    given = options.get("response_format") or options.get("json_schema")
    return given if isinstance(given, type) and hasattr(given, "model_validate_json") else None


def piece(message: pb.Piece, index: int) -> Piece:
    return Piece(
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(
            TokenLogprobs(entry.logprob, tuple(TopLogprob(top.token_id, top.logprob) for top in entry.top)) for entry in message.logprobs
        ),
        position=message.position,
        reasoning=message.reasoning,
        index=index,
        tool_calls=tuple(ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in message.tool_calls),
    )


def prompt_logprobs(message: pb.PromptLogprobs) -> list[TokenLogprobs]:
    tops = [TopLogprob(token_id, logprob) for token_id, logprob in zip(message.top_token_ids, message.top_logprobs, strict=True)]
    num_top = message.num_top
    return [
        TokenLogprobs(logprob, tuple(tops[i * num_top : (i + 1) * num_top]), rank)
        for i, (logprob, rank) in enumerate(zip(message.logprobs, message.ranks, strict=True))
    ]


def finish_reason(end: pb.End) -> FinishReason:
    try:
        return _FINISH[end.finish_reason]
    except KeyError:
        raise InternalError(f"finish reason {end.finish_reason} is not one of {get_args(FinishReason)}; upgrade the client") from None


# ---- a conversation: our Message, or mappings as OpenAI's API has them ---------------------------------------------------


def _chat(
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool | None = None,
) -> pb.Chat:
    """Raises InvalidRequest for what cannot be written down; what a template makes of it is the router's to judge."""
    if isinstance(messages, bytes | Mapping | Message):
        raise InvalidRequest("messages is one value; give a text, or a list of messages, each with role and content")
    if isinstance(messages, str):
        messages = (Message("user", messages),)
    result = pb.Chat(continue_final_message=bool(continue_final_message))
    for index, message in enumerate(messages):
        result.messages.append(_message(f"messages[{index}]", message))
    if not result.messages:
        raise InvalidRequest("messages is empty; give at least one")
    if isinstance(tools, str | bytes | Mapping):
        raise InvalidRequest("tools is one value; give a list of tools, each a mapping as in OpenAI's API")
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise InvalidRequest(f"tools[{index}] is {tool!r:.100}; give a mapping as in OpenAI's API: {{'type': 'function', ...}}")
        result.tools.append(_as_json(f"tools[{index}]", tool))
    if template_kwargs:
        result.template_kwargs = _as_json("template_kwargs", template_kwargs)
    return result


def text(field: str, value: object) -> str:
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


def _as_json(field: str, value: object) -> str:
    try:
        return text(field, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} cannot be written as JSON: {error}") from error


def _message(where: str, message: object) -> pb.ChatMessage:
    if isinstance(message, Message):
        message = {field: getattr(message, field) for field in Message.__dataclass_fields__}
    if not isinstance(message, Mapping) or "role" not in message or not set(message) <= _KEYS:
        raise InvalidRequest(f"{where} is {message!r:.100}; give a Message or a mapping with role, content and, if need be, {_optional()}")
    calls = message.get("tool_calls") or ()
    content = message.get("content")
    if content is None and not calls:
        raise InvalidRequest(f"{where} has no content; give a text, or the assistant's tool_calls")
    return pb.ChatMessage(
        role=text(f"{where}.role", message["role"]),
        content=_content(f"{where}.content", content),
        name=text(f"{where}.name", message.get("name") or ""),
        tool_calls=_tool_calls(f"{where}.tool_calls", calls),
        tool_call_id=text(f"{where}.tool_call_id", message.get("tool_call_id") or ""),
        reasoning=text(f"{where}.reasoning", message.get("reasoning") or message.get("reasoning_content") or ""),
    )


def _optional() -> str:
    return ", ".join(sorted(_KEYS - {"role", "content", "reasoning_content"}))


def _content(field: str, content: object) -> str:
    """A text, or OpenAI's list of parts, of which texts are taken and nothing else."""
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return text(field, content)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise InvalidRequest(f"{field}[{index}] is {part!r:.100}; only parts of type 'text' are taken")
        texts.append(text(f"{field}[{index}].text", part.get("text")))
    return "".join(texts)


def _tool_calls(field: str, calls: object) -> list[pb.ToolCall]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidRequest(f"{field} is {calls!r:.100}; give a list of ToolCall, or of mappings as in OpenAI's API")
    result = []
    for index, call in enumerate(calls):
        where = f"{field}[{index}]"
        if isinstance(call, ToolCall):
            call = {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not {"name", "arguments"} <= set(function):
            raise InvalidRequest(
                f"{where} is {call!r:.100}; give a ToolCall or {{'id': ..., 'function': {{'name': ..., 'arguments': ...}}}}"
            )
        result.append(
            pb.ToolCall(
                id=text(f"{where}.id", call.get("id") or ""),
                name=text(f"{where}.function.name", function["name"]),
                arguments=text(f"{where}.function.arguments", function["arguments"]),
            )
        )
    return result
