"""Shares the event loop among callers: in one turn of the loop, the answers of one caller do so much work at most.

A step of a decode worker brings tokens to hundreds of answers at once, and each wakes its call. Those of one caller beyond its share go on
in the next turns, in their order; between two turns everybody else has one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque

# Work is counted in numbers that are written. A token's text is worth several of them.
_OF_A_TURN = 512
_OF_A_TOKEN = 8


def cost_of(num_tokens: int, num_logprobs: int) -> int:
    """Returns the work of a piece, with so many log probabilities for each of its tokens."""
    return num_tokens * (_OF_A_TOKEN + num_logprobs)


class LoopShare:
    """Belongs to one event loop."""

    def __init__(self, of_a_turn: int = _OF_A_TURN) -> None:
        self._of_a_turn = of_a_turn
        self._used: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        self._is_due = False

    async def take(self, caller: str, cost: int) -> None:
        """Returns at once while the caller has some of its share left in this turn, else in a later one."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        if caller not in self._waiting and self._used[caller] < self._of_a_turn:
            self._used[caller] += cost
            return
        its_turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append((cost, its_turn))
        await its_turn

    def _next_turn(self) -> None:
        self._used.clear()
        for caller, waiting in list(self._waiting.items()):
            while waiting and self._used[caller] < self._of_a_turn:
                cost, its_turn = waiting.popleft()
                if not its_turn.done():
                    its_turn.set_result(None)
                    self._used[caller] += cost
            if not waiting:
                del self._waiting[caller]
        self._is_due = bool(self._used)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._next_turn)
