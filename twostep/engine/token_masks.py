"""Which tokens some rows of a step may become: bits, made on the host, applied where the logits are.

    bits[i, t // 32] >> (t % 32) & 1      whether row rows[i] may become token t

Rows that are not named may become any token. twostep/model/kernels/triton_tokens.py does the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORD = 32


def num_words(vocab_size: int) -> int:
    """Of one row's bits."""
    return -(-vocab_size // WORD)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """rows int64 [C], ascending, of the step's sampled rows; bits int32 [C, num_words(vocab_size)], at least one set in each."""

    rows: npt.NDArray[np.int64]
    bits: npt.NDArray[np.int32]

    @classmethod
    def of(cls, masks: Sequence[tuple[int, npt.NDArray[np.int32]]]) -> TokenMasks:
        """Of (row, its bits [num_words]), at least one."""
        return cls(np.array([row for row, _ in masks], np.int64), np.stack([bits for _, bits in masks]))

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """[C, vocab_size]"""
        return np.unpackbits(self.bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)
