"""The bounded buffer between shared token streams and one client's call.

The shared streams push tokens and never wait; the client's call takes what is there. A client that falls `max_buffered` tokens
behind, or takes nothing for too long, is cut: its own call ends, and no other one is held up. So is one whose tokens find no room in the
memory that its caller's answers may hold.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.request.memory_budget import Holding
from router.request.prompt_logprobs import PromptLogprobsBuffer
from twostep.errors import ResourceExhausted, TwostepError
from twostep.rpc.v1 import inference_pb2, prefill_pb2

# A token as it came keeps all of the message that it came in, with the tokens of a whole step. A client with more than so many waiting is
# behind, and what waits for it is packed.
_MAX_FRESH = 8
# Of tokens taken at a time: a piece of many, with their log probabilities, would take the event loop for long.
_MAX_TAKEN = 64
# What Python adds to a packed token.
_PACKED_BYTES = 41


class TokenBatch(NamedTuple):
    """Tokens in order, possibly none; `last`: nothing follows them. `prompt`: log probabilities of the prompt, before them."""

    tokens: Sequence[prefill_pb2.Token]
    last: bool
    prompt: Sequence[inference_pb2.PromptLogprobs] = ()


class Output:
    """One request's tokens over all attempts. `token_ids` are all that ever came, in order, after those of `resumed`, which the client has
    already; `on_cut` must stop the client's call."""

    def __init__(
        self,
        *,
        max_buffered: int,
        on_cut: Callable[[], object],
        holding: Holding,
        resumed: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`holding`: of this request alone; what is left in it at the end is its owner's to give back."""
        self._clock = clock
        self.token_ids: list[int] = list(resumed)
        self.cut: ResourceExhausted | None = None
        self._max_buffered = max_buffered
        self._max_fresh = min(_MAX_FRESH, max_buffered)
        self._on_cut = on_cut
        self._holding = holding
        # All that waits is in one of them: in the second as soon as it is too much for the first, until none waits any more.
        self._tokens: list[prefill_pb2.Token] = []
        self._packed: deque[bytes] = deque()
        self._prompt = PromptLogprobsBuffer(holding)
        self._ended = False
        self._error: TwostepError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._busy_since: float | None = None

    @property
    def next_position(self) -> int:
        return len(self.token_ids)

    @property
    def next_prompt_position(self) -> int:
        """The first token of the prompt whose log probabilities have not come."""
        return self._prompt.next_position

    def push_prompt(self, part: inference_pb2.PromptLogprobs) -> None:
        """Takes log probabilities of the prompt, before its first token; what has come is dropped."""
        if self._ended or self.cut is not None:
            return
        try:
            self._prompt.push(part)
        except ResourceExhausted as error:
            self._cut_off(error.message)
            return
        self._wake()

    def push(self, token: prefill_pb2.Token) -> None:
        """Takes the token at `next_position`. After an end, a failure or a cut it is dropped."""
        assert token.position == len(self.token_ids), "tokens are pushed in order, each once"
        if self._ended or self.cut is not None:
            return
        self.token_ids.append(token.token_id)
        if self._packed or len(self._tokens) >= self._max_fresh:
            self._pack(token)
        else:
            self._tokens.append(token)
        self._wake()

    def end(self) -> None:
        """Notes that nothing more will come."""
        self._ended = True
        self._wake()

    def fail(self, error: TwostepError) -> None:
        """Ends it with an error: the client gets what is buffered, then the error."""
        if not self._ended:
            self._error = error
            self.end()

    async def take(self) -> TokenBatch:
        """Waits for tokens or the end, and takes what is there, so many at most. Raises what `fail` was given once all tokens are taken."""
        self._busy_since = None
        if not self._tokens and not self._packed and not self._prompt and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        tokens, self._tokens = self._tokens or self._unpacked(), []
        prompt = self._prompt.take() if self._prompt else ()
        if self._error is not None and not tokens and not prompt:
            raise self._error
        self._busy_since = self._clock()
        return TokenBatch(tokens, self._ended and self._error is None and not self._packed, prompt)

    def cut_if_stuck(self, timeout_s: float) -> None:
        """Cuts a client that has not come back for more in `timeout_s`, though there is nothing else to wait for."""
        if self.cut is None and self._busy_since is not None and self._clock() - self._busy_since > timeout_s:
            self._cut_off(f"the client took nothing for {timeout_s:g} s; read the stream faster")

    def _pack(self, token: prefill_pb2.Token) -> None:
        waiting, self._tokens = [*self._tokens, token], []
        num_tokens = len(self._packed) + len(waiting)
        if num_tokens > self._max_buffered:
            self._cut_off(f"the client is {num_tokens} tokens behind; read the stream faster")
            return
        packed = [each.SerializeToString() for each in waiting]
        try:
            self._holding.add(sum(map(len, packed)) + _PACKED_BYTES * len(packed))
        except ResourceExhausted as error:
            self._cut_off(error.message)
            return
        self._packed += packed

    def _unpacked(self) -> list[prefill_pb2.Token]:
        packed = [self._packed.popleft() for _ in range(min(len(self._packed), _MAX_TAKEN))]
        if packed:
            self._holding.add(-sum(map(len, packed)) - _PACKED_BYTES * len(packed))
        return [prefill_pb2.Token.FromString(each) for each in packed]

    def _cut_off(self, why: str) -> None:
        self.cut = ResourceExhausted(why)
        self._tokens.clear()
        self._packed.clear()
        self._on_cut()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
