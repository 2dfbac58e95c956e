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
    """A sequence of full blocks; block i holds the prefix content[: i + 1]. The first `computed` are registered. Or one of the blocks of a
    state, without content."""

    content: Content
    blocks: list[int]
    computed: int


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a small alphabet, so that they share prefixes, compute the same block twice and evict each other; and the states of
    some."""

    @initialize(num_blocks=st.integers(1, 12), every=st.integers(1, 3), has_states=st.booleans())
    def start(self, num_blocks: int, every: int, has_states: bool) -> None:
        self.pool = BlockPool(num_blocks, block_size=4, hash_unit=4 * every, has_states=has_states)
        self.has_states = has_states
        self.states: dict[Content, list[int]] = {}
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
        """Checks what allocate gave out: blocks without content first, then the longest unowned, each with the state that it is of."""
        plain = self.num_blocks - len(self.freed_at) - len({block for owner in self.owners for block in owner.blocks})
        for _ in blocks:
            if not plain:
                oldest = min(self.freed_at, key=lambda block: self.freed_at[block])
                of_state = next((content for content, state in self.states.items() if oldest in state), None)
                plain += self.forget(self.content_of.get(oldest) if of_state is None else of_state, is_state=of_state is not None)
            plain -= 1
        assert not self.freed_at.keys() & set(blocks)
        for block in blocks:
            assert not self.count(block)
            self.generations[block] += 1

    def forget(self, content: Content | None, *, is_state: bool = False) -> int:
        """Forgets a prefix with its state, or that alone; returns how many blocks more have no content now."""
        assert content is not None
        blocks = self.states.pop(content, [])
        if not is_state:
            block = self.block_of(content)
            assert block is not None
            del self.content_of[block]
            blocks = [*blocks, block]
        return sum(self.freed_at.pop(block, None) is not None for block in blocks)

    def freed(self, blocks: list[int]) -> None:
        """Notes those that became cached."""
        content_of = self.content_of | {block: content for content, state in self.states.items() for block in state}
        for block in reversed(blocks):
            if not self.count(block) and block in content_of:
                for each in [*self.states.get(content_of[block], []), block]:
                    if each in self.freed_at or each == block:
                        self.clock += 1
                        self.freed_at[each] = self.clock

    @precondition(lambda self: self.has_states and self.content_of)
    @rule(data=st.data(), count=st.integers(1, 3))
    def keep_state(self, data: st.DataObject, count: int) -> None:
        content = data.draw(st.sampled_from(sorted(self.content_of.values())))
        if count > self.pool.num_available:
            return
        blocks = self.pool.allocate(count)
        self.allocated(blocks)
        may_keep = self.block_of(content) is not None and len(content) % self.every == 0 and content not in self.states
        assert self.pool.keep_state(digest(content), blocks) == may_keep
        if may_keep:
            self.states[content] = blocks
        self.pool.free(blocks)
        self.freed(blocks)

    @precondition(lambda self: self.states)
    @rule(data=st.data(), what=st.sampled_from(["share", "take", "drop", "withdraw"]))
    def use_state(self, data: st.DataObject, what: str) -> None:
        content = data.draw(st.sampled_from(sorted(self.states)))
        blocks = self.states[content]
        assert self.pool.state_at(digest(content)) == blocks
        if what == "drop":
            self.pool.drop_state(digest(content))
            self.forget(content, is_state=True)
        elif what == "share":
            self.pool.share(blocks)
            self.owners.append(Owner((), list(blocks), 0))
            for block in blocks:
                self.freed_at.pop(block, None)
        elif what == "take" and not any(self.count(block) for block in blocks):
            assert self.pool.take_state(digest(content)) == blocks
            self.forget(content, is_state=True)
            self.owners.append(Owner((), list(blocks), 0))
            for block in blocks:
                self.generations[block] += 1
        # Nothing may follow on it, or chains would not be whole.
        elif what == "withdraw" and not any(known[:-1] == content for known in self.content_of.values()):
            block = self.block_of(content)
            for owner in self.owners:
                if block in owner.blocks:
                    return
            self.pool.withdraw([digest(content)])
            self.forget(content)

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
        self.freed(owner.blocks)

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
        assert known >= self.states.keys(), "a state is kept where no prefix ends"
        hashes = [digest((1,) * (i + 1)) for i in range(6)]
        assert self.pool.num_with_state(hashes) == max((len(content) for content in self.states if 0 not in content), default=0)
        boundaries = {digest(content) for content in (self.states if self.has_states else known) if len(content) % self.every == 0}
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


def test_integrity_finds_a_state_without_its_prefix() -> None:
    pool = BlockPool(6, block_size=16, hash_unit=16, has_states=True)
    owned = [*chain(pool, 1), *pool.allocate(2)]
    assert pool.keep_state(bytes([0]), owned[1:])
    pool.check_integrity([owned])
    del pool._block_of[bytes([0])]
    pool._hash_of[owned[0]] = None
    with pytest.raises(InternalError, match="where no prefix ends"):
        pool.check_integrity([owned])
