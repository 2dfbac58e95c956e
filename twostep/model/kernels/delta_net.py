"""A gated delta net (families/gated_delta_net.py) besides its products: its sizes, its weights, and where the numbers of its state lie.

projected, a row   │ q k v z │ q k v z │ … │ b a │ b a │ …      by key head, which has the v, z, b and a of its value heads
channels           │ q of all key heads │ k of all │ v of all value heads │
state, in bytes    │ of a key head │ of the next │ …      in the pool by columns (step/state_columns.py), of as many key heads each
of a key head      │ recurrent: float32 [value heads, key_dim, value_dim] │ inputs: [its channels of q, k and v, kernel - 1] │
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from twostep.checkpoint.state_sizes import StateSizes
from twostep.model.step.state_columns import StateColumns

# Tokens of a prompt that kernels take at once.
CHUNK = 64
# Queries and keys are brought to a length of 1, by a norm with this epsilon.
UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaDims(StateSizes):
    """Adds to the sizes what kernels ask for.

    columns  of the pool's blocks, each of which has the states of as many key heads
    """

    columns: StateColumns = field(default_factory=StateColumns)

    @property
    def heads_per_column(self) -> int:
        return self.num_key_heads // self.columns.num_own

    def column_bytes(self, item_bytes: int) -> int:
        """Returns the bytes of a sequence and layer in a column."""
        return self.heads_per_column * self.head_bytes(item_bytes)

    def row_bytes(self, item_bytes: int) -> int:
        """Returns the bytes of a token that a layer has in memory at once on a GPU, at most."""
        numbers = self.num_inputs + self.num_channels + 2 * self.num_value_heads * (1 + self.value_dim)
        return numbers * item_bytes + self.num_value_heads * 2 * CHUNK * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """One layer's.

    conv               [num_channels, kernel], the token's own input last
    dt_bias, log_rate  float32 [num_value_heads]
    norm               [value_dim], of an RMS norm with `eps`
    """

    dims: DeltaDims
    conv: torch.Tensor
    dt_bias: torch.Tensor
    log_rate: torch.Tensor
    norm: torch.Tensor
    eps: float
