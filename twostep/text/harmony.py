"""Harmony, the form in which gpt-oss writes: an answer is a row of messages, each with a header that says what it is.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>

    analysis                    reasoning
    final, commentary           text; commentary comes before calls
    commentary to=functions.f   a call: it leaves here as `<|call|>f<|message|>{"x": 1}<|end|>`, whatever stands where in its header

(OpenAI harmony response format, developers.openai.com/cookbook/articles/openai-harmony.) The prompt ends behind `<|start|>assistant`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from twostep.text.reasoning import Begun, SplitText

START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:/-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
# What ends a message. A model that leaves the end out and begins another is understood.
_ENDS = (END, CALL, "<|return|>", START)
_END = re.compile("|".join(map(re.escape, _ENDS)))
_BEGINNINGS = frozenset(end[:n] for end in _ENDS for n in range(1, len(end)))
# What a header begins with.
_SIGNS = (START, CHANNEL, "to=")
# A header is short: what is longer is text of a model that does not write harmony.
_MAX_HEADER = 512


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """Stands in a model's ChatFormat where others have a ReasoningFormat."""

    tokens = (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN)

    def begun_in(self, prompt: str, continued: str | None = None) -> Begun:
        """See ReasoningFormat."""
        return Begun.NOT_YET if continued is None else Begun.OVER

    def splitter(self, begun: Begun) -> HarmonySplitter:
        return HarmonySplitter(in_final=begun is Begun.OVER)


class HarmonySplitter:
    """Watches one answer, as ReasoningSplitter does; not thread-safe. The outcome does not depend on how the text was cut into pieces."""

    # Reasoning may come again after any message.
    settled = False

    def __init__(self, *, in_final: bool) -> None:
        """`in_final`: the answer goes on with a message of the final channel."""
        self.opened = False
        self._header: str | None = None if in_final else ""  # None: the message's body has begun
        self._kind = "text"
        self._held = ""

    @property
    def thinking(self) -> bool:
        """The answer's text has not begun."""
        return self._header is not None or self._kind == "reasoning"

    def push(self, text: str) -> SplitText:
        reasoning, content = "", ""
        text, self._held = self._held + text, ""
        while text:
            if self._header is not None:
                text, call = self._read_header(text)
                content += call
                continue
            found = _END.search(text)
            keep = 0 if found else next((n for n in range(min(len(text), 10), 0, -1) if text[-n:] in _BEGINNINGS), 0)
            body = text[: found.start()] if found else text[: len(text) - keep]
            if self._kind == "reasoning":
                reasoning += body
            else:
                content += body
            if found is None:
                self._held = text[len(text) - keep :]
                break
            content += END if self._kind == "call" else ""
            self._header, self._kind = START if found[0] == START else "", "text"
            text = text[found.end() :]
        return SplitText(reasoning, content)

    def finish(self) -> SplitText:
        """The answer is over: what was held back was no marker. A header that was cut off says nothing."""
        held, self._held = self._held, ""
        header, self._header = self._header, None
        if header and not any(sign in header for sign in _SIGNS):
            held = header
        return SplitText(held, "") if self._kind == "reasoning" else SplitText("", held)

    def _read_header(self, text: str) -> tuple[str, str]:
        """Returns what follows the header, and what a call's becomes. What cannot be one is text."""
        assert self._header is not None
        whole = self._header + text
        beginning = whole.lstrip()
        at = whole.find(MESSAGE)
        if not any(beginning.startswith(sign) or sign.startswith(beginning) for sign in _SIGNS) or at > _MAX_HEADER:
            self._header, self._kind = None, "text"
            return whole, ""
        if at < 0:
            is_text = len(whole) > _MAX_HEADER + len(MESSAGE)
            self._header, self._kind = None if is_text else whole, "text"
            return whole if is_text else "", ""
        header, self._header = whole[:at], None
        rest = whole[at + len(MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._kind = "call"
            return rest, f"{CALL}{recipient[1]}{MESSAGE}"
        self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        self.opened = self.opened or self._kind == "reasoning"
        return rest, ""
