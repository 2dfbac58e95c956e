"""How the last hidden states of a prompt become one vector: its embedding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Pooling(Enum):
    """Which tokens' states, after the model's last norm, the vector is made of."""

    LAST = "last"  # that of the last token
    MEAN = "mean"  # the mean over all tokens, each of which is computed: no cached prefix helps


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What a request for an embedding asks of its vector: of which states it is made, how many of its first numbers are wanted (0: all),
    and whether it is brought to a length of 1 after that."""

    kind: Pooling = Pooling.LAST
    dimensions: int = 0
    normalize: bool = True
