"""The arena's slots: apart, inside, shared fairly, each freed once; and quarantine."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.slots import ArenaSlot, StagingArena

PAGE = 4096
SIZE = 16 * PAGE


class Arena(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = StagingArena(SIZE)
        self.taken: list[ArenaSlot] = []
        self.quarantined: list[ArenaSlot] = []
        self.gone: list[ArenaSlot] = []

    @property
    def live(self) -> list[ArenaSlot]:
        return self.taken + self.quarantined

    @rule(owner=st.sampled_from("abc"), num_bytes=st.integers(1, SIZE + PAGE))
    def take(self, owner: str, num_bytes: int) -> None:
        held = sum(s.num_bytes for s in self.live if s.owner == owner)
        slot = self.arena.take(owner, num_bytes)
        if slot is None:
            pages = -(-num_bytes // PAGE)
            ends = sorted([(0, 0), (SIZE, SIZE), *((s.offset, s.offset + -(-s.num_bytes // PAGE) * PAGE) for s in self.live)])
            holes = [b[0] - a[1] for a, b in pairwise(ends)]
            assert (held and held + num_bytes > SIZE // 2) or max(holes) < pages * PAGE
            return
        assert (slot.num_bytes, slot.owner) == (num_bytes, owner)
        assert not held or held + num_bytes <= SIZE // 2
        self.taken.append(slot)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        slot = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.arena.quarantine(slot)
        self.quarantined.append(slot)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.live))
        self.arena.give_back(slot)
        (self.taken if slot in self.taken else self.quarantined).remove(slot)
        self.gone.append(slot)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def what_is_gone_cannot_be_freed_again(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.gone))
        if any(slot is s for s in self.live):
            return
        for call in (self.arena.give_back, self.arena.quarantine):
            with pytest.raises(KeyError):
                call(slot)

    @invariant()
    def slots_are_apart_and_counted(self) -> None:
        places = sorted((s.offset, s.offset + s.num_bytes) for s in self.live)
        assert all(0 <= start < end <= SIZE for start, end in places)
        assert all(a[1] <= b[0] for a, b in pairwise(places))
        assert self.arena.used_bytes == sum(-(-s.num_bytes // PAGE) * PAGE for s in self.live)
        assert self.arena.quarantined_bytes == sum(s.num_bytes for s in self.quarantined)


TestArena = Arena.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
