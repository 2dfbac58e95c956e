"""Tool calls in the text of an answer, found while it arrives.

What precedes a call is held back until it is certain that there is one: if not, it is given out as content, every character of it, once.
From then on arguments are passed on as the model writes them. What an answer that was cut off has of a call that did not get so far is no
content either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from twostep.errors import SetupError
from twostep.text.tool_formats.events import ContentDelta, Event
from twostep.text.tool_formats.format import ToolCallFormat
from twostep.text.tool_formats.harmony_calls import HARMONY
from twostep.text.tool_formats.json_calls import DEEPSEEK_V3, DEEPSEEK_V31, HERMES, LLAMA3_JSON, LLAMA4_JSON, MISTRAL
from twostep.text.tool_formats.pythonic import PYTHONIC
from twostep.text.tool_formats.reader import ToolCallReader
from twostep.text.tool_formats.tagged_calls import GLM45, QWEN3_CODER
from twostep.text.tool_formats.values import Parameters

# Of two that a chat template may mean the first one is meant.
_FORMATS = (HARMONY, MISTRAL, QWEN3_CODER, GLM45, HERMES, DEEPSEEK_V3, DEEPSEEK_V31, PYTHONIC, LLAMA3_JSON, LLAMA4_JSON)
# By all of their names, which are vLLM's.
TOOL_CALL_FORMATS = {name: format for format in _FORMATS for name in (format.name, *format.aliases)}
TOOL_CALL_PARSERS = ("auto", "none", *sorted(TOOL_CALL_FORMATS))


def tool_call_format(name: str, chat_template: str | None) -> ToolCallFormat | None:
    """Returns the format of a parser's name. "auto" looks at the model's chat template, which writes earlier calls as the model writes new
    ones."""
    if name == "none":
        return None
    if name == "auto":
        return _told_by(chat_template or "")
    try:
        return TOOL_CALL_FORMATS[name]
    except KeyError:
        raise SetupError(f"--tool-call-parser {name!r} is not known; give one of {', '.join(TOOL_CALL_PARSERS)}") from None


def _told_by(template: str) -> ToolCallFormat | None:
    if "tools" not in template:
        return None
    return next((format for format in _FORMATS if all(sign in template for sign in format.told_by)), None)


class ToolCallParser:
    """Watches one answer; not thread-safe. The outcome does not depend on how the text was cut into pieces, but for where deltas end."""

    def __init__(
        self,
        format: ToolCallFormat,
        *,
        functions: Mapping[str, Parameters] | None = None,
        parallel: bool = True,
        must: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`functions`: those that there are, with what returns the schema of their arguments. A call without a mark has to name one of
        them (with one it may have any name: the client, who executes calls, knows which there are). Without `parallel`, calls after the
        first are dropped. `must`: a grammar holds the answer to calls."""
        self._must = must
        self._reader = ToolCallReader(functions=functions or {}, parallel=parallel, new_id=new_id or format.new_id, markers=format.markers)
        self._reading = format.read(self._reader)
        self._ended = False
        self._advance()

    @property
    def num_calls(self) -> int:
        """Given out so far."""
        return self._reader.num_calls

    @property
    def unfinished(self) -> bool:
        """Returns whether the answer was cut off within a call. Valid after `finish`."""
        return self._reader.unfinished

    def push(self, text: str) -> list[Event]:
        """Takes the next piece of the answer, returns what is certain."""
        if not text:
            return []
        if self._ended:
            return [ContentDelta(text)]
        self._reader.feed(text)
        return self._advance()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """The answer is over: what was held back is no call. `cut`: the model would have gone on; then it is dropped where it can only have
        become one."""
        if self._ended:
            return []
        self._reader.end(cut=cut, must=self._must)
        return self._advance()

    def _advance(self) -> list[Event]:
        try:
            next(self._reading)
        except StopIteration:
            self._ended = True
        return self._reader.taken()
