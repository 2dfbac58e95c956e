"""A layer behind a model's last that predicts the token after the next (DeepSeek-V3, 2024, arXiv 2412.19437, section 2.2): embedding and
output layer are the model's.

    state of the last norm ─ hnorm ─┐
    the next token ─ embedding ─ enorm ─┴─ eh_proj ─ a layer as the model's ─ norm ─ lm_head
"""

from __future__ import annotations

from dataclasses import replace

import torch

from twostep.model.families.layers import DecoderLayer
from twostep.model.families.modules import Cut, Maker, Places
from twostep.model.kernels.ops import Ops


class NextTokenLayer:
    def __init__(self, make: Maker, hidden_size: int, layer: DecoderLayer) -> None:
        self.layer = layer
        self.norm = make.rms_norm(hidden_size)
        self._of_token, self._of_state = make.rms_norm(hidden_size), make.rms_norm(hidden_size)
        self._size = hidden_size
        # No checkpoint quantizes it, whatever its config says of others.
        self._join = replace(make, quantization=None).linear(hidden_size, 2 * hidden_size, bias=False)

    def place(self, places: Places, name: str) -> None:
        """Registers all weights under the checkpoint's names, which begin with `name`."""
        self._of_token.place(places, f"{name}.enorm")
        self._of_state.place(places, f"{name}.hnorm")
        self._join.place(places, (f"{name}.eh_proj", self._size, Cut.WHOLE))
        self.layer.place(places, name)
        self.norm.place(places, f"{name}.shared_head.norm")

    def finish_loading(self, ops: Ops) -> None:
        self._join.finish_loading(ops)
        self.layer.finish_loading(ops)
        for norm in (self._of_token, self._of_state, self.norm):
            norm.finish_loading(ops)

    def join(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size], what enters the layer, from two of that shape."""
        return self._join.run(torch.cat((self._of_token(embedded), self._of_state(states)), -1))
