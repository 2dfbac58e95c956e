"""A layer's gated delta net in place of attention (Qwen3-Next): a short convolution, the gated delta rule, a gated norm.

    qkvz ─ q, k, v ─ convolution of the last few tokens ─ silu ─ gated delta rule ─ norm · silu(z) ─ out
    ba ─ how much is forgotten and written, by head

What it remembers of a sequence does not grow: the recurrent state of each head in float32, and the convolution's last inputs. Each of
several ranks has some of the key heads, with all that is theirs.
"""

from __future__ import annotations

from math import gcd

import torch

from twostep.model.families.config import ModelConfig
from twostep.model.families.modules import Cut, Maker, Place, Places
from twostep.model.kernels.delta_net import DeltaWeights
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops
from twostep.model.step.state_columns import StateColumns


def columns_of(config: ModelConfig, num_key_heads: int) -> StateColumns:
    """Returns the columns that states are kept in: as many as the model can have ranks, so that each rank has whole columns, however many
    ranks there are. A KV head has several whole columns, or a column has several whole KV heads."""
    most, num_kv_heads = gcd(config.num_heads, num_key_heads), config.num_kv_heads
    count = most if most % num_kv_heads == 0 else gcd(most, num_kv_heads)
    return StateColumns(count=count, num_own=count)


class GatedDeltaNet:
    def __init__(self, config: ModelConfig, make: Maker) -> None:
        assert config.gated_delta is not None
        d = self._dims = config.gated_delta
        self._hidden_size = config.hidden_size
        self._make = make
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
        # By key head, and the value heads that each has.
        self._into.place(
            places, (f"{name}.in_proj_qkvz", d.num_inputs, Cut.FEATURES), (f"{name}.in_proj_ba", 2 * d.num_value_heads, Cut.FEATURES)
        )
        self._out.place(places, (f"{name}.out_proj", self._hidden_size, Cut.FROM_FEATURES))
        keys = d.num_key_heads * d.key_dim
        kernels = self._kernel.split((keys, keys, d.num_value_heads * d.value_dim))
        for own, tensor in zip("qkv", kernels, strict=True):
            part = f"{name}.conv1d.{own}"
            places[f"{part}.weight"] = Place.whole(tensor, Cut.FEATURES, fused=self._make.fused_at(part))
        places[f"{name}.dt_bias"] = Place.whole(weights.dt_bias, Cut.FEATURES)
        places[f"{name}.A_log"] = Place.whole(weights.log_rate, Cut.FEATURES)
        places[f"{name}.norm.weight"] = Place.whole(weights.norm)

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
