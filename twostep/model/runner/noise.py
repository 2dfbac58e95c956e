"""Sampling noise as a function of (seed, position) alone, so that batch mix, preemption and hand-over repeat it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: Sequence[int] | npt.NDArray[np.int64], positions: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each pair, a multiple of 2**-53. Seeds are signed 64-bit, positions count from 0.

    The position-th output of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) started
    at the mixed seed; mixing keeps the streams of neighbouring seeds apart.
    """
    state = _mix(np.array(seeds, dtype=np.int64).view(np.uint64) + _GAMMA)
    steps = np.array(positions, dtype=np.uint64) + np.uint64(1)
    return (_mix(state + steps * _GAMMA) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
