"""The gated delta rule: linear attention whose state forgets, and corrects what it holds (Yang, Kautz, Hatamizadeh: Gated delta networks,
2024, arXiv 2412.06464).

    S_t = exp(g_t) S_{t-1} + k_t ⊗ β_t (v_t - k_t · exp(g_t) S_{t-1})          o_t = q_t · S_t

Tokens of a prompt go in chunks of C, with no loop over tokens (section 3.3 there; Yang et al.: Parallelizing linear transformers with the
delta rule over sequence length, 2024, arXiv 2406.06484): with Γ_ij = exp(γ_i - γ_j), γ the running sum of g in the chunk,

    A = tril(β K Kᵀ ⊙ Γ, -1)     U = (I + A)⁻¹ β V     W = (I + A)⁻¹ β exp(γ) K     V' = U - W S
    O = exp(γ) Q S + tril(Q Kᵀ ⊙ Γ) V'                  S ← exp(γ_C) S + (exp(γ_C - γ) K)ᵀ V'

All in float32. H heads, K numbers of a key, V of a value.
"""

from __future__ import annotations

import torch

_CHUNK = 64


def delta_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of N sequences. Returns its output [N, H, V], and the new state.

    query, key [N, H, K]; value [N, H, V]; log_decay, beta [N, H]; state [N, H, K, V]
    """
    state = state * log_decay.exp()[..., None, None]
    held = torch.einsum("nhk,nhkv->nhv", key, state)
    state = state + torch.einsum("nhk,nhv->nhkv", key, (value - held) * beta.unsqueeze(-1))
    return torch.einsum("nhk,nhkv->nhv", query, state), state


def delta_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """T tokens of one sequence. Returns their outputs [T, H, V], and the new state.

    query, key [T, H, K]; value [T, H, V]; log_decay, beta [T, H]; state [H, K, V]
    """
    outputs = []
    parts = [x.transpose(0, 1).split(_CHUNK, 1) for x in (query, key, value, log_decay, beta)]
    for q, k, v, g, b in zip(*parts, strict=True):
        out, state = _chunk(q, k, v, g, b, state)
        outputs.append(out)
    return torch.cat(outputs, 1).transpose(0, 1), state


def _chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As delta_chunks, of one chunk, heads first: query [H, C, K]."""
    total = log_decay.cumsum(1)
    size = total.shape[1]
    # Masked before it is raised to a power: what lies above the diagonal may overflow.
    above = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    decay = (total[:, :, None] - total[:, None, :]).masked_fill(above, -torch.inf).exp()
    scaled_key = key * beta.unsqueeze(-1)
    system = (scaled_key @ key.transpose(1, 2)) * decay
    since_start = total.exp().unsqueeze(-1)
    both = torch.cat((value * beta.unsqueeze(-1), scaled_key * since_start), -1)
    # The diagonal counts as ones, whatever is there.
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    new_value, old_key = solved.split((value.shape[-1], key.shape[-1]), -1)
    new_value = new_value - old_key @ state
    out = (query * since_start) @ state + ((query @ key.transpose(1, 2)) * decay) @ new_value
    to_end = (total[:, -1:] - total).exp().unsqueeze(-1)
    return out, state * total[:, -1, None, None].exp() + (key * to_end).transpose(1, 2) @ new_value
