"""What a gated delta net (families/gated_delta_net.py) needs besides its products: its numbers, its weights, and where its state's lie.

projected, a row   │ q k v z │ q k v z │ … │ b a │ b a │ …      by key head, which has the v, z, b and a of its value heads
state, in bytes    │ recurrent: float32 [value head, key_dim, value_dim] │ inputs: [channel, kernel - 1] │
channels           │ q of all key heads │ k of all │ v of all value heads │
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Tokens of a prompt that kernels take at once.
CHUNK = 64
# Of the norm that queries and keys are brought to a length of 1 by.
UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaDims:
    """Numbers of each part; `kernel`: a channel's inputs that the convolution sees, the token's own included."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def share(self) -> int:
        """Value heads of each key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def num_inputs(self) -> int:
        """Numbers of q, k, v and z of a token."""
        return self.num_channels + self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Numbers of q, k and v of a token, which are convolved."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def recurrent_numbers(self) -> int:
        """float32 of a sequence and layer that the delta rule keeps."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def conv_numbers(self) -> int:
        """Inputs of a sequence and layer that the convolution keeps, in the model's dtype."""
        return self.num_channels * (self.kernel - 1)

    def row_bytes(self, item_bytes: int) -> int:
        """Bytes of a token that a layer has in memory at once on a GPU, at most."""
        numbers = self.num_inputs + self.num_channels + 2 * self.num_value_heads * (1 + self.value_dim)
        return numbers * item_bytes + self.num_value_heads * 2 * CHUNK * 4

    def state_bytes(self, item_bytes: int) -> int:
        """Bytes of a sequence and layer, in whole words of 16."""
        return -(-(4 * self.recurrent_numbers + item_bytes * self.conv_numbers) // 16) * 16


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
