"""The bounded buffer between shared token streams and one client's call.

Whoever has tokens pushes and never waits; the client's call takes what is there. A client that falls `max_buffered` tokens
behind, or takes nothing for too long, is cut: its own call ends, and nobody else's is held up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from twostep.errors import ResourceExhausted, TwostepError
from twostep.rpc.v1 import prefill_pb2


class Batch(NamedTuple):
    """Tokens in order, possibly none; `last`: nothing follows them."""

    tokens: Sequence[prefill_pb2.Token]
    last: bool


class Output:
    """One request's tokens over all attempts. `token_ids` are all that ever came, in order, after those of `resumed`, which the client has
    already; `on_cut` must stop the client's call."""

    def __init__(self, *, max_buffered: int, on_cut: Callable[[], object], resumed: Sequence[int] = ()) -> None:
        self.token_ids: list[int] = list(resumed)
        self.cut: ResourceExhausted | None = None
        self._max_buffered = max_buffered
        self._on_cut = on_cut
        self._tokens: list[prefill_pb2.Token] = []
        self._ended = False
        self._error: TwostepError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._busy_since: float | None = None

    @property
    def next_position(self) -> int:
        return len(self.token_ids)

    def push(self, token: prefill_pb2.Token) -> None:
        """The token at `next_position`. After an end, a failure or a cut it is dropped."""
        assert token.position == len(self.token_ids), "tokens are pushed in order, each once"
        if self._ended or self.cut is not None:
            return
        self.token_ids.append(token.token_id)
        self._tokens.append(token)
        if len(self._tokens) > self._max_buffered:
            self._cut_off(f"the client is {len(self._tokens)} tokens behind; read the stream faster, or raise --max-buffered-tokens")
        else:
            self._wake()

    def end(self) -> None:
        """Nothing more will come."""
        self._ended = True
        self._wake()

    def fail(self, error: TwostepError) -> None:
        """The client gets what is buffered, then the error."""
        if not self._ended:
            self._error = error
            self.end()

    async def take(self) -> Batch:
        """Waits for tokens or the end, and takes all that is there. Raises what `fail` was given once all tokens are taken."""
        self._busy_since = None
        if not self._tokens and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        tokens, self._tokens = self._tokens, []
        if self._error is not None and not tokens:
            raise self._error
        self._busy_since = time.monotonic()
        return Batch(tokens, last=self._ended and self._error is None)

    def cut_if_stuck(self, timeout_s: float) -> None:
        """Cuts a client that has not come back for more in `timeout_s`, though there is nothing else to wait for."""
        if self.cut is None and self._busy_since is not None and time.monotonic() - self._busy_since > timeout_s:
            self._cut_off(f"the client took nothing for {timeout_s:g} s; read the stream faster")

    def _cut_off(self, why: str) -> None:
        self.cut = ResourceExhausted(why)
        self._tokens.clear()
        self._on_cut()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
