"""Chat messages to one prompt, with the Jinja template that comes with a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from twostep.errors import InvalidRequest, SetupError
from twostep.text.model_card import ModelCard
from twostep.text.template_sandbox import MAX_CHARS, MAX_STEPS, Sandbox, TooMuch

# What a client's variables may not be called: arguments of the render itself, and of transformers' function that renders.
_RESERVED = frozenset({"messages", "tools", "continue_final_message", "chat_template", "tokenize"})
_MAX_VARIABLES = 256
# Put behind the message that is continued, to find the place in what the template makes of it. The space at its end shows whether
# the template strips messages.
_TAG = "<<twostep: the answer goes on here>> "


class TooMuchWork(InvalidRequest):
    """The bounds of a render do not suffice for these messages."""


class ChatTemplate:
    """A compiled template in a sandbox, with the names that transformers gives to templates. May be used from any thread."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        tool_use: str | None = None,
        max_chars: int = MAX_CHARS,
    ) -> None:
        """`source` None: a model without a template, every render is refused. `tool_use` renders chats with tools; None: `source` does too.
        `max_chars` bounds what a render comes to. Raises SetupError for a broken template."""
        self._special_tokens = dict(special_tokens or {})
        self._sandbox = Sandbox(max_chars=max_chars)
        try:
            self._template = None if source is None else self._sandbox.from_string(source)
            self._tool_use = self._template if tool_use is None else self._sandbox.from_string(tool_use)
        except jinja2.TemplateError as error:
            raise SetupError(f"the model's chat template does not compile ({error}); correct or remove it") from error
        self._reserved = _RESERVED | self._special_tokens.keys() | self._sandbox.globals.keys()

    @classmethod
    def of(cls, card: ModelCard) -> ChatTemplate:
        return cls(card.chat_template, card.special_tokens, tool_use=card.tool_use_template)

    @property
    def available(self) -> bool:
        return self._template is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        max_steps: int = MAX_STEPS,
    ) -> str:
        """The prompt's text, special tokens written out: tokenize it with `add_special_tokens=False`.

        `messages` are {"role": ..., "content": ...} and whatever else the template reads of them, `tools` the entries of OpenAI's `tools`,
        all of it plain data. `variables` are the client's, for the template; `add_generation_prompt` may be one of them.
        `continue_final_message`: the prompt ends where the last message's content does. `max_steps` bounds the work, about a microsecond
        each. Raises InvalidRequest if there are no messages, the model has no template, a variable has a name that is taken, or the
        template refuses what it is given; TooMuchWork."""
        template = self._tool_use if tools else self._template
        if template is None:
            raise InvalidRequest("this model has no chat template; send a plain prompt (text or token ids) instead of messages")
        if not messages:
            raise InvalidRequest("messages is empty; send at least one message with role and content")
        given = self._checked(variables or {})
        plain = [dict(message) for message in messages]
        continued = self._tagged(plain) if continue_final_message else None
        everything = {
            **self._special_tokens,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **given,
            "messages": plain,
            "tools": None if tools is None else list(tools),
        }
        if continued is not None:
            everything["add_generation_prompt"] = False
        try:
            text = self._sandbox.render_bounded(template, everything, max_steps)
        except TooMuch as error:
            raise TooMuchWork(f"the model's chat template refused the messages: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}; change their roles, order or content"
            ) from error
        return text if continued is None else _continued(text, continued)

    def _checked(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        if len(variables) > _MAX_VARIABLES:
            raise InvalidRequest(f"there are {len(variables)} variables for the chat template; send at most {_MAX_VARIABLES}")
        taken = sorted(self._reserved & variables.keys())
        if taken:
            raise InvalidRequest(f"the chat template's variable {taken[0]!r} is not the client's to set; leave it out of the variables")
        return variables

    def _tagged(self, messages: list[dict[str, Any]]) -> str:
        """Tags the last message, and returns its content."""
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise InvalidRequest(
                "continue_final_message needs a last message whose content is text; send the beginning of the answer as one"
            )
        messages[-1]["content"] = content + _TAG
        return content


def _continued(text: str, content: str) -> str:
    """What comes before the tag; stripped, if the template strips messages: with the tag it could not."""
    at = text.rfind(_TAG.strip())
    if at < 0 or content.strip() not in text:
        raise InvalidRequest(
            "the model's chat template leaves out or changes the last message, so that it cannot be continued; "
            "leave continue_final_message out"
        )
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()
