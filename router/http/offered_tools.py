"""The tools of a request: the functions that the model may call, and the hosted tools that are left out.

Clients offer hosted tools by default, which the provider of the API runs (`web_search`), or whose schema only its own models know (`bash`).
No tool is run here. A hosted tool is left out, and the answer's header `x-twostep-omitted-tools` names its type; a `tool_choice` that asks
for one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from router.http.errors import HttpError
from router.prompting.tool_use import ToolText

# Clients of MCP name a tool after its server too, and so exceed the 64 characters of OpenAI's API.
MAX_TOOL_NAME = 256

# By the beginning of a type: the APIs add a version ("web_search_20250305") or "_preview".
_HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "custom", "file_search", "image_generation", "local_shell", "mcp", "shell"),
    *("tool_search", "web_search"),
    *("advisor", "bash", "code_execution", "memory", "text_editor", "web_fetch"),
)
_HOSTED_TYPE = re.compile(rf"(?:{'|'.join(_HOSTED)})(?:_[a-z0-9_]*)?")
OMITTED_HEADER = "x-twostep-omitted-tools"


class Offered(NamedTuple):
    """`omitted`: types of the hosted tools that were left out."""

    functions: tuple[ToolText, ...] = ()
    omitted: tuple[str, ...] = ()

    def headers(self) -> dict[str, str]:
        return {OMITTED_HEADER: ", ".join(dict.fromkeys(self.omitted))} if self.omitted else {}


def is_hosted(kind: str) -> bool:
    return _HOSTED_TYPE.fullmatch(kind) is not None


def unknown_tool(param: str, kind: str, instead: str) -> HttpError:
    return HttpError(400, f"{param}.type is {kind[:64]!r}; {instead}", param=f"{param}.type", code="unsupported_parameter")


def flat_name(namespace: str, name: str) -> str:
    """Returns the name by which the model calls a function of a namespace. Empty `namespace`: it belongs to none."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


class Choice(NamedTuple):
    """`function`: the one that must be called. `allowed`: the functions that may be called; None: all."""

    mode: str
    function: str = ""
    allowed: tuple[str, ...] | None = None


def hosted_choice(kind: str) -> HttpError:
    """Returns the refusal of a tool choice that is of neither kind the API has for functions."""
    param = "tool_choice"
    if is_hosted(kind):
        message = f"tool_choice asks for {kind!r}, which is not run here; name one of your functions, or leave tool_choice out"
    else:
        message = f'tool_choice.type is {kind[:64]!r}; give "function" or "allowed_tools", or a tool_choice of "auto", "none" or "required"'
        param = "tool_choice.type"
    return HttpError(400, message, param=param, code="unsupported_parameter")


def allowed_choice(mode: str | None, names: Iterable[str | None]) -> Choice:
    """`names`: None for a tool that is no function. Raises HttpError 400."""
    if mode not in ("auto", "required"):
        raise HttpError(400, f'tool_choice has the mode {mode!r:.64}; give "auto" or "required"', param="tool_choice.mode")
    functions = tuple(name for name in names if name)
    if not functions:
        message = "tool_choice allows no function; name one at least, or set tool_choice to none"
        raise HttpError(400, message, param="tool_choice.tools")
    return Choice(mode, allowed=functions)
