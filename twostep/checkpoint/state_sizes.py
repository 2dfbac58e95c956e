"""The sizes of the states that gated delta nets keep of a sequence in place of keys and values. Torch-free: plans ask for them before
anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

_WORD_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Holds the sizes of a layer with a gated delta net.

    kernel  a channel's inputs that the convolution sees, the token's own included
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def num_inputs(self) -> int:
        """Returns the numbers of q, k, v and z of a token."""
        return self.num_channels + self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Returns the numbers of q, k and v of a token, which are convolved."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def share(self) -> int:
        """Returns the value heads of each key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def recurrent_numbers(self) -> int:
        """Returns how many float32 of a sequence, layer and key head the delta rule keeps."""
        return self.share * self.key_dim * self.value_dim

    @property
    def conv_numbers(self) -> int:
        """Returns how many inputs of a sequence, layer and key head the convolution keeps, in the model's dtype."""
        return self.num_channels // self.num_key_heads * (self.kernel - 1)

    def head_bytes(self, item_bytes: int) -> int:
        """Returns the bytes of a sequence, layer and key head, in whole words of 16."""
        return -(-(4 * self.recurrent_numbers + item_bytes * self.conv_numbers) // _WORD_BYTES) * _WORD_BYTES

    def state_bytes(self, item_bytes: int) -> int:
        """Returns the bytes of a sequence and layer."""
        return self.num_key_heads * self.head_bytes(item_bytes)
