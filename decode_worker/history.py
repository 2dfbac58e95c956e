"""What a router may ask for again: the events of one attempt, from its reservation until its router has surely had them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import islice

from twostep.engine.types import TokenOutput
from twostep.rpc.v1 import decode_pb2, prefill_pb2
from twostep.worker.requests import fill_token, token_to_proto

AttemptId = tuple[str, int]


class History:
    """The last `max_tokens` tokens, and the events that come once. Tokens are kept as they travel: about 50 bytes each, and 12 more for
    each logprob asked for."""

    def __init__(self, attempt: AttemptId, *, max_tokens: int) -> None:
        self.attempt = attempt
        self.committed: decode_pb2.Committed | None = None
        # In place of it, of a prompt computed here.
        self.first_token: prefill_pb2.FirstToken | None = None
        self.failed: decode_pb2.DecodeFailed | None = None
        self.ended_at: float | None = None
        # Of consecutive positions, which end before `_next_position`.
        self._tokens: deque[bytes] = deque(maxlen=max_tokens)
        self._next_position: int | None = None
        self._full = False

    def begin(self, token: TokenOutput, event: decode_pb2.DecodeEvent, *, cached_tokens: int, queue_s: float, prefill_s: float) -> None:
        """The first token of a prompt computed here. Fills the empty `event` with what the router is told."""
        assert self._next_position is None, "the first token comes first"
        self.first_token = prefill_pb2.FirstToken(
            token=token_to_proto(token), cached_tokens=cached_tokens, queue_s=queue_s, prefill_s=prefill_s
        )
        self._next_position = token.position + 1
        event.request_id, event.attempt = self.attempt
        event.first_token.CopyFrom(self.first_token)

    def add(self, token: TokenOutput, event: decode_pb2.DecodeEvent) -> None:
        """Fills the empty `event` with what the router is told."""
        assert self._next_position in (None, token.position), "a sequence's tokens come in order"
        event.request_id, event.attempt = self.attempt
        message = event.token
        fill_token(message, token)
        self._full = self._full or len(self._tokens) == self._tokens.maxlen
        self._tokens.append(message.SerializeToString())
        self._next_position = token.position + 1

    def end(self) -> None:
        """Nothing follows."""
        self.ended_at = time.monotonic()

    def event(self) -> decode_pb2.DecodeEvent:
        return decode_pb2.DecodeEvent(request_id=self.attempt[0], attempt=self.attempt[1])

    def committed_event(self) -> decode_pb2.DecodeEvent:
        assert self.committed is not None
        event = self.event()
        event.committed.CopyFrom(self.committed)
        return event

    def failed_event(self) -> decode_pb2.DecodeEvent:
        assert self.failed is not None
        event = self.event()
        event.failed.CopyFrom(self.failed)
        return event

    @property
    def _first_position(self) -> int:
        return 0 if self._next_position is None else self._next_position - len(self._tokens)

    def reaches(self, next_position: int) -> bool:
        """Whether everything from `next_position` on is still here."""
        return not self._full or next_position >= self._first_position

    def since(self, position: decode_pb2.StreamPosition) -> Iterator[decode_pb2.DecodeEvent]:
        """What a router that has got so far has missed, in order. Nothing is to be added meanwhile."""
        assert self.reaches(position.next_position)
        if self.committed is not None and not position.committed:
            yield self.committed_event()
        if self.first_token is not None and position.next_position <= self.first_token.token.position:
            event = self.event()
            event.first_token.CopyFrom(self.first_token)
            yield event
        for token in islice(self._tokens, max(0, position.next_position - self._first_position), None):
            event = self.event()
            event.token.CopyFrom(prefill_pb2.Token.FromString(token))
            yield event
        if self.failed is not None:
            yield self.failed_event()


class Replay:
    """One attempt's way from where its router has got to the end of its history, some events at a time."""

    def __init__(self, history: History, position: decode_pb2.StreamPosition) -> None:
        self.history = history
        self._position = decode_pb2.StreamPosition()
        self._position.CopyFrom(position)
        self._failure_told = False

    @property
    def lost(self) -> bool:
        """What comes next is not kept any more."""
        return not self.history.reaches(self._position.next_position)

    @property
    def over(self) -> bool:
        """There is no more for now."""
        return self._failure_told or (not self.lost and next(self.history.since(self._position), None) is None)

    def take(self, limit: int) -> list[decode_pb2.DecodeEvent]:
        """The next ones, at most so many."""
        events = [] if self._failure_told else list(islice(self.history.since(self._position), limit))
        for event in events:
            if event.HasField("committed"):
                self._position.committed = True
            elif event.HasField("failed"):
                self._failure_told = True
            else:
                token = event.token if event.HasField("token") else event.first_token.token
                self._position.next_position = token.position + 1
        return events


def not_here(attempt: AttemptId) -> decode_pb2.DecodeEvent:
    """For a router that asks after what has no history."""
    failed = decode_pb2.DecodeFailed(
        code="NOT_FOUND", message="it is not here: the worker has restarted, or has dropped it because its router was away", retryable=True
    )
    return decode_pb2.DecodeEvent(request_id=attempt[0], attempt=attempt[1], failed=failed)
