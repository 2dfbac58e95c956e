"""How a model writes what is not plain text in the answers to chats: reasoning, tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from twostep.errors import SetupError
from twostep.text.harmony import HarmonyFormat
from twostep.text.model_card import ModelCard
from twostep.text.reasoning import ReasoningFormat
from twostep.text.tokenizer import Tokenizer
from twostep.text.tool_calls import tool_call_format
from twostep.text.tool_formats.format import ToolCallFormat

_THINK = ReasoningFormat("<think>", "</think>")
_MISTRAL = ReasoningFormat("[THINK]", "[/THINK]")
_HARMONY = HarmonyFormat()
# By the names that vLLM gives them.
REASONING_FORMATS: dict[str, ReasoningFormat | HarmonyFormat] = {
    "qwen3": _THINK,
    "deepseek_r1": ReasoningFormat("<think>", "</think>", implicit=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "mistral": _MISTRAL,
    "openai_gptoss": _HARMONY,
}
REASONING_PARSERS = ("auto", "none", *REASONING_FORMATS)


def reasoning_format(name: str, chat_template: str | None) -> ReasoningFormat | HarmonyFormat | None:
    """Returns the format of a parser's name. "auto" looks at the model's chat template, which writes the markers if the model knows any."""
    if name == "none":
        return None
    if name == "auto":
        template = chat_template or ""
        if all(sign in template for sign in ("<|channel|>", "<|message|>", "analysis")):
            return _HARMONY
        return next((f for f in (_THINK, _MISTRAL) if f.closing in template), None)
    try:
        return REASONING_FORMATS[name]
    except KeyError:
        raise SetupError(f"--reasoning-parser {name!r} is not known; give one of {', '.join(REASONING_PARSERS)}") from None


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """None: the model has no marks for it, or they are not to be looked for."""

    reasoning: ReasoningFormat | HarmonyFormat | None = None
    tool_calls: ToolCallFormat | None = None
    # The chat template has a place for tools, so that the model can read which there are.
    shows_tools: bool = False

    @classmethod
    def of(cls, card: ModelCard, *, reasoning_parser: str = "auto", tool_call_parser: str = "auto") -> ChatFormat:
        """By the names of --reasoning-parser and --tool-call-parser. Raises SetupError for others."""
        for_tools = card.tool_use_template or card.chat_template
        tool_calls = tool_call_format(tool_call_parser, for_tools)
        return cls(reasoning_format(reasoning_parser, card.chat_template), tool_calls, shows_tools="tools" in (for_tools or ""))

    @classmethod
    def named(cls, reasoning: str, tool_calls: str) -> ChatFormat:
        """By `names`."""
        return cls(reasoning_format(reasoning, None), tool_call_format(tool_calls, None))

    @property
    def names(self) -> tuple[str, str]:
        """Returns what --reasoning-parser and --tool-call-parser call them."""
        reasoning = next((name for name, each in REASONING_FORMATS.items() if each == self.reasoning), "none")
        return reasoning, "none" if self.tool_calls is None else self.tool_calls.name

    def __str__(self) -> str:
        return "--reasoning-parser {}, --tool-call-parser {}".format(*self.names)

    @property
    def markers(self) -> list[str]:
        """Returns what the model itself writes around reasoning and calls."""
        reasoning = [] if self.reasoning is None else list(self.reasoning.tokens)
        return reasoning + ([] if self.tool_calls is None else list(self.tool_calls.markers))

    def special_ids(self, tokenizer: Tokenizer, *, with_tools: bool) -> frozenset[int]:
        """Special tokens that the answer's text has to show, so that its parts can be told apart."""
        shown = self if with_tools else ChatFormat(self.reasoning)
        return frozenset(i for marker in shown.markers if (i := tokenizer.token_id(marker)) is not None) & tokenizer.special_ids
