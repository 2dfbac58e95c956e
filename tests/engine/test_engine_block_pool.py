"""The block pool against a naive model that remembers everything."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from twostep.engine.block_pool import BlockPool
from twostep.errors import InternalError, ResourceExhausted

Content = tuple[int, ...]


def digest(content: Content) -> bytes:
    return bytes(content)


@dataclass(eq=False)
class Owner:
    """A sequence of full blocks; block i holds the prefix content[: i + 1]. The first `computed` are registered."""

    content: Content
    blocks: list[int]
    computed: int


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a small alphabet, so that they share prefixes, compute the same block twice and evict each other."""

    @initialize(num_blocks=st.integers(1, 12), every=st.integers(1, 3))
    def start(self, num_blocks: int, every: int) -> None:
        self.pool = BlockPool(num_blocks, block_size=4, hash_unit=4 * every)
        self.num_blocks, self.every = num_blocks, every
        self.owners: list[Owner] = []
        self.content_of: dict[int, Content] = {}  # registered blocks
        self.freed_at: dict[int, int] = {}  # cached blocks, by the time they lost their last owner
        self.clock = 0
        self.mirror: set[bytes] = set()
        self.generations = [0] * num_blocks

    def count(self, block: int) -> int:
        return sum(owner.blocks.count(block) for owner in self.owners)

    def block_of(self, content: Content) -> int | None:
        return next((block for block, known in self.content_of.items() if known == content), None)

    def longest(self, content: Content) -> list[int]:
        found: list[int] = []
        for i in range(len(content)):
            block = self.block_of(content[: i + 1])
            if block is None:
                break
            found.append(block)
        return found

    def allocated(self, blocks: list[int]) -> None:
        """Checks what allocate gave out: blocks without content first, then the longest unowned."""
        plain = self.num_blocks - len(self.freed_at) - len({block for owner in self.owners for block in owner.blocks})
        evicted = sorted(self.freed_at, key=lambda block: self.freed_at[block])[: max(0, len(blocks) - plain)]
        assert sorted(block for block in blocks if block in self.freed_at) == sorted(evicted)
        for block in evicted:
            del self.freed_at[block]
            del self.content_of[block]
        for block in blocks:
            assert not self.count(block)
            self.generations[block] += 1

    @rule(content=st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), spare=st.integers(0, 2))
    def take(self, content: Content, spare: int) -> None:
        found = self.pool.lookup([digest(content[: i + 1]) for i in range(len(content))])
        assert found == self.longest(content)
        needed, before = len(content) + spare - len(found), self.pool.num_available
        if needed > before - self.pool.num_unowned(found):
            if needed > before:
                with pytest.raises(ResourceExhausted):
                    self.pool.allocate(needed)
            assert self.pool.num_available == before
            return
        self.pool.share(found)
        for block in found:
            self.freed_at.pop(block, None)
        owner = Owner(content, list(found), len(found))
        self.owners.append(owner)
        new = self.pool.allocate(needed)
        self.allocated(new)
        owner.blocks += new

    @precondition(lambda self: any(owner.computed < len(owner.content) for owner in self.owners))
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([owner for owner in self.owners if owner.computed < len(owner.content)]))
        content, old = owner.content[: owner.computed + 1], owner.blocks[owner.computed]
        known = self.block_of(content)
        new = self.pool.register(old, digest(content), owner.computed)
        owner.blocks[owner.computed] = new
        owner.computed += 1
        if known is None:
            assert new == old
            self.content_of[old] = content
        else:
            assert new == known, "a second block of the same prefix is exchanged for the first"
            self.freed_at.pop(known, None)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        self.owners.remove(owner)
        self.pool.free(owner.blocks)
        for block in reversed(owner.blocks):
            if not self.count(block) and block in self.content_of:
                self.clock += 1
                self.freed_at[block] = self.clock

    @rule()
    def take_delta(self) -> None:
        delta = self.pool.take_delta()
        assert not set(delta.added) & self.mirror
        assert set(delta.removed) <= self.mirror
        self.mirror = (self.mirror | set(delta.added)) - set(delta.removed)
        assert self.mirror == set(self.pool.findable())

    @invariant()
    def adds_up(self) -> None:
        blocks = range(self.num_blocks)
        self.pool.check_integrity([owner.blocks for owner in self.owners])
        assert [self.pool.num_owners(block) for block in blocks] == [self.count(block) for block in blocks]
        assert [self.pool.generation(block) for block in blocks] == self.generations
        assert self.pool.cached() == sorted(self.freed_at, key=lambda block: self.freed_at[block])
        assert self.pool.num_available == sum(not self.count(block) for block in blocks)
        assert self.pool.num_available == self.pool.num_free + self.pool.num_cached

    @invariant()
    def chains_are_whole(self) -> None:
        known = set(self.content_of.values())
        assert len(known) == len(self.content_of)
        assert all(content[:-1] in known for content in known if len(content) > 1), "a head was evicted before its tail"
        boundaries = {digest(content) for content in known if len(content) % self.every == 0}
        assert set(self.pool.findable()) == boundaries


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def chain(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    return [pool.register(block, bytes([i]), i) for i, block in enumerate(blocks)]


def test_integrity_finds_an_owner_too_many_or_too_few() -> None:
    pool = BlockPool(6, block_size=16, hash_unit=16)
    owned = chain(pool, 3)
    for owners in ([owned, owned[:1]], [owned[:2]], []):
        with pytest.raises(InternalError):
            pool.check_integrity(owners)
