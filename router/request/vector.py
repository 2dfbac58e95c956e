"""A prompt that is embedded ends in one vector, or in the reason why there is none."""

from __future__ import annotations

import asyncio
import sys
from array import array

from twostep.errors import InternalError, TwostepError
from twostep.rpc.v1 import prefill_pb2


class VectorOutput:
    """Stands where an answer's Output does: nothing of it is there before all of it is, so that an attempt always begins anew."""

    next_position = 0

    def __init__(self) -> None:
        self._states: asyncio.Future[prefill_pb2.PooledStates] = asyncio.get_running_loop().create_future()

    def push(self, states: prefill_pb2.PooledStates) -> None:
        if not self._states.done():
            self._states.set_result(states)

    def end(self) -> None:
        """Notes that nothing more will come."""
        self.fail(InternalError("the request ended without its vector; look in the router's log"))

    def fail(self, error: TwostepError) -> None:
        if not self._states.done():
            self._states.set_exception(error)

    async def take(self) -> prefill_pb2.PooledStates:
        """Waits for the vector. Raises what `fail` was given."""
        return await self._states


def floats_of(values: bytes) -> list[float]:
    """Returns the numbers of a vector of little-endian float32."""
    found = array("f", values)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()
