"""How much of a device's memory the KV pool may take. Arithmetic only: who measures is pool_sizing.py.

    total of the card
    |-- others --|-- own: weights, context, libraries --|-- KV pool --|-- graphs --|-- largest step --|-- left alone --|
                 |<----------------- utilization * total ---------------------------------------------->|

"Others" are processes that were there before; what they hold is no part of the share, but it cannot be used either.
"""

from __future__ import annotations

from dataclasses import dataclass

from twostep.errors import SetupError

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes of one device. `free_at_start` was measured before the weights were loaded, `free` after, with nothing cached. The largest
    step takes `step` on top while it runs, the captured graphs keep `graphs`."""

    total: int
    free_at_start: int
    free: int
    step: int
    graphs: int = 0

    @property
    def own(self) -> int:
        """What this process holds for good. Never negative: others may have left meanwhile."""
        return max(0, self.free_at_start - self.free)

    @property
    def others(self) -> int:
        return self.total - self.free_at_start

    def pool_bytes(self, utilization: float) -> int:
        """Room for the pool, so that this process takes at most `utilization` of the card and nothing that others hold. Negative: so
        much is missing even for an empty one."""
        return min(int(self.total * utilization) - self.own, self.free) - self.step - self.graphs


def num_blocks_within(profile: MemoryProfile, utilization: float, *, block_bytes: int, least_blocks: int, device: str) -> int:
    """As many blocks as fit. Raises SetupError if fewer than `least_blocks` do, with what is missing and what to change."""
    room = profile.pool_bytes(utilization)
    least = least_blocks * block_bytes
    if room >= least:
        return room // block_bytes
    needed = profile.own + profile.step + profile.graphs + least
    # In hundredths, as people give it, and with a byte for rounding.
    enough = -(-100 * (needed + 1) // profile.total) / 100
    parts = (
        f"weights and libraries {_gib(profile.own)}, the largest step {_gib(profile.step)}, graphs {_gib(profile.graphs)}, "
        f"at least {_gib(least)} of KV ({least_blocks} blocks)"
    )
    smaller = "lower --max-num-batched-tokens or --max-num-seqs, or take a smaller model or another --dtype"
    if enough <= 1.0 and needed - profile.own <= profile.free:
        what = f"give --gpu-memory-utilization {enough:.2f} or more; or {smaller}"
    elif profile.others >= least - room:
        what = f"other processes hold {_gib(profile.others)} of it: end them or choose another --device; or {smaller}"
    else:
        what = smaller
    raise SetupError(
        f"{_gib(least - room)} of memory are missing on {device}: {parts} do not fit --gpu-memory-utilization {utilization:g} "
        f"of {_gib(profile.total)}; {what}"
    )


def shortage_at_start(*, total: int, free: int, utilization: float, device: str) -> str:
    """What to tell an operator before anything is loaded; empty if the share is free."""
    wanted = int(total * utilization)
    if free >= wanted:
        return ""
    return (
        f"{_gib(total - free)} of the {_gib(total)} of {device} are in use already, by other processes or this one's own context: "
        f"{_gib(free)} are left where --gpu-memory-utilization {utilization:g} asks for {_gib(wanted)}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
