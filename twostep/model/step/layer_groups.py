"""Layers in groups: those with windows apart from those without, as many in each, so that a block of any group is of one size.

    layers    0 1 2 3 4 5 6 7 8 9         · with a window      # without
              · · · # · · · # · ·

    group 0   3 7                         two layers a block, as there are two without windows
    group 1   0 1
    group 2   2 4
    group 3   5 6
    group 4   8 9                         where they do not fill the last group, its blocks have places that nobody uses

A sequence keeps all its blocks of the first groups, and what is in reach of the others (twostep/engine/block_manager.py). (Blocks of one
size for layers of several kinds: vLLM's hybrid KV cache manager, after Kwon et al., PagedAttention, 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from twostep.engine.batch import KvShape

# Each group is a table of its own in every step.
_MOST_GROUPS = 8
# What the layers without windows take, with their padding, is to be less than this share of what all layers take.
_WORTH_IT = 0.9


class LayerPlace(NamedTuple):
    """Says where a layer's KV lies: `layer` counts those of a block of its group."""

    group: int
    layer: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Layers of a block, and groups without and with windows."""

    num_layers: int
    num_full: int
    num_windowed: int


def layer_groups(windows: Sequence[int]) -> LayerGroups:
    """Returns the groups of layers with these windows (0: none): those in which a long sequence takes least, then those in which a window
    does; one group of all where some have windows and it would gain little."""
    num_windowed = sum(window > 0 for window in windows)
    num_full = len(windows) - num_windowed
    if not num_full or not num_windowed:
        return LayerGroups(len(windows), int(num_full > 0), int(num_windowed > 0))
    found: list[tuple[int, int, int, LayerGroups]] = []
    for size in range(1, max(num_full, num_windowed) + 1):
        groups = LayerGroups(size, -(-num_full // size), -(-num_windowed // size))
        count = groups.num_full + groups.num_windowed
        if count <= _MOST_GROUPS and groups.num_full * size < _WORTH_IT * len(windows):
            found.append((groups.num_full * size, groups.num_windowed * size, count, groups))
    return min(found, default=(0, 0, 1, LayerGroups(len(windows), 1, 0)), key=lambda each: each[:3])[3]


def layer_places(windows: Sequence[int], shape: KvShape) -> Sequence[LayerPlace]:
    """Returns where each layer with KV lies in a pool."""
    return _places(tuple(windows), shape.num_layers, shape.num_groups, shape.num_full)


@lru_cache
def _places(windows: tuple[int, ...], num_layers: int, num_groups: int, num_full: int) -> Sequence[LayerPlace]:
    if num_groups == 1:
        return tuple(LayerPlace(0, layer) for layer in range(max(num_layers, len(windows))))
    # How many layers without and with windows came before.
    counts = [0, num_full * num_layers]
    places = []
    for window in windows:
        place = counts[window > 0]
        counts[window > 0] += 1
        places.append(LayerPlace(place // num_layers, place % num_layers))
    return tuple(places)
