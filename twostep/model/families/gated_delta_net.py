"""A layer's gated delta net in place of attention (Qwen3-Next): a short convolution, the gated delta rule, a gated norm.

    qkvz ─ q, k, v ─ convolution of the last few tokens ─ silu ─ gated delta rule ─ norm · silu(z) ─ out
    ba ─ how much is forgotten and written, by head

What it remembers of a sequence does not grow: the recurrent state of each head in float32, then the convolution's last inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twostep.model.families.config import ModelConfig
from twostep.model.families.modules import Cut, Maker, Place, Places
from twostep.model.kernels.gated_delta import delta_chunks, delta_step
from twostep.model.kernels.ops import AttentionPlan, Linear, Ops
from twostep.model.step.sequence_states import SequenceStates

_NORM_EPS = 1e-6  # of queries and keys


class GatedDeltaNet:
    def __init__(self, config: ModelConfig, make: Maker) -> None:
        assert config.gated_delta is not None
        d = self._config = config.gated_delta
        self._hidden_size = config.hidden_size
        self._eps = config.norm_eps
        self._dtype = make.dtype
        # One product for both: the rows of qkvz by key head (q, k, its value heads' v, their z), then those of b and a.
        self._into = make.linear(d.num_inputs + 2 * d.num_value_heads, config.hidden_size, bias=False)
        self._out = make.linear(config.hidden_size, d.num_value_heads * d.value_dim, bias=False)
        self._kernel = make.empty(d.num_channels, 1, d.kernel)
        self._dt_bias = torch.empty(d.num_value_heads, dtype=torch.float32, device=make.device)
        self._log_rate = torch.empty(d.num_value_heads, dtype=torch.float32, device=make.device)
        self._norm_weight = make.empty(d.value_dim)

    def place(self, places: Places, name: str) -> None:
        d = self._config
        self._into.place(
            places, (f"{name}.in_proj_qkvz", d.num_inputs, Cut.WHOLE), (f"{name}.in_proj_ba", 2 * d.num_value_heads, Cut.WHOLE)
        )
        self._out.place(places, (f"{name}.out_proj", self._hidden_size, Cut.WHOLE))
        for own, tensor in (
            ("conv1d.weight", self._kernel),
            ("dt_bias", self._dt_bias),
            ("A_log", self._log_rate),
            ("norm.weight", self._norm_weight),
        ):
            places[f"{name}.{own}"] = Place.whole(tensor)

    def finish_loading(self, ops: Ops) -> None:
        self._into.finish_loading(ops)
        self._out.finish_loading(ops)

    @property
    def enter(self) -> Linear:
        return self._into.run

    @property
    def leave(self) -> Linear:
        return self._out.run

    def attend(self, plan: AttentionPlan, layer: int, projected: torch.Tensor) -> torch.Tensor:
        """[T, value heads * value_dim] from what `enter` gave; `layer` counts the layers with a state."""
        d, states = self._config, plan.states
        assert states is not None
        mixed, z, beta, log_decay = self._split(projected)
        held = states.read(layer, d.state_bytes(self._dtype.itemsize))
        recurrent_bytes = d.recurrent_numbers * 4
        recurrent = held[:, :recurrent_bytes].view(torch.float32).view(len(states), d.num_value_heads, d.key_dim, d.value_dim)
        before = held[:, recurrent_bytes : recurrent_bytes + d.conv_numbers * self._dtype.itemsize].view(self._dtype)
        before = before.view(len(states), d.num_channels, d.kernel - 1)
        mixed = F.silu(self._convolve(states, mixed, before))
        out = self._recall(states, mixed, beta, log_decay, recurrent)
        states.write(layer, held)
        normed = F.rms_norm(out, (d.value_dim,), eps=self._eps).to(self._dtype) * self._norm_weight
        return (normed * F.silu(z.float())).to(self._dtype).view(len(projected), -1)

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v side by side [T, num_channels]; z [T, H, value_dim]; beta and log_decay, float32 [T, H]."""
        d, count = self._config, len(projected)
        qkvz, ba = projected.split((d.num_inputs, 2 * d.num_value_heads), -1)
        share = d.num_value_heads // d.num_key_heads
        sizes = (d.key_dim, d.key_dim, share * d.value_dim, share * d.value_dim)
        *qkv, z = qkvz.view(count, d.num_key_heads, -1).split(sizes, -1)
        beta, rate = ba.view(count, d.num_key_heads, 2, share).float().unbind(2)
        log_decay = -self._log_rate.exp() * F.softplus(rate.reshape(count, -1) + self._dt_bias)
        mixed = torch.cat([part.reshape(count, -1) for part in qkv], -1)
        return mixed, z.reshape(count, -1, d.value_dim), beta.reshape(count, -1).sigmoid(), log_decay

    def _convolve(self, states: SequenceStates, mixed: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Each channel's weighted sum of its own last inputs, those `before` among them, which become the last ones of this step."""
        out = torch.empty_like(mixed)
        if len(states.singles):
            window = torch.cat((before[states.singles], mixed[states.rows].unsqueeze(-1)), -1)
            out[states.rows] = (window * self._kernel.squeeze(1)).sum(-1)
            before[states.singles] = window[..., 1:]
        for chunk in states.chunks:
            inputs = torch.cat((before[chunk.sequence], mixed[chunk.start : chunk.stop].T), -1)
            out[chunk.start : chunk.stop] = F.conv1d(inputs[None], self._kernel, groups=len(inputs))[0].T
            before[chunk.sequence] = inputs[:, -before.shape[-1] :]
        return out

    def _recall(
        self, states: SequenceStates, mixed: torch.Tensor, beta: torch.Tensor, log_decay: torch.Tensor, recurrent: torch.Tensor
    ) -> torch.Tensor:
        """The gated delta rule's outputs, float32 [T, H, value_dim]; `recurrent` is brought up to date."""
        d, count = self._config, len(mixed)
        keys, share = d.num_key_heads * d.key_dim, d.num_value_heads // d.num_key_heads
        q, k, v = mixed.float().split((keys, keys, d.num_value_heads * d.value_dim), -1)
        # Each key head serves `share` value heads.
        query = (_unit(q.view(count, -1, d.key_dim)) * d.key_dim**-0.5).repeat_interleave(share, 1)
        key = _unit(k.view(count, -1, d.key_dim)).repeat_interleave(share, 1)
        value = v.view(count, -1, d.value_dim)
        out = torch.empty_like(value)
        if len(states.singles):
            rows = states.rows
            out[rows], recurrent[states.singles] = delta_step(
                query[rows], key[rows], value[rows], log_decay[rows], beta[rows], recurrent[states.singles]
            )
        for chunk in states.chunks:
            part = slice(chunk.start, chunk.stop)
            out[part], recurrent[chunk.sequence] = delta_chunks(
                query[part], key[part], value[part], log_decay[part], beta[part], recurrent[chunk.sequence]
            )
        return out


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
