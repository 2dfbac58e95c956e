"""An engine learns from its steps with drafts: whether to draft at all, what they take longer than foretold, and what they bring."""

from __future__ import annotations

from dataclasses import dataclass

# What a step with drafts came to counts for so much less with each step; without any, so many count as known.
_FORGETTING_GAIN, _PRIOR_STEPS = 0.98, 16
# Steps of one kind in a row, with drafts or without, at first, and twice as many each time that the other kind was no better, up to a
# bound; of the other kind, to see what they give: more of those with drafts, which are not all alike; and of those that begin such a run,
# so many were planned before. What gives so much more is better.
_FIRST_RUN, _LONGEST_RUN, _PLAIN_TRIAL, _LOOKING_TRIAL, _IN_FLIGHT = 50, 3200, 10, 20, 3
_CLEARLY = 1.02
# How much one step teaches of how long steps take, and one without drafts of that those with them take no longer; and how many times
# longer than was known one step may seem to take.
_LEARNING, _UNLEARNING, _MOST_SLOWER = 1 / 16, 1 / 512, 2.0


class DraftGain:
    """Learns how many tokens drafts give a sequence in the time that a step takes without them: what they are worth to whoever reckons with
    steps. It stays as it is while nothing decodes."""

    def __init__(self) -> None:
        self._tokens = self._steps = float(_PRIOR_STEPS)

    @property
    def tokens_per_step(self) -> float:
        """Returns 1 where drafts bring nothing, and never less."""
        return max(1.0, self._tokens / self._steps)

    def learn(self, num_tokens: float, longer: float) -> None:
        """Takes a step that gave each of its sequences so many tokens, on average, and took `longer` times as long as without drafts."""
        self._tokens = _FORGETTING_GAIN * self._tokens + num_tokens
        self._steps = _FORGETTING_GAIN * self._steps + longer


class Slowness:
    """Remembers how many times longer steps with drafts take than is foretold, as against steps without: whatever costs time and is not
    foretold ends drafting by itself. Apart for steps of about as many sequences. While none is drafted it is slowly forgotten, so
    that it is tried again."""

    def __init__(self) -> None:
        # By the power of 2 of sequences: what steps without drafts took of what was foretold, and how many times that those with them did.
        self._shares: dict[int, tuple[float, float]] = {}

    def of(self, num_seqs: int) -> float:
        return max(1.0, self._shares.get(num_seqs.bit_length(), (1.0, 1.0))[1])

    def learn(self, num_seqs: int, seconds: float, foretold_s: float, *, drafted: bool) -> None:
        """A step of so many sequences came so long after the one before it."""
        if foretold_s <= 0.0 or seconds <= 0.0:
            return
        share, key = seconds / foretold_s, num_seqs.bit_length()
        without, slower = self._shares.get(key, (1.0, 1.0))
        # One step that took very long did so for other reasons.
        if drafted:
            slower += _LEARNING * (min(share / without, _MOST_SLOWER * slower) - slower)
        else:
            without += _LEARNING * (min(share, _MOST_SLOWER * without) - without)
            slower += _UNLEARNING * (1.0 - slower)
        self._shares[key] = without, slower


class Looking:
    """Chooses whether steps are drafted for at all, apart for steps of about as many sequences: as those that gave more tokens a second.
    What looking up takes the host is in no curve, and it is taken where nothing is drafted in the end, too. Behind each run of steps of one
    kind comes a short one of the other, to see."""

    def __init__(self) -> None:
        # By the power of 2 of sequences.
        self._runs: dict[int, _Run] = {}

    def looks(self, num_seqs: int) -> bool:
        run = self._runs.get(num_seqs.bit_length())
        return run is None or run.looks

    def learn(self, num_seqs: int, num_tokens: int, seconds: float, foretold_s: float) -> None:
        """A step of so many sequences gave so many tokens, so long after the one before it; without drafts it was to take `foretold_s`."""
        if seconds > 0.0 and foretold_s > 0.0:
            run = self._runs.setdefault(num_seqs.bit_length(), _Run())
            run.learn(num_tokens / num_seqs * foretold_s / seconds)


@dataclass(slots=True)
class _Run:
    """A run of steps of one kind. Gains are tokens of a sequence in the time that a step is foretold to take."""

    looks: bool = True
    trial: bool = False
    # Of a run that is none.
    length: int = _FIRST_RUN
    left: int = _FIRST_RUN
    settling: int = 0
    total: float = 0.0
    seen: int = 0
    # What the run before a trial came to.
    before: float = 0.0

    def learn(self, gain: float) -> None:
        self.left -= 1
        # What was planned before the last change is still on its way.
        if self.settling:
            self.settling -= 1
        else:
            self.total += gain
            self.seen += 1
        if self.left > 0:
            return
        mean, better = self.total / self.seen, False
        if self.trial:
            better = mean > _CLEARLY * self.before
            self.length = _FIRST_RUN if better else min(2 * self.length, _LONGEST_RUN)
        else:
            self.before = mean
        looks = self.looks if better else not self.looks
        self.trial = not self.trial
        self.left = self.length if not self.trial else _LOOKING_TRIAL if looks else _PLAIN_TRIAL
        self.settling = _IN_FLIGHT if looks != self.looks else 0
        self.looks, self.total, self.seen = looks, 0.0, 0
