"""The block pool against a naive model that remembers everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
    copying: list[int] = field(default_factory=list)


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

    # ---- the model --------------------------------------------------------------------------------------------------

    def count(self, block: int) -> int:
        return sum(owner.blocks.count(block) + owner.copying.count(block) for owner in self.owners)

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

    def unowned(self, block: int) -> bool:
        return not any(block in owner.blocks or block in owner.copying for owner in self.owners)

    def allocated(self, blocks: list[int]) -> None:
        """Checks what allocate gave out: blocks without content first, then the longest unowned."""
        plain = self.num_blocks - len(self.freed_at) - len({b for o in self.owners for b in (*o.blocks, *o.copying)})
        evicted = sorted(self.freed_at, key=lambda block: self.freed_at[block])[: max(0, len(blocks) - plain)]
        assert sorted(block for block in blocks if block in self.freed_at) == sorted(evicted)
        for block in evicted:
            del self.freed_at[block]
            del self.content_of[block]
        for block in blocks:
            assert self.unowned(block)
            assert self.pool.generation(block) == self.generations[block] + 1
            self.generations[block] += 1

    def let_go(self, blocks: list[int]) -> None:
        self.pool.free(blocks)
        for block in reversed(blocks):
            if self.unowned(block) and block in self.content_of:
                self.clock += 1
                self.freed_at[block] = self.clock

    # ---- what an engine does ----------------------------------------------------------------------------------------

    @rule(content=st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), spare=st.integers(0, 2))
    def take(self, content: Content, spare: int) -> None:
        found = self.pool.lookup([digest(content[: i + 1]) for i in range(len(content))])
        assert found == self.longest(content)
        room = self.pool.num_available - self.pool.num_unowned(found)
        needed = len(content) + spare - len(found)
        if needed > room:
            before = self.pool.num_available
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

    @precondition(lambda self: any(owner.computed for owner in self.owners) and self.pool.num_available)
    @rule(data=st.data())
    def write_to_shared(self, data: st.DataObject) -> None:
        """A tail that is registered is written to: the owner takes a copy."""
        owner = data.draw(st.sampled_from([owner for owner in self.owners if owner.computed]))
        index = owner.computed - 1
        copy = self.pool.copy_on_write(owner.blocks[index])
        assert copy is not None
        assert copy.source == owner.blocks[index]
        self.allocated([copy.target])
        owner.copying.insert(0, copy.source)  # in the sequence's own order: tails go first
        owner.blocks[index] = copy.target
        owner.computed = index
        # Only its head is still what it was; what follows is no longer this content.
        tail = owner.blocks[index + 1 :]
        owner.blocks, owner.content = owner.blocks[: index + 1], owner.content[: index + 1]
        self.let_go(tail)

    @precondition(lambda self: any(owner.copying for owner in self.owners))
    @rule()
    def copied(self) -> None:
        for owner in self.owners:
            done, owner.copying = owner.copying, []
            self.let_go(done)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        done, owner.copying = owner.copying, []
        self.let_go(done)
        blocks, owner.blocks = owner.blocks, []
        self.owners.remove(owner)
        self.let_go(blocks)

    @rule()
    def take_delta(self) -> None:
        delta = self.pool.take_delta()
        assert not set(delta.added) & self.mirror
        assert set(delta.removed) <= self.mirror
        assert len(delta.added) <= self.num_blocks
        assert len(delta.removed) <= self.num_blocks
        self.mirror = (self.mirror | set(delta.added)) - set(delta.removed)
        assert self.mirror == set(self.pool.findable())

    # ---- always -----------------------------------------------------------------------------------------------------

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity([*(o.blocks for o in self.owners), *(o.copying for o in self.owners)])
        assert [self.pool.num_owners(b) for b in range(self.num_blocks)] == [self.count(b) for b in range(self.num_blocks)]
        assert self.pool.num_cached == len(self.freed_at)
        assert self.pool.num_available == sum(self.unowned(b) for b in range(self.num_blocks))
        assert self.pool.num_available == self.pool.num_free + self.pool.num_cached

    @invariant()
    def generations_are_counted(self) -> None:
        assert self.pool.generations(range(self.num_blocks)) == self.generations

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


def test_an_unused_prefix_is_evicted_tail_first() -> None:
    pool = BlockPool(4, block_size=16, hash_unit=16)
    blocks = chain(pool, 4)
    pool.free(blocks)
    pool.allocate(2)
    assert pool.lookup([bytes([i]) for i in range(4)]) == blocks[:2]


def test_the_delta_is_net() -> None:
    pool = BlockPool(2, block_size=16, hash_unit=32)
    pool.free(chain(pool, 2))
    assert pool.take_delta().added == [b"\x01"], "only hash-unit boundaries are announced"
    pool.free(pool.allocate(2))
    pool.free(chain(pool, 2))
    delta = pool.take_delta()
    assert (delta.added, delta.removed) == ([], []), "removed and added again is no change"
    pool.allocate(2)
    assert pool.take_delta().removed == [b"\x01"]


def test_writing_to_a_block_of_one_s_own_needs_no_copy() -> None:
    pool = BlockPool(2, block_size=16, hash_unit=16)
    (block,) = pool.allocate(1)
    assert pool.copy_on_write(block) is None


def test_a_generation_is_a_new_content_and_wraps() -> None:
    pool = BlockPool(2, block_size=16, hash_unit=16)
    blocks = chain(pool, 2)
    before = pool.generations(blocks)
    pool.free(blocks)
    pool.share(blocks)
    assert pool.generations(blocks) == before, "the content is the same"
    pool.free(blocks)
    pool._generations = [2**32 - 1, 2**32 - 1]
    pool._num_given = sum(pool._generations)
    assert pool.generations(pool.allocate(2)) == [0, 0]
    pool.check_integrity([[0, 1]])


def break_count(pool: BlockPool) -> None:
    pool._num_owners[0] += 1


def break_free_list(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def break_lru(pool: BlockPool) -> None:
    pool._lru.popitem()


def break_hash(pool: BlockPool) -> None:
    pool._block_of[b"another"] = 0


def break_free_hash(pool: BlockPool) -> None:
    pool._hash_of[pool._free[0]] = b"left behind"


def break_generation(pool: BlockPool) -> None:
    pool._generations[4] += 1


@pytest.mark.parametrize("damage", [break_count, break_free_list, break_lru, break_hash, break_free_hash, break_generation])
def test_integrity_finds_damage(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(6, block_size=16, hash_unit=16)
    owned = chain(pool, 3)
    pool.free(owned[2:])
    pool.check_integrity([owned[:2]])
    damage(pool)
    with pytest.raises(InternalError):
        pool.check_integrity([owned[:2]])


def test_integrity_finds_an_owner_who_is_not_counted() -> None:
    pool = BlockPool(6, block_size=16, hash_unit=16)
    owned = chain(pool, 3)
    with pytest.raises(InternalError):
        pool.check_integrity([owned, owned[:1]])
