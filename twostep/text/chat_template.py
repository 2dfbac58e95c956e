"""Chat messages to one prompt, with the Jinja template that comes with a model."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.nodes

from twostep.errors import InvalidRequest, SetupError
from twostep.text.client_words import ClientWords, drawn_mark, strings_in
from twostep.text.model_card import ModelCard
from twostep.text.template_sandbox import MAX_CHARS, MAX_STEPS, Sandbox, TooMuch
from twostep.text.tokenizer import AddedTokens, Tokenizer

# What a client's variables may not be called: arguments of the render itself, and of transformers' function that renders.
_RESERVED = frozenset({"messages", "tools", "continue_final_message", "chat_template", "tokenize"})
_MAX_VARIABLES = 256
# Control tokens as ChatML, harmony, Llama 3 and most others write them, as DeepSeek does, and Gemma's.
_CONTROL = re.compile(r"<\|\w+\|>|<｜[^<>｜]+｜>|<(?:start|end)_of_turn>")
# Put behind the message that is continued, to find the place in what the template makes of it. The space at its end shows whether
# the template strips messages.
_TAG = "<<twostep: the answer goes on here>> "


class TooMuchWork(InvalidRequest):
    """The bounds of a render do not suffice for these messages."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text. `clients`: where control tokens begin in it that the client wrote, and that are to be encoded as text."""

    text: str
    clients: tuple[int, ...] = ()


def check_syntax(card: ModelCard) -> None:
    """Raises SetupError for a template that is none. Takes no more than reading it does: compiling may compute whatever it says."""
    for source in (card.chat_template, card.tool_use_template):
        if source is not None:
            try:
                _reader().parse(source)
            except (jinja2.TemplateError, RecursionError) as error:
                raise SetupError(f"the model's chat template does not compile ({error}); correct or remove it") from error


def unknown_control_tokens(card: ModelCard, tokenizer: Tokenizer) -> list[str]:
    """Returns those that the model's chat templates write, in their order, and its tokenizer reads as plain text. The templates are those
    that passed check_syntax; what they put together from pieces is not seen."""
    found: dict[str, None] = {}
    for source in (card.chat_template, card.tool_use_template):
        if source is not None:
            parsed = _reader().parse(source)
            texts = [node.data for node in parsed.find_all(jinja2.nodes.TemplateData)]
            texts += [node.value for node in parsed.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
            found |= dict.fromkeys(token for text in texts for token in _CONTROL.findall(text))
    return [token for token in found if not _is_token(token, tokenizer)]


def _is_token(text: str, tokenizer: Tokenizer) -> bool:
    try:
        return tokenizer.encode(text, add_special_tokens=False) == [tokenizer.token_id(text)]
    except InvalidRequest:
        return False


@functools.cache
def _reader() -> Sandbox:
    """One for all: a sandbox is a cycle of objects, which processes under load do not collect."""
    return Sandbox()


class ChatTemplate:
    """A compiled template in a sandbox, with the names that transformers gives to templates. May be used from any thread, but for
    `render_telling`, which has the sandbox to itself."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        *,
        tool_use: str | None = None,
        max_chars: int = MAX_CHARS,
        tokens: AddedTokens | None = None,
        model_markers: Collection[str] = (),
    ) -> None:
        """`source` None: a model without a template, every render is refused. `tool_use` renders chats with tools; None: `source` does too.
        `max_chars` bounds what a render comes to. `tokens` are the tokenizer's, for `render_telling`; `model_markers` those that the model
        itself writes, and that stay tokens in what the assistant said. Raises SetupError for a broken template."""
        self._special_tokens = dict(special_tokens or {})
        self._sandbox = Sandbox(max_chars=max_chars)
        try:
            self._template = None if source is None else self._sandbox.from_string(source)
            self._tool_use = self._template if tool_use is None else self._sandbox.from_string(tool_use)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise SetupError(f"the model's chat template does not compile ({error}); correct or remove it") from error
        constants = [
            node.value
            for each in (source, tool_use)
            if each is not None and tokens is not None
            for node in self._sandbox.parse(each).find_all(jinja2.nodes.Const)
            if isinstance(node.value, str)
        ]
        self._words = None if tokens is None else ClientWords(tokens, constants, model_markers)
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
        except MemoryError:
            # Of which there is no more with more steps.
            raise InvalidRequest(
                "the model's chat template takes too much memory; send fewer or shorter messages, tools or variables"
            ) from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}; change their roles, order or content"
            ) from error
        return text if continued is None else _continued(text, continued)

    def render_telling(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        max_steps: int = MAX_STEPS,
    ) -> Rendered:
        """Renders, and tells which control tokens in the text are the client's own words. Without any of their signs in what the client
        sent there are none. Else it is rendered once more, with marks; and where the template looked at these, the text is the one
        without them unless the client had made a control token in it. Raises as `render` does."""

        def render(mark: str) -> str:
            given = variables or {}
            if mark and words is not None:
                return self.render(
                    words.marked_messages(messages, mark),
                    tools=None if tools is None else words.marked(list(tools), mark),
                    variables={name: words.marked(value, mark) for name, value in given.items()},
                    continue_final_message=continue_final_message,
                    max_steps=max_steps,
                )
            return self.render(messages, tools=tools, variables=given, continue_final_message=continue_final_message, max_steps=max_steps)

        words = self._words
        text = render("")
        strings = [] if words is None else list(strings_in([list(map(dict, messages)), list(tools or ()), dict(variables or {})]))
        if words is None or not words.need_marks(strings):
            return Rendered(text)
        self._sandbox.mark = mark = drawn_mark(strings)
        try:
            seen = render(mark)
        except TooMuchWork:
            raise
        except InvalidRequest:
            if words.hold_control_tokens(strings):
                raise
            return Rendered(text)
        finally:
            self._sandbox.mark = ""
        clean, own, clients = words.own_and_clients(seen, mark)
        if clean != text and own == words.control_in(text):
            return Rendered(text)
        return Rendered(clean, tuple(clients))

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
    """Returns what comes before the tag; stripped, if the template strips messages: with the tag it could not."""
    at = text.rfind(_TAG.strip())
    if at < 0 or content.strip() not in text:
        raise InvalidRequest(
            "the model's chat template leaves out or changes the last message, so that it cannot be continued; "
            "leave continue_final_message out"
        )
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()
