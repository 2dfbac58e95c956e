"""What a probe of a host transport copies: bytes that both sides can work out, so that a wrong copy is no proof of a working path."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Stands where a lease's id does; real ones contain slashes.
PROBE_LEASE = "probe"
PROBE_BYTES = 16 << 20
# A prime, so that a copy shifted by any power of two differs.
_PERIOD = 251


def probe_pattern(num_bytes: int) -> npt.NDArray[np.uint8]:
    """uint8 [num_bytes]."""
    return np.resize(np.arange(_PERIOD, dtype=np.uint8), num_bytes)
