"""The checksum of transports whose bytes pass host memory: xxh3_64 (sum64.py has that of GPU memory). It finds torn and reused memory,
not forgery: tickets and Ray's token do that."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """xxh3_64 of the bytes in memory order, as an unsigned 64-bit int. `data` is contiguous. Releases the GIL: call it in a thread."""
    return int(xxhash.xxh3_64_intdigest(data.data))
