"""The base of all request bodies: strict types, fields that are refused by name, and errors that name a field."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, GetPydanticSchema, ValidationError
from pydantic_core import PydanticCustomError, PydanticOmit, core_schema, from_json

from router.http.errors import HttpError

# Of a message about a value: enough to recognize it by.
_MAX_SHOWN = 80
# What a prompt is called behind the fronts, and in bodies.
_CORE_NAMES = {"token_ids": "prompt", "text": "prompt"}


class Body(BaseModel):
    """Types are taken at their word: "5" is no number. Lists fail at the first item that is wrong (`fail_fast`): a message for each of a
    million takes minutes and gigabytes."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=(), use_attribute_docstrings=True)

    @classmethod
    @cache
    def names(cls) -> dict[str, str]:
        """Returns what clients call the fields, and what the core calls otherwise."""
        names = {name: info.alias or name for name, info in cls.model_fields.items()}
        return {core: names[field] for core, field in _CORE_NAMES.items() if field in names} | names


def packed(pack: Callable[[Any], object], kind: Any) -> GetPydanticSchema:
    """Returns what says of a field that it is read as `kind`, and kept as `pack` makes of it. Bodies of many values are read in another
    process (router/http/body_parser.py): to make as many objects again here would hold up the event loop."""
    return GetPydanticSchema(lambda _, handler: core_schema.no_info_after_validator_function(pack, handler.generate_schema(kind)))


class Unsupported:
    """A field that would change the answer, and what to do instead. Accepts null, `unless`, and each value of a tuple `unless`. The API's
    description is without the field: it says what there is."""

    def __init__(self, instead: str, *, unless: Any = None) -> None:
        self._instead = instead
        self.harmless = (None, *(unless if isinstance(unless, tuple) else () if unless is None else (unless,)))

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        raise PydanticOmit

    def _check(self, value: Any) -> Any:
        """Returns the harmless value that this one equals: an integer for 1.0."""
        for harmless in self.harmless:
            if value == harmless and isinstance(value, bool) == isinstance(harmless, bool):
                return harmless
        raise PydanticCustomError(_UNSUPPORTED, "{instead}", {"instead": self._instead})


_UNSUPPORTED = "unsupported"


class Whole:
    """An integer from `least` to `most`. A float without a fraction counts: 16.0 is an integer in JSON Schema, and some clients write every
    number so."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        number = core_schema.int_schema(strict=True, ge=self._least, le=self._most)
        return core_schema.no_info_before_validator_function(without_point, number)


def without_point(value: Any) -> Any:
    """Returns 16 for 16.0, and any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


AnyBody = TypeVar("AnyBody", bound=BaseModel)


def parse_body(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Raises HttpError 400 that names the first field that is wrong."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _said(error, raw) from None


def _said(error: ValidationError, raw: bytes) -> HttpError:
    """Tells of one error: a union's message of each of its members is too many, so that of the one that got furthest."""
    errors = error.errors(include_url=False)
    first = max(errors, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    if first["type"] == "json_invalid":
        return HttpError(400, f"the body is not JSON: {first['msg']}", code="invalid_json")
    if first["loc"][:1] != errors[0]["loc"][:1]:
        first = errors[0]
    message, value, location = first["msg"][:1].lower() + first["msg"][1:], first["input"], first["loc"]
    if first["type"] in _TAG_ERRORS:
        location += (first["ctx"]["discriminator"].strip("'"),)
        message, value = f"give one of {first['ctx'].get('expected_tags')}", first["ctx"].get("tag")
    missing = first["type"] in ("missing", "union_tag_not_found")
    param = _path_of(location, from_json(raw), missing=missing)
    if first["type"] == _UNSUPPORTED:
        return HttpError(400, f"{param} is not supported here; {first['ctx']['instead']}", param=param, code="unsupported_parameter")
    if missing:
        return HttpError(400, f"{param or 'the body'}: field required; see /openapi.json", param=param)
    return wrong_value(param, message, value)


# The field that says which member of a union an object is.
_TAG_ERRORS = frozenset({"union_tag_invalid", "union_tag_not_found"})


def wrong_value(param: str | None, message: str, value: Any) -> HttpError:
    return HttpError(400, f"{param or 'the body'}: {message} (it is {_shown(value)}); see /openapi.json", param=param)


def _shown(value: Any) -> str:
    """Returns the beginning of a value as JSON: no more is written than is shown."""
    if isinstance(value, str):
        value = value[: _MAX_SHOWN + 1]
    text = ""
    for piece in json.JSONEncoder(default=str).iterencode(value):
        text += piece
        if len(text) > _MAX_SHOWN:
            return text[:_MAX_SHOWN] + "…"
    return text


def _path_of(location: tuple[int | str, ...], given: Any, *, missing: bool) -> str | None:
    """Returns `messages[0].content` without the names of types and members of unions that pydantic adds: `given`, the body, has none of
    those. `missing`: nor has it the last part."""
    path = ""
    for i, part in enumerate(location):
        if isinstance(part, int):
            if not isinstance(given, list) or part >= len(given):
                continue
            path, given = f"{path}[{part}]", given[part]
            continue
        here = isinstance(given, dict) and part in given
        if here or (missing and i == len(location) - 1):
            shown = part if len(part) <= _MAX_SHOWN else part[:_MAX_SHOWN] + "…"
            path = f"{path}.{shown}" if path else shown
        if here:
            given = given[part]
    return path or None
