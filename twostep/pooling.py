"""How the last hidden states of a prompt become one vector: its embedding."""

from __future__ import annotations

from enum import Enum


class Pooling(Enum):
    """Which tokens' states, after the model's last norm, the vector is made of."""

    LAST = "last"  # that of the last token
    MEAN = "mean"  # the mean over all tokens, each of which is computed: no cached prefix helps
