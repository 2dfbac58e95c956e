"""The experts of one layer on GPUs: which kernels multiply, and with which tiles.

    tokens            1 … 2                    more
    kernel            rows of the weight       tiles of pairs of one expert, as many pairs as experts have on average or a few more:
                      in registers             while these are few, every weight is read once

Which, and how large, follow from the shapes alone, so that a captured step always takes the same, whoever is chosen.
"""

from __future__ import annotations

import torch

from twostep.model.kernels.experts import Beside, Routing
from twostep.model.kernels.triton_routing import add_up

# Tokens up to which rows in registers are faster: hardly any expert has two.
_ROWS_UP_TO = 2
_WIDEST_ROW = 16384
# Tokens up to which the terms are left to the norm that comes next.
_PARTS_UP_TO = 256
# Pairs of a tile, by how many an expert has on average at most.
_TILE_TOKENS = ((10, 16), (20, 32), (96, 64))
_MOST_TOKENS = 128
# Weights come in pieces of 16 bytes.
_ALIGNMENT = 16
# Shared memory of a program beside its tiles: barriers, and what threads exchange.
_SHARED_SLACK = 4096


class DenseExperts:
    """Experts of dense weights. `num_experts` counts those of all ranks."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, *, first: int) -> None:
        """gate_up [E, 2 * F, H], gates first; down [E, H, F]; both dense."""
        self._gate_up = gate_up
        self._down = down
        self._held = range(first, first + len(gate_up))

    def __call__(self, x: torch.Tensor, routing: Routing, beside: Beside | None = None) -> torch.Tensor:
        """[T, H] from x [T, H]: of each token the weighted sum of its experts that are held, and what stands beside them."""
        terms = self._terms(x, routing, in_parts=False)
        return add_up(terms, routing.experts, self._held, beside, x.dtype)

    def parts(self, x: torch.Tensor, routing: Routing, num_experts: int) -> torch.Tensor:
        """The same without what stands beside them; where that is faster as float32 [parts, T, H], whose sum it is."""
        if len(x) > _PARTS_UP_TO or len(self._held) < num_experts:
            return self(x, routing)
        return self._terms(x, routing, in_parts=True)
