"""Defines the input of a hold-back hook, and what it may answer: the router's --hold-back MODULE:FUNCTION names one.

    from twostep.hold_back import Held, Replace, Stop, Verdict

    async def check(held: Held) -> Verdict:
        if "the launch code" in held.unsent:
            return Stop("[This cannot be told.]")
        return None

The hook is called once for each piece of text, in order, never twice at once for the same answer, and before the client gets the piece.
The router keeps back the last --hold-back-chars characters that it allowed, so that the hook can still decide about them when it sees what
follows. A hook that is not `async` is called in a thread. An exception, or an answer later than --hold-back-timeout, counts as no answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from twostep.request_class import RequestClass

ClassName = Literal["interactive", "standard", "batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRequest:
    """Whose answer it is. `tenant` and `key_id` are empty where nobody is asked for a key."""

    request_id: str
    model: str
    tenant: str
    key_id: str
    request_class: ClassName


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A new `piece` of an answer's text, or of its reasoning: each has a text of its own. `sent` went to the client before; `waiting` was
    allowed, and the client has not got it. `last`: nothing follows; the piece may be empty then."""

    request: HeldRequest
    kind: Literal["text", "reasoning"]
    sent: str
    waiting: str
    piece: str
    last: bool

    @property
    def unsent(self) -> str:
        """Returns the text that the verdict is about."""
        return self.waiting + self.piece

    @property
    def whole(self) -> str:
        return self.sent + self.waiting + self.piece


@dataclass(frozen=True, slots=True)
class Allow:
    """It may go, as soon as so much stands behind it that it need not be kept. None says the same."""


@dataclass(frozen=True, slots=True)
class Replace:
    """`text` takes the place of all that is unsent. From there on the client gets no token ids and no logprobs: they would tell what it
    replaces."""

    text: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The answer ends here, with the finish reason `content_filter`. What is unsent is never sent; `text`, if any, is its last piece."""

    text: str = ""


def class_name(request_class: RequestClass) -> ClassName:
    names: dict[RequestClass, ClassName] = {
        RequestClass.INTERACTIVE: "interactive",
        RequestClass.STANDARD: "standard",
        RequestClass.BATCH: "batch",
    }
    return names[request_class]


Verdict = Allow | Replace | Stop | None
