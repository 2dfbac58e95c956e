"""What changes logits before a token is picked: penalties on tokens seen, and stop tokens that may not come yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from twostep.engine.batch import SamplingRow


def adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Logits [R, V] after penalties and min_tokens: a float32 copy, or `logits` itself if no row asks for any.

    In this order, as vLLM does: repetition over prompt and output (positive logits divided, others multiplied), then
    frequency and presence over the output. Only the entries of tokens seen are touched.
    """
    penalized = [r for r, row in enumerate(rows) if row.params.has_penalties and row.history]
    held_back = [r for r, row in enumerate(rows) if row.position < row.params.min_tokens and row.stop_ids]
    if not penalized and not held_back:
        return logits
    adjusted = logits.to(torch.float32, copy=True)
    flat = adjusted.view(-1)
    vocab_size = logits.shape[-1]
    if penalized:
        _penalize(flat, rows, penalized, vocab_size)
    stops = [r * vocab_size + token for r in held_back for token in rows[r].stop_ids if 0 <= token < vocab_size]
    if stops:
        flat[torch.tensor(stops, device=flat.device)] = -torch.inf
    return adjusted


def _penalize(flat: torch.Tensor, rows: Sequence[SamplingRow], penalized: Sequence[int], vocab_size: int) -> None:
    lengths = [len(rows[r].history) for r in penalized]
    tokens = np.concatenate([np.asarray(rows[r].history, dtype=np.int64) for r in penalized])
    is_output = np.concatenate([np.arange(n) >= rows[r].num_prompt_tokens for r, n in zip(penalized, lengths, strict=True)])
    # One entry for each token of each row, with its count among the row's output.
    entries, occurrence = np.unique(np.repeat(penalized, lengths) * vocab_size + tokens, return_inverse=True)
    counts = np.bincount(occurrence.reshape(-1), weights=is_output, minlength=len(entries))
    params = [rows[r].params for r in penalized]
    of_row = np.searchsorted(np.asarray(penalized), entries // vocab_size)
    repetition = np.array([p.repetition_penalty for p in params])[of_row]
    additive = np.array([p.frequency_penalty for p in params])[of_row] * counts
    additive += np.array([p.presence_penalty for p in params])[of_row] * (counts > 0)

    index = torch.from_numpy(entries).to(flat.device)
    factor = torch.from_numpy(repetition).to(flat)
    seen = flat.index_select(0, index)
    seen = torch.where(seen > 0, seen / factor, seen * factor) - torch.from_numpy(additive).to(flat)
    flat.index_copy_(0, index, seen)
