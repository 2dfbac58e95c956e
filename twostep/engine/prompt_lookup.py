"""A Proposer that needs no model: what followed the last tokens where they came before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twostep.engine.proposer import Proposer
from twostep.settings.speculative import SpeculativeConfig


class PromptLookup(Proposer):
    """A Proposer that looks the last tokens up in what came before, and proposes what followed there: the longest run of equal tokens wins,
    then the latest (Saxena: Prompt lookup decoding, 2023)."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._known: dict[str, _Tokens] = {}

    def propose(self, seq_id: str, tokens: Sequence[int], most: int) -> Sequence[int]:
        known = self._known.get(seq_id)
        if known is None:
            known = self._known[seq_id] = _Tokens()
        known.extend(tokens)
        return look_up(known.array, most, shortest=self._config.prompt_lookup_min, longest=self._config.prompt_lookup_max)

    def forget(self, seq_id: str) -> None:
        self._known.pop(seq_id, None)


def look_up(tokens: npt.NDArray[np.int32], most: int, *, shortest: int, longest: int) -> list[int]:
    """Returns what followed the last `shortest` to `longest` of the tokens [N] where they came before; none: they did not."""
    count = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    length = 1
    while length < longest and len(ends):
        before = ends[ends >= length] - length
        longer = before[tokens[before] == tokens[count - 1 - length]] + length
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < shortest or not len(ends):
        return []
    # Close to the end little follows: then the first one.
    far = ends[ends + 1 + most <= count]
    start = int(far[-1] if len(far) else ends[0]) + 1
    return [int(token) for token in tokens[start : start + most]]


class _Tokens:
    """A sequence's tokens as an array that grows."""

    def __init__(self) -> None:
        self._buffer = np.empty(256, np.int32)
        self._count = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """`tokens`: all of them, those known already among them."""
        count = len(tokens)
        if count > len(self._buffer):
            larger = np.empty(max(count, 2 * len(self._buffer)), np.int32)
            larger[: self._count] = self._buffer[: self._count]
            self._buffer = larger
        self._buffer[self._count : count] = tokens[self._count : count]
        self._count = count

    @property
    def array(self) -> npt.NDArray[np.int32]:
        return self._buffer[: self._count]
