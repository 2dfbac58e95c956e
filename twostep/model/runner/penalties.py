"""What changes logits before a token is picked: penalties on tokens seen, stop tokens that may not come yet, and grammars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from twostep.engine.batch import SamplingRow, TokenMasks


def adjust(logits: torch.Tensor, rows: Sequence[SamplingRow], masks: TokenMasks | None = None) -> torch.Tensor:
    """Logits [R, V] after penalties, min_tokens and masks: a float32 copy, or `logits` itself if no row asks for any. Where a row has a
    mask, that says which stop tokens may come.

    In this order, as vLLM does: repetition over prompt and output (positive logits divided, others multiplied), then
    frequency and presence over the output. Only the entries of tokens seen are touched.
    """
    penalized = [r for r, row in enumerate(rows) if row.params.has_penalties and row.history]
    held_back = [r for r, row in enumerate(rows) if row.position < row.params.min_tokens and row.stop_ids]
    if masks is not None:
        masked = frozenset(masks.rows.tolist())
        held_back = [r for r in held_back if r not in masked]
    if not penalized and not held_back and masks is None:
        return logits
    adjusted = logits.to(torch.float32, copy=True)
    flat = adjusted.view(-1)
    vocab_size = logits.shape[-1]
    if penalized:
        _penalize(flat, rows, penalized, vocab_size)
    stops = [r * vocab_size + token for r in held_back for token in rows[r].stop_ids if 0 <= token < vocab_size]
    if stops:
        flat[torch.tensor(stops, device=flat.device)] = -torch.inf
    if masks is not None:
        apply_masks(adjusted, masks)
    return adjusted


def apply_masks(logits: torch.Tensor, masks: TokenMasks) -> None:
    """Sets what is not allowed to -infinity in logits [R, V], in place."""
    forbidden = torch.from_numpy(~masks.allowed(logits.shape[1])).to(logits.device)
    index = torch.from_numpy(masks.rows).to(logits.device)
    logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(forbidden, -torch.inf))


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
