"""What is read of prompts beside the tokens that are sampled: log probabilities of a prompt's own tokens, some rows at a time, so that the
logits of a whole prompt are never there at once; and sums of hidden states, of which embeddings are made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from twostep.engine.batch import Batch

# Logits at a time: 64 MiB in float32.
_MAX_LOGITS = 1 << 24


class PromptReadout:
    """Reads one step's rows. The host waits for nothing."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        scored, pooled = batch.scored, batch.pooled
        self._num_scored = 0 if scored is None else len(scored.rows)
        self._num_top = 0 if scored is None else scored.num_top
        self._num_vectors = 0 if pooled is None else len(pooled.counts)
        # int64 [N]: the scored rows, then the pooled ones.
        self.rows = _sent(np.concatenate([each.rows for each in (scored, pooled) if each is not None]), device)
        self._targets = None if scored is None else _sent(scored.targets, device)
        self._vectors = None if pooled is None else _sent(np.repeat(np.arange(self._num_vectors), pooled.counts), device)
        # Of Sampled, there once `read` was called.
        self.scores: torch.Tensor | None = None
        self.pooled: torch.Tensor | None = None

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> PromptReadout | None:
        """None: there is nothing to read."""
        return None if batch.scored is None and batch.pooled is None else cls(batch, device)

    def read(self, hidden: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor], vocab_size: int) -> None:
        """`hidden` [N, hidden_size], of `rows`, after the last norm; what `logits_of` makes logits of, [n, vocab_size] of n rows."""
        if self._targets is not None:
            at_once = max(1, _MAX_LOGITS // vocab_size)
            parts = zip(hidden[: self._num_scored].split(at_once), self._targets[:, None].split(at_once), strict=True)
            self.scores = torch.cat([self._scores(logits_of(part).float(), targets) for part, targets in parts])
        if self._vectors is not None:
            sums = hidden.new_zeros(self._num_vectors, hidden.shape[1], dtype=torch.float32)
            self.pooled = sums.index_add_(0, self._vectors, hidden[self._num_scored :].float())

    def _scores(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        norm = logits.logsumexp(-1, keepdim=True)
        own = logits.gather(1, targets)
        rank = (logits > own).sum(-1, keepdim=True) + 1
        best = logits.topk(min(self._num_top, logits.shape[1]))
        return torch.cat(((own - norm).double(), rank.double(), (best.values - norm).double(), best.indices.double()), 1)


def _sent(values: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
