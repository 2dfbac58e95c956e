"""Timeouts for answers, after which the peer that owes one is taken for lost: a peer that answers at once gets the least, one that was slow
lately twice what it took. A fixed time would be too long for a dead peer, or lose every hand-over of a busy machine.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

# Names are never used twice, so that old ones pile up.
_MAX_PEERS = 1024
_TIMES = 2.0
# Half of what was slow once is forgotten in so long: after a real fault no peer is waited for much longer than before it.
_HALF_LIFE_S = 5.0


@dataclass(slots=True)
class _Peer:
    num_answers: int = 0
    slowest_s: float = 0.0
    at: float = 0.0

    def slowest_at(self, now: float) -> float:
        return self.slowest_s * math.exp2((self.at - now) / _HALF_LIFE_S)


class AnswerTimeouts:
    """Timeouts for one kind of answer, by peer; in seconds of a monotonic clock, which the caller reads."""

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def timeout_s(self, peer: str, now: float) -> float:
        """Returns how long its next answer may take."""
        known = self._peers.get(peer)
        return self._least_s if known is None else min(self._most_s, max(self._least_s, _TIMES * known.slowest_at(now)))

    def num_answers(self, peer: str) -> int:
        """Returns a number that grows while the peer answers: the same twice means that nothing came in between."""
        known = self._peers.get(peer)
        return 0 if known is None else known.num_answers

    def answered(self, peer: str, seconds: float, now: float) -> None:
        known = self._peers.setdefault(peer, _Peer())
        self._peers.move_to_end(peer)
        known.num_answers += 1
        known.slowest_s, known.at = max(seconds, known.slowest_at(now)), now
        if len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)
