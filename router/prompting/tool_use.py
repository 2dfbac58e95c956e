"""A chat's demands on the calls in its answer: which functions there are, whether one must be called, and who finds the calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from router.prompting.chat import read_tool
from twostep.errors import InvalidRequest
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.sampling_params import Grammar
from twostep.text.answer_grammar import AnswerTerms
from twostep.text.reasoning import Begun
from twostep.text.tool_calls import ToolCallParser
from twostep.text.tool_formats.format import ToolCallFormat
from twostep.text.tool_formats.values import Parameters

TOOL_CHOICES = ("auto", "none", "required")
# Of functions that are to be called, as JSON: the interpreter is held while they are read.
_MAX_TOOL_CHARS = 1 << 20


def check_size(tools: Sequence[str]) -> None:
    """Raises InvalidRequest for more than is read."""
    num_chars = sum(map(len, tools))
    if num_chars > _MAX_TOOL_CHARS:
        raise InvalidRequest(f"tools has {num_chars} characters; send at most {_MAX_TOOL_CHARS}")


class ToolText(NamedTuple):
    """`text`: the whole tool, as JSON. `strict` None: the client has not said. `namespace`: of the client's, whose name begins `name`."""

    name: str
    strict: bool | None
    text: str
    namespace: str = ""

    @classmethod
    def read(cls, index: int, text: str) -> ToolText:
        """Reads the index-th of a chat. Raises InvalidRequest."""
        function = read_tool(index, text)["function"]
        if not isinstance(function.get("parameters"), dict | None):
            raise InvalidRequest(f"tools[{index}].function.parameters is no JSON object; give a JSON Schema")
        strict = function.get("strict")
        return cls(function["name"], strict if isinstance(strict, bool) else None, text)

    def parameters(self) -> dict[str, Any] | None:
        given: dict[str, Any] | None = json.loads(self.text)["function"].get("parameters")
        return given


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`format` None: answers have no calls, and none are looked for. `must`: the answer is nothing but calls, of `tools`. `limited`: the
    prompt shows more tools than may be called."""

    format: ToolCallFormat | None = None
    tools: tuple[ToolText, ...] = ()
    must: bool = False
    parallel: bool = True
    limited: bool = False

    @classmethod
    def of(
        cls, asked: pb.ToolUse, tools: Sequence[ToolText], format: ToolCallFormat | None, *, allowed: Collection[str] | None = None
    ) -> ToolUse:
        """`format`: the model's. `allowed`: names of those that may be called, None: all. Raises InvalidRequest for what cannot be done."""
        check_size([tool.text for tool in tools])
        choice, function = asked.tool_choice or "auto", asked.function
        if choice not in TOOL_CHOICES:
            raise InvalidRequest(f"tool_choice is {choice[:64]!r}; give one of {', '.join(TOOL_CHOICES)}, or a function")
        if not tools:
            if choice in ("none", "auto") and not function:
                return cls()
            raise InvalidRequest("tool_choice asks for a call, and there are no tools; send `tools`")
        if len({tool.name for tool in tools}) < len(tools):
            raise InvalidRequest("tools has two of the same name; rename one")
        if choice == "none":
            return cls()
        if format is None:
            raise InvalidRequest(
                "tools cannot be called: this model's chat template writes no tool calls that are known here; leave `tools` out, set "
                "tool_choice to none, or start the router with --tool-call-parser"
            )
        if function:
            tools = [tool for tool in tools if tool.name == function]
            if not tools:
                raise InvalidRequest(f"tool_choice.function.name is {function[:64]!r}, which is none of the tools; add it, or name another")
        num_shown = len(tools)
        if allowed is not None:
            if unknown := set(allowed) - {tool.name for tool in tools}:
                raise InvalidRequest(f"tool_choice allows {min(unknown)[:64]!r}, which is none of the tools; add it, or leave it out")
            tools = [tool for tool in tools if tool.name in allowed]
        must = choice == "required" or bool(function)
        return cls(format, tuple(tools), must, parallel=not (function or asked.single), limited=len(tools) < num_shown)

    def terms(self, own: Grammar | None, *, plainly: bool, begun: Begun | None) -> AnswerTerms:
        """Returns what the answer's form is held to: calls if there must be some, calls to the functions that are allowed, arguments of
        strict functions to their schemas, and where the answer calls nothing, the request's own grammar."""
        held = self.must or own is not None or self.limited or any(tool.strict for tool in self.tools)
        return AnswerTerms(
            own=None if self.must else own,
            plainly=plainly,
            tools=tuple(tool.text for tool in self.tools) if held else (),
            must=self.must,
            parallel=self.parallel,
            begun=begun,
        )

    def parser(self) -> ToolCallParser | None:
        """Returns one for an answer."""
        if self.format is None:
            return None
        schemas: dict[str, Parameters] = {tool.name: cache(tool.parameters) for tool in self.tools}
        return ToolCallParser(self.format, functions=schemas, parallel=self.parallel, must=self.must)


NO_TOOLS = ToolUse()
