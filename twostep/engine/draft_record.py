"""Records remember how often the proposals of a sequence, and of all, were right of late."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

# What a sequence's last drafts came to counts for so much less with each of its steps.
_FORGETTING = 0.8
# What drafts of all sequences came to counts for so much less with each of them: that is what is expected of one that has none yet.
_FORGETTING_ALL = 0.99
# Before anything is known: one draft, of which half were right.
_PRIOR_RATE = 0.5


@dataclass(slots=True)
class CommonRate:
    """Remembers how often the proposals of all sequences were right of late."""

    right: float = _PRIOR_RATE
    wrong: float = 1.0 - _PRIOR_RATE

    @property
    def rate(self) -> float:
        return self.right / (self.right + self.wrong)

    def learn(self, num_right: int, *, failed: bool) -> None:
        self.right = _FORGETTING_ALL * self.right + num_right
        self.wrong = _FORGETTING_ALL * self.wrong + failed


class SequenceRate:
    """Remembers how often proposals of one sequence were right of late."""

    def __init__(self, common: CommonRate) -> None:
        self._common = common
        self._right = self._wrong = 0.0
        # What is known of all counts as one draft of its own, and then as less.
        self._weight = 1.0

    @property
    def rate(self) -> float:
        """Returns the probability that a drafted token is right, those before it being so."""
        return (self._right + self._weight * self._common.rate) / (self._right + self._wrong + self._weight)

    def learn(self, proposed: Sequence[int], came: Sequence[int]) -> None:
        """Compares what was proposed with what came in its place, if anything was, and did."""
        num_right = num_seen = 0
        for draft, token in zip(proposed, came, strict=False):
            num_seen += 1
            if draft != token:
                break
            num_right += 1
        if num_seen:
            self._right = _FORGETTING * self._right + num_right
            self._wrong = _FORGETTING * self._wrong + (num_right < num_seen)
            self._weight *= _FORGETTING
            self._common.learn(num_right, failed=num_right < num_seen)


class DraftRecord:
    """Remembers what was proposed last in a sequence, and how often its proposals were right, also those that no step computed: learning
    costs no row.

        tokens   . . . . │ a b c d e f g h      proposed after those that are known
        came     . . . . │ a b x                of the step in flight, which has a b c as drafts
        next     . . . .         │ d e f        drafts of the step that is planned meanwhile: as if x were a word in place of another
    """

    def __init__(self, common: CommonRate | None = None, common_again: CommonRate | None = None, most: int = sys.maxsize) -> None:
        """`most`: tokens drafted in one step."""
        self._right = SequenceRate(common or CommonRate())
        self._again = SequenceRate(common_again or CommonRate())
        self._most = most
        self._proposed: Sequence[int] = ()
        # What was to come behind a token that another one came for.
        self._behind_wrong: Sequence[int] = ()
        self._after = 0

    @property
    def rate(self) -> float:
        """Returns the probability that a drafted token is right, those before it being so."""
        return self._right.rate

    @property
    def again_rate(self) -> float:
        """Returns the probability that the first one behind a wrong one is right."""
        return self._again.rate

    def learn(self, tokens: Sequence[int]) -> None:
        """Compares what was proposed last with what came since, if anything did."""
        proposed, num_came = self._proposed, len(tokens) - self._after
        if not num_came:
            return
        # At first, a prompt came.
        came = tokens[self._after : self._after + max(1, len(proposed))]
        self._right.learn(proposed[: self._most], came)
        self._again.learn(self._behind_wrong, came)
        right = all(draft == token for draft, token in zip(proposed, came, strict=False))
        self._behind_wrong = () if right else proposed[num_came : num_came + 1]
        self._proposed = ()

    def propose(self, proposed: Sequence[int], tokens: Sequence[int]) -> None:
        """`learn` has seen these tokens."""
        self._proposed, self._after = proposed, len(tokens)

    def is_after(self, tokens: Sequence[int]) -> bool:
        """Returns whether it was these after which something was proposed last."""
        return self._after == len(tokens)

    def proposed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Returns what was proposed after these."""
        return self._proposed if self._after == len(tokens) else ()
