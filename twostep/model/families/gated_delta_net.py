"""A layer's gated delta net in place of attention (Qwen3-Next): a short convolution, the gated delta rule, a gated norm.

    qkvz ─ q, k, v ─ convolution of the last few tokens ─ silu ─ gated delta rule ─ norm · silu(z) ─ out
    ba ─ how much is forgotten and written, by head

What it remembers of a sequence does not grow: the recurrent state of each head in float32, then the convolution's last inputs.
"""

from __future__ import annotations

import torch

from twostep.model.families.config import ModelConfig
from twostep.model.families.modules import Cut, Maker, Place, Places
from twostep.model.kernels.delta_net import DeltaWeights
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops


class GatedDeltaNet:
    def __init__(self, config: ModelConfig, make: Maker) -> None:
        assert config.gated_delta is not None
        d = self._dims = config.gated_delta
        self._hidden_size = config.hidden_size
        # One product for both: the rows of qkvz by key head (q, k, its value heads' v, their z), then those of b and a.
        self._into = make.linear(d.num_inputs + 2 * d.num_value_heads, config.hidden_size, bias=False)
        self._out = make.linear(config.hidden_size, d.num_value_heads * d.value_dim, bias=False)
        self._kernel = make.empty(d.num_channels, 1, d.kernel)
        self._weights = DeltaWeights(
            dims=d,
            conv=self._kernel.squeeze(1),
            dt_bias=torch.empty(d.num_value_heads, dtype=torch.float32, device=make.device),
            log_rate=torch.empty(d.num_value_heads, dtype=torch.float32, device=make.device),
            norm=make.empty(d.value_dim),
            eps=config.norm_eps,
        )

    def place(self, places: Places, name: str) -> None:
        d, weights = self._dims, self._weights
        self._into.place(
            places, (f"{name}.in_proj_qkvz", d.num_inputs, Cut.WHOLE), (f"{name}.in_proj_ba", 2 * d.num_value_heads, Cut.WHOLE)
        )
        self._out.place(places, (f"{name}.out_proj", self._hidden_size, Cut.WHOLE))
        for own, tensor in (
            ("conv1d.weight", self._kernel),
            ("dt_bias", weights.dt_bias),
            ("A_log", weights.log_rate),
            ("norm.weight", weights.norm),
        ):
            places[f"{name}.{own}"] = Place.whole(tensor)

    def finish_loading(self, ops: Ops) -> None:
        self._into.finish_loading(ops)
        self._out.finish_loading(ops)
        ops.prepare_delta(self._weights)

    @property
    def enter(self) -> Linear:
        return self._into.run

    @property
    def leave(self) -> Linear:
        return self._out.run

    def attend(self, plan: AttentionPlan, layer: int, projected: torch.Tensor) -> torch.Tensor:
        """[T, value heads * value_dim] from what `enter` gave; `layer` counts the layers with a state."""
        return plan.attend_delta(layer, projected, self._weights)
