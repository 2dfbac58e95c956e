"""What a router may ask for again: the events of one attempt, from its reservation until the router has surely had them."""

from __future__ import annotations

import time
from collections import deque

from twostep.engine.types import TokenOutput
from twostep.rpc.v1 import decode_pb2
from twostep.worker.requests import token_to_proto

AttemptId = tuple[str, int]


class History:
    """The last `max_tokens` tokens, and the events that come once. About 150 bytes a token, 100 more for each logprob asked for."""

    def __init__(self, attempt: AttemptId, *, max_tokens: int) -> None:
        self.attempt = attempt
        self.committed: decode_pb2.Committed | None = None
        self.failed: decode_pb2.DecodeFailed | None = None
        self.ended_at: float | None = None
        self._tokens: deque[TokenOutput] = deque(maxlen=max_tokens)
        # Every token before it has been let go.
        self._floor = 0

    def add(self, token: TokenOutput) -> None:
        if len(self._tokens) == self._tokens.maxlen:
            self._floor = self._tokens[0].position + 1
        self._tokens.append(token)

    def end(self) -> None:
        """Nothing follows."""
        self.ended_at = time.monotonic()

    def event(self) -> decode_pb2.DecodeEvent:
        return decode_pb2.DecodeEvent(request_id=self.attempt[0], attempt=self.attempt[1])

    def token_event(self, token: TokenOutput) -> decode_pb2.DecodeEvent:
        event = self.event()
        event.token.CopyFrom(token_to_proto(token))
        return event

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

    def reaches(self, next_position: int) -> bool:
        """Whether everything from `next_position` on is still here."""
        return next_position >= self._floor

    def since(self, position: decode_pb2.StreamPosition) -> list[decode_pb2.DecodeEvent]:
        """What a router that has got so far has missed, in order."""
        assert self.reaches(position.next_position)
        events = []
        if self.committed is not None and not position.committed:
            events.append(self.committed_event())
        events += [self.token_event(token) for token in self._tokens if token.position >= position.next_position]
        if self.failed is not None:
            events.append(self.failed_event())
        return events
