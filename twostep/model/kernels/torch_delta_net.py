"""A gated delta net in torch (delta_net.py): what the CPU runs, sequence by sequence where they have chunks, and the kernels' oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twostep.model.kernels.delta_net import UNIT_EPS, DeltaDims, DeltaWeights
from twostep.model.kernels.gated_delta import delta_chunks, delta_step
from twostep.model.step.sequence_states import SequenceStates


def delta_net(states: SequenceStates, layer: int, projected: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
    """See AttentionPlan.attend_delta."""
    d, dtype = weights.dims, projected.dtype
    mixed, z, beta, log_decay = _split(projected, weights)
    held = states.read(layer, d.columns, d.column_bytes(dtype.itemsize))
    # [S, key heads, bytes], of which both are views.
    by_head = held.view(len(states), d.num_key_heads, -1)
    recurrent_bytes = d.recurrent_numbers * 4
    recurrent = by_head[:, :, :recurrent_bytes].view(torch.float32)
    inputs = by_head[:, :, recurrent_bytes : recurrent_bytes + d.conv_numbers * dtype.itemsize].view(dtype)
    before = _by_channel(inputs, d)
    mixed = F.silu(_convolve(states, mixed, before, weights.conv))
    matrices = recurrent.clone(memory_format=torch.contiguous_format).view(len(states), d.num_value_heads, d.key_dim, d.value_dim)
    out = _recall(states, mixed, beta, log_decay, matrices, d)
    recurrent.copy_(matrices.view(recurrent.shape))
    inputs.copy_(_by_key_head(before, d))
    states.write(layer, d.columns, held)
    normed = F.rms_norm(out, (d.value_dim,), eps=weights.eps).to(dtype) * weights.norm
    return (normed * F.silu(z.float())).to(dtype).view(len(projected), -1)


def _split(projected: torch.Tensor, weights: DeltaWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v side by side [T, num_channels]; z [T, H, value_dim]; beta and log_decay, float32 [T, H]."""
    d, count = weights.dims, len(projected)
    qkvz, ba = projected.split((d.num_inputs, 2 * d.num_value_heads), -1)
    sizes = (d.key_dim, d.key_dim, d.share * d.value_dim, d.share * d.value_dim)
    *qkv, z = qkvz.view(count, d.num_key_heads, -1).split(sizes, -1)
    beta, rate = ba.view(count, d.num_key_heads, 2, d.share).float().unbind(2)
    log_decay = -weights.log_rate.exp() * F.softplus(rate.reshape(count, -1) + weights.dt_bias)
    mixed = torch.cat([part.reshape(count, -1) for part in qkv], -1)
    return mixed, z.reshape(count, -1, d.value_dim), beta.reshape(count, -1).sigmoid(), log_decay


def _by_channel(inputs: torch.Tensor, d: DeltaDims) -> torch.Tensor:
    """[S, num_channels, kernel - 1] from what key heads have, [S, num_key_heads, their channels · (kernel - 1)]."""
    parts = inputs.unflatten(2, (-1, d.kernel - 1)).split((d.key_dim, d.key_dim, d.share * d.value_dim), 2)
    return torch.cat([part.flatten(1, 2) for part in parts], 1)


def _by_key_head(channels: torch.Tensor, d: DeltaDims) -> torch.Tensor:
    """The inverse of _by_channel."""
    keys = d.num_key_heads * d.key_dim
    parts = channels.split((keys, keys, d.num_value_heads * d.value_dim), 1)
    return torch.cat([part.unflatten(1, (d.num_key_heads, -1)) for part in parts], 2).flatten(2)


def _convolve(states: SequenceStates, mixed: torch.Tensor, before: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each channel's weighted sum of its own last inputs, those `before` among them, which become the last ones of this step."""
    out = torch.empty_like(mixed)
    if len(states.singles):
        window = torch.cat((before[states.singles], mixed[states.rows].unsqueeze(-1)), -1)
        out[states.rows] = (window * weight).sum(-1)
        before[states.singles] = window[..., 1:]
    for chunk in states.chunks:
        inputs = torch.cat((before[chunk.sequence], mixed[chunk.start : chunk.stop].T), -1)
        out[chunk.start : chunk.stop] = F.conv1d(inputs[None], weight.unsqueeze(1), groups=len(inputs))[0].T
        before[chunk.sequence] = inputs[:, -before.shape[-1] :]
    return out


def _recall(
    states: SequenceStates,
    mixed: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor,
    recurrent: torch.Tensor,
    dims: DeltaDims,
) -> torch.Tensor:
    """The gated delta rule's outputs, float32 [T, H, value_dim]; `recurrent` is brought up to date."""
    d, count = dims, len(mixed)
    keys = d.num_key_heads * d.key_dim
    q, k, v = mixed.float().split((keys, keys, d.num_value_heads * d.value_dim), -1)
    # Each key head serves `share` value heads.
    query = (_unit(q.view(count, -1, d.key_dim)) * d.key_dim**-0.5).repeat_interleave(d.share, 1)
    key = _unit(k.view(count, -1, d.key_dim)).repeat_interleave(d.share, 1)
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
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)
