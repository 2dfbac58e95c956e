"""Layers that a checkpoint holds inside a larger one.

    q q k v q q k v      rows of one tensor, by heads: of every 4, q are the first two, k the third, v the fourth
    q q q q k k v v      the same in one turn

A family says so once, in the names that its parts have (`fused`); places know it from there (modules.py), so that sharding, fused products
and quantization at load see a layer by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fused:
    """Of every `period` rows of the checkpoint's `layer`, in turn, `count` from `start` on. `turned`: its weight lies as [in, out]."""

    layer: str
    start: int
    count: int
    period: int
    turned: bool = False

    def row(self, row: int) -> int:
        """Returns which row of `layer` this one is."""
        return row // self.count * self.period + self.start + row % self.count

    def shape(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """Returns that of the checkpoint's tensor, whichever way round it lies, of which this layer's whole one is [rows, ...]."""
        shape = (own[0] // self.count * self.period, *own[1:])
        return shape[::-1] if self.turned else shape


def fused(layer: str, rows: Mapping[str, int], *, turned: bool = False) -> dict[str, Fused]:
    """Returns by their names the layers that follow each other in `layer`, so many rows of each, again and again to the end."""
    period, start, found = sum(rows.values()), 0, {}
    for name, count in rows.items():
        found[name] = Fused(layer, start, count, period, turned)
        start += count
    return found


def alone(layer: str) -> Fused:
    """Returns a tensor of a larger layer that holds for all that is in it."""
    return Fused(layer, 0, 1, 1)
