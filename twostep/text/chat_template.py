"""Chat messages to one prompt, with the Jinja template that comes with a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from twostep.errors import InvalidRequest, SetupError
from twostep.text.model_card import ModelCard


class ChatTemplate:
    """A compiled template in a sandbox, with the names that transformers gives to templates. May be used from any thread."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        """`source` None: a model without a template, every render is refused. Raises SetupError for a broken template."""
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise SetupError(f"the model's chat template does not compile ({error}); correct or remove it") from error

    @classmethod
    def of(cls, card: ModelCard) -> ChatTemplate:
        return cls(card.chat_template, card.special_tokens)

    @property
    def available(self) -> bool:
        return self._template is not None

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt's text, special tokens written out: tokenize it with `add_special_tokens=False`.

        `messages` are {"role": ..., "content": ...}. Raises InvalidRequest if there are none, the model has no template, or the
        template refuses them."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; send a plain prompt (text or token ids) instead of messages")
        if not messages:
            raise InvalidRequest("messages is empty; send at least one message with role and content")
        try:
            return self._template.render(
                **self._special_tokens,
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}; change their roles, order or content"
            ) from error


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training; it renders what is inside."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own escapes HTML; a prompt is not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    """Local time, as transformers has it."""
    return datetime.now().strftime(fmt)
