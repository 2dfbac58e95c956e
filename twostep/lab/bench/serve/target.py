"""The interface between a load generator and the server it loads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from twostep.lab.bench.serve.record import RequestRecord
from twostep.lab.bench.serve.workloads import SessionTurn

Clock = Callable[[], float]  # seconds since the run's start


class RequestFailed(Exception):
    """A request was not answered, or not to its end. Few kinds: they are counted."""

    def __init__(self, kind: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.retry_after_s = kind, message, retry_after_s


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """An answer, if the target was to keep it: the next turn's prompt has it."""

    token_ids: array[int]
    text: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn and the answer to it."""

    turn: SessionTurn
    answer: ReceivedAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModel:
    """The model that a target serves."""

    model: str
    max_model_len: int  # 0: it does not tell
    alphabet: Sequence[int]  # ids that prompts may be made of


class LoadTarget(Protocol):
    """Speaks one protocol. Any number of requests at once, on one event loop. Nothing is ever repeated: what fails is counted."""

    async def open(self) -> TargetModel:
        """Connects. Raises TwostepError, saying what to do, if no server answers."""
        ...

    def prepare(self, history: Sequence[Exchange], turn: SessionTurn, run: str) -> Any:
        """Everything about a request that can be done before its time. Requests of different `run` share no cached prefixes, where
        the protocol has a way to say so."""
        ...

    def num_prompt_tokens(self, history: Sequence[Exchange], turn: SessionTurn) -> int:
        """Counts the tokens of the prompt that `prepare` makes, as far as they can be known here."""
        ...

    async def ask(self, prepared: Any, record: RequestRecord, clock: Clock, *, keep: bool) -> ReceivedAnswer | None:
        """Sends it and notes every message's arrival in the record, and what the server says of itself at the end. None unless `keep`.
        Raises RequestFailed."""
        ...

    async def tokenize(self, text: str) -> array[int]:
        """A text's token ids. Raises TwostepError if no tokenizer can be asked."""
        ...

    async def close(self) -> None: ...
