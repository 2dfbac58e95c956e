"""Bodies to requests of router.serving.inference. Pure, but for seeds that are drawn."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from router.http.chat_body import ChatBody
from router.http.completion_body import CompletionBody
from router.http.errors import HttpError
from router.http.fields import CommonBody, JsonFormat, JsonObjectFormat, LarkFormat, RegexFormat, StructuredOutputs
from twostep.rpc.v1 import inference_pb2 as pb

_CLASSES = {
    "interactive": pb.REQUEST_CLASS_INTERACTIVE,
    "standard": pb.REQUEST_CLASS_STANDARD,
    "batch": pb.REQUEST_CLASS_BATCH,
}
_TIERS = {"flex": pb.REQUEST_CLASS_BATCH, "priority": pb.REQUEST_CLASS_INTERACTIVE}
_MAX_TARGET_MS = 3_600_000.0
_MAX_TIMEOUT_MS = 86_400_000.0
_SEED = re.compile(r"-?[0-9]{1,19}")

_SAME_NAME = (
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


def drawn_seed_of(headers: Mapping[str, str]) -> int:
    """Of a request that gives none: a new one, or that of the request which is repeated. Raises HttpError 400."""
    text = headers.get("x-twostep-seed")
    if not text:
        return secrets.randbits(63)
    if not _SEED.fullmatch(text) or not -(1 << 63) <= int(text) < 1 << 63:
        raise HttpError(400, f"x-twostep-seed is {text[:40]!r}; give a whole number from -2^63 to 2^63 - 1", param="x-twostep-seed")
    return int(text)


def choice_seed(seed: int, choice: int) -> int:
    """Of the i-th answer: the request's own for the first, so that n does not change it; for the others 63 bits of a hash."""
    if choice == 0:
        return seed
    digest = blake2b(f"{seed} {choice}".encode(), digest_size=8, person=b"twostep choice").digest()
    return int.from_bytes(digest, "little") >> 1


def request_of(body: ChatBody | CompletionBody, headers: Mapping[str, str], *, seed: int) -> pb.GenerateRequest:
    """All but the prompt, the name and the choice's seed. `headers` say what the body leaves open. Raises HttpError 400."""
    request = pb.GenerateRequest(
        model=body.model,
        sampling=sampling_of(body, seed=seed),
        cache_salt=body.cache_salt or "",
        request_class=_class(body, headers),
        keep_special_tokens=body.skip_special_tokens is False,
    )
    for field in ("ttft_ms", "tpot_ms"):
        value = getattr(body, field)
        if value is None:
            value = _number(headers, f"x-twostep-{field.replace('_', '-')}", _MAX_TARGET_MS)
        if value is not None:
            setattr(request, field, value)
    return request


def sampling_of(body: ChatBody | CompletionBody, *, seed: int) -> pb.SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise HttpError(400, "stream_options is for streams; set stream to true or leave it out", param="stream_options")
    given: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    if body.token_limit is not None:
        given["max_tokens"] = body.token_limit
    if body.num_logprobs is not None:
        given["logprobs"] = body.num_logprobs
    return pb.SamplingParams(seed=seed, stop=body.stop_strings, stop_token_ids=body.stop_token_ids or (), grammar=grammar_of(body), **given)


def grammar_of(body: CommonBody) -> pb.Grammar | None:
    """What the answer is held to. Raises HttpError 400 if it is said in two ways."""
    asked: dict[str, pb.Grammar] = {}
    match body.response_format:
        case JsonObjectFormat():
            asked["response_format"] = pb.Grammar(json_object=True)
        case JsonFormat(json_schema=schema):
            asked["response_format"] = pb.Grammar(json_schema=schema.schema_)
        case RegexFormat(pattern=pattern):
            asked["response_format"] = pb.Grammar(regex=pattern)
        case LarkFormat(grammar=grammar):
            asked["response_format"] = pb.Grammar(lark=grammar)
    if body.structured_outputs is not None:
        asked["structured_outputs"] = _structured(body.structured_outputs)
    if body.guided_json is not None:
        asked["guided_json"] = pb.Grammar(json_schema=body.guided_json)
    if body.guided_regex is not None:
        asked["guided_regex"] = pb.Grammar(regex=body.guided_regex)
    if body.guided_choice is not None:
        asked["guided_choice"] = _choice(body.guided_choice)
    if body.guided_grammar is not None:
        asked["guided_grammar"] = pb.Grammar(lark=body.guided_grammar)
    if len(asked) > 1:
        raise HttpError(400, f"{' and '.join(asked)} each say what the answer must look like; keep one", param=list(asked)[1])
    return next(iter(asked.values()), None)


def _structured(given: StructuredOutputs) -> pb.Grammar:
    if given.structural_tag is not None:
        raise HttpError(
            400,
            "structured_outputs.structural_tag is not supported here; use json, regex, choice or grammar",
            param="structured_outputs.structural_tag",
            code="unsupported_parameter",
        )
    asked: list[pb.Grammar] = []
    if given.json_ is not None:
        asked.append(pb.Grammar(json_schema=given.json_))
    if given.json_object:
        asked.append(pb.Grammar(json_object=True))
    if given.regex is not None:
        asked.append(pb.Grammar(regex=given.regex))
    if given.choice is not None:
        asked.append(_choice(given.choice))
    if given.grammar is not None:
        asked.append(pb.Grammar(lark=given.grammar))
    if len(asked) != 1:
        raise HttpError(
            400, "structured_outputs takes exactly one of json, json_object, regex, choice, grammar", param="structured_outputs"
        )
    return asked[0]


def _choice(choices: list[str]) -> pb.Grammar:
    return pb.Grammar(regex="|".join(_escaped(choice) for choice in choices))


def _escaped(text: str) -> str:
    """For regular expressions of every dialect: nothing is escaped that needs no escape."""
    return re.sub(r"[\\.+*?()|\[\]{}^$]", lambda found: "\\" + found.group(), text)


def _class(body: CommonBody, headers: Mapping[str, str]) -> pb.RequestClass.ValueType:
    named = body.request_class or headers.get("x-twostep-class")
    if named:
        if named not in _CLASSES:
            raise HttpError(400, f"x-twostep-class is {named[:40]!r}; give one of {', '.join(_CLASSES)}", param="x-twostep-class")
        return _CLASSES[named]
    if body.service_tier in _TIERS:
        return _TIERS[body.service_tier]
    if body.priority:
        return pb.REQUEST_CLASS_INTERACTIVE if body.priority < 0 else pb.REQUEST_CLASS_BATCH
    return pb.REQUEST_CLASS_UNSPECIFIED


def timeout_of(body: CommonBody, headers: Mapping[str, str]) -> float:
    """Seconds; infinite without. Raises HttpError 400."""
    if body.timeout is not None:
        return body.timeout
    given = _number(headers, "x-twostep-timeout-ms", _MAX_TIMEOUT_MS)
    return float("inf") if given is None else given / 1e3


def keep_alive_of(headers: Mapping[str, str]) -> float | None:
    """After how many silent seconds comments are sent, also before the first event. Raises HttpError 400."""
    given = _number(headers, "x-twostep-keep-alive-s", 3600.0)
    return None if given is None else max(1.0, given)


def _number(headers: Mapping[str, str], name: str, most: float) -> float | None:
    text = headers.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value <= most:
        raise HttpError(400, f"{name} is {text[:40]!r}; give a number above 0, up to {most:g}", param=name)
    return value


def flag_of(headers: Mapping[str, str], name: str) -> bool:
    return headers.get(name, "").strip().lower() in ("1", "true", "yes")
