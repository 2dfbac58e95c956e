"""Gives sequences their KV blocks and takes them back.

    found in the pool (block_pool.py) │ found in the host tier (host_tier.py) │ new
    shared with others                │ copied to new blocks of its own       │ computed

A sequence's state, where the model has one, takes blocks of the same pool: what moves, counts and frees blocks serves both. A prefix is
of use then only as far as a state was kept, which costs no copy. At some boundaries (`next_left`) the sequence goes on in other blocks:

    step n     reads S, writes S     comes to the boundary
    step n+1   reads S, writes T     S is the prefix's once this is settled; from then on the sequence has T

And one that finds S begins with a step that reads S and writes blocks of its own. Where there is no room for these, nothing is kept: it
goes on in S. (When what is kept: Pan et al., Marconi: prefix caching for the era of hybrid LLMs, 2024, section 4.1.)

Blocks are owned for the tokens there are, and one more is taken whenever the last one is full. Whatever a planned step may read or write
keeps an owner until that step is settled. Where all layers have windows, a sequence that runs leaves behind what no token to come sees:

    blocks    0 1 2 3 4 5 6 7 8      num_left = 4: the first four are others', or cached; they keep their places in the table
              · · · · ▓ ▓ ▓ ▓ ▓

Shared blocks are never written to: of a prompt that is there to its end, the last block is
computed again, since one token at least is computed, for its logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from twostep.engine.block_pool import BlockPool
from twostep.engine.block_tables import BlockTables
from twostep.engine.host_tier import HostLoad, HostTier
from twostep.engine.sequence import EngineSequence, SequenceState
from twostep.engine.step_work import LeftState


class BlockManager:
    """Owns which blocks each sequence has: nothing else changes that. Not thread-safe: the engine's lock guards it, and pool and tier
    too."""

    def __init__(
        self, pool: BlockPool, tier: HostTier, *, block_size: int, hash_unit: int = 0, num_state_blocks: int = 0, reach: int = 0
    ) -> None:
        """`hash_unit`: the pool's, where there are state blocks. `reach`: of the runner."""
        self.pool = pool
        self.tier = tier
        self.tables = BlockTables()
        self.block_size = block_size
        self.num_state_blocks = num_state_blocks
        self._unit = hash_unit
        self.reach = reach
        # Prompt tokens looked up among cached prefixes and found there, ever; of these, those found in the host tier. What comes back after
        # giving way does not count again.
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_host_hit_tokens = 0

    def num_now(self, sequence: EngineSequence) -> int:
        """Returns the blocks that its tokens take."""
        return -(-len(sequence.tokens) // self.block_size)

    def num_to_admit(self, sequence: EngineSequence) -> int:
        """Returns the blocks that there must be to let it in: room for one more if it will grow."""
        num_blocks = self.num_now(sequence)
        return num_blocks + self.num_state_blocks + (sequence.end_blocks > num_blocks)

    def num_to_grow(self, sequence: EngineSequence) -> int:
        """Returns how many blocks more it may come to own."""
        most = sequence.end_blocks
        if self.reach and not sequence.hold:
            # Those in reach begin and end anywhere, and one is taken before another is left.
            most = min(most, self.reach // self.block_size + 3)
        return max(0, most - (len(sequence.blocks) - sequence.num_left))

    def num_exclusive(self, sequence: EngineSequence) -> int:
        """Returns how many blocks come free with it."""
        return self.first_to_free([sequence], len(sequence.owned))[1]

    def first_to_free(self, sequences: Sequence[EngineSequence], wanted: int) -> tuple[list[EngineSequence], int]:
        """Returns the first of the sequences that together free `wanted` blocks, or all of them, and how many blocks they free."""
        taken: list[EngineSequence] = []
        num_uses: Counter[int] = Counter()
        num_freed = 0
        for sequence in sequences:
            if num_freed >= wanted:
                break
            taken.append(sequence)
            for block in sequence.owned:
                num_uses[block] += 1
                num_freed += num_uses[block] == self.pool.num_owners(block)
        return taken, num_freed

    def match(self, sequence: EngineSequence) -> int:
        """Notes what is cached now of a sequence that waits, and returns the available blocks that admitting it would use up."""
        usable = 0 if sequence.wants_scores else (len(sequence.tokens) - 1) // self.block_size
        hashes = sequence.block_hashes()[:usable]
        cached = self.pool.lookup(hashes)
        if self.num_state_blocks:
            known, cached = cached, cached[: self.pool.num_with_state(hashes[: len(cached)])]
            # What it computed itself before it gave way says nothing of others.
            is_new = sequence.state is SequenceState.WAITING
            sequence.num_stateless = (len(known) - len(cached)) * self.block_size if is_new else 0
        sequence.matched = cached
        sequence.matched_in_host = self.tier.lookup(hashes, len(cached))
        sequence.num_matched = (len(cached) + len(sequence.matched_in_host)) * self.block_size
        return self.num_to_admit(sequence) - len(cached) + self.pool.num_unowned(cached)

    def admit(self, sequences: Sequence[EngineSequence], spare: int = 0) -> list[EngineSequence]:
        """Gives waiting and preempted sequences, just matched, the blocks for their tokens, and returns them. `spare`: blocks beside those
        that they need, for states that they find to stay. Where there are too few, one of them has that state for itself; those that
        found it too get nothing, and are to be matched again."""
        # All shares first: no allocation may evict what another one found.
        admitted = []
        for sequence in sequences:
            if self.num_state_blocks and sequence.matched:
                digest = sequence.block_hashes()[len(sequence.matched) - 1]
                state = self.pool.state_at(digest)
                if not state:
                    continue
                # The blocks of a state that others read are no room for it.
                num_kept = self.pool.num_unowned(state)
                if num_kept > max(0, spare):
                    sequence.state_blocks = self.pool.take_state(digest)
                else:
                    spare -= num_kept
                    self.pool.share(state)
                    sequence.state_source = state
            self.pool.share(sequence.matched)
            admitted.append(sequence)
        for sequence in admitted:
            sequence.num_computed = sequence.num_planned = sequence.num_matched
            is_new = sequence.state is SequenceState.WAITING
            if is_new:
                self._count_found(sequence, sequence.num_matched, len(sequence.matched_in_host))
            self._fill(sequence, sequence.matched, sequence.matched_in_host, is_new=is_new)
            sequence.matched, sequence.matched_in_host = [], ()
        return admitted

    def reserve(self, sequence: EngineSequence, cached: list[int]) -> None:
        """Gives a new sequence the `cached` blocks, just found in the pool, and others for the rest of its tokens."""
        self.pool.share(cached)
        in_host = self.tier.lookup(sequence.block_hashes(), len(cached))
        self._count_found(sequence, (len(cached) + len(in_host)) * self.block_size, len(in_host))
        self._fill(sequence, cached, in_host, is_new=True)

    def _fill(self, sequence: EngineSequence, found: list[int], in_host: Sequence[bytes], *, is_new: bool) -> None:
        """Takes new blocks after those found, some of them to be loaded from the host tier."""
        sequence.num_registered = len(found)
        new = self.pool.allocate(self.num_now(sequence) - len(found))
        if not sequence.state_blocks:
            sequence.state_blocks = self.pool.allocate(self.num_state_blocks)
        sequence.table = self.tables.take()
        self._own(sequence, found + new)
        self.tier.load(sequence, len(found), in_host, is_new=is_new)

    def _count_found(self, sequence: EngineSequence, num_cached: int, num_in_host: int) -> None:
        """Counts the tokens of a new sequence whose KV was there; those of the last `num_in_host` blocks count once they are loaded."""
        sequence.num_cached = num_cached
        self.num_queried_tokens += len(sequence.tokens)
        self.num_hit_tokens += num_cached - num_in_host * self.block_size
        self.tier.asked(sequence.block_hashes())

    def extend(self, sequence: EngineSequence, count: int) -> None:
        """Gives a running sequence more blocks."""
        self._own(sequence, self.pool.allocate(count))

    def _own(self, sequence: EngineSequence, blocks: list[int]) -> None:
        """Puts blocks after those of a sequence."""
        first = len(sequence.blocks)
        sequence.blocks += blocks
        sequence.num_slots = len(sequence.blocks) * self.block_size
        self.tables.write(sequence.table, first, blocks)

    def register(self, sequence: EngineSequence, exchanged: list[int]) -> None:
        """Makes blocks that have become full findable. `exchanged` takes those that a launched step reads and the sequence has given up
        for others of the same content."""
        num_full = sequence.num_computed // self.block_size
        if num_full == sequence.num_registered or sequence.hasher is None or sequence.loading or not sequence.confirmed:
            return
        hashes = sequence.block_hashes()
        for i, block in enumerate(sequence.blocks[sequence.num_registered : num_full], sequence.num_registered):
            if sequence.num_steps:
                self.pool.share((block,))  # a launched step reads it, whatever the sequence owns from now on
            found = self.pool.register(block, hashes[i], i, exchange=not sequence.leaves_early)
            if sequence.num_steps and found == block:
                self.pool.free((block,))
            elif sequence.num_steps:
                exchanged.append(block)
            if found != block:
                sequence.blocks[i] = found
                self.tables.write(sequence.table, i, [found])
        sequence.num_registered = num_full

    def next_left(self, sequence: EngineSequence, after: int) -> int:
        """Returns at how many of its tokens, more than `after`, it leaves its state to its prefix next: where it parts from what others
        have computed, at the last boundary before its last token, and from there on at each boundary that it comes to."""
        parting, last = (n // self._unit * self._unit for n in (sequence.num_matched + sequence.num_stateless, len(sequence.tokens) - 1))
        return next((n for n in (parting, last) if n > after), (after // self._unit + 1) * self._unit)

    def num_to_stop(self, sequence: EngineSequence, start: int, count: int) -> int:
        """Returns how many of the `count` tokens after the first `start` a step may compute: none beyond where the state is left."""
        if not self.num_state_blocks or sequence.hasher is None:
            return count
        return min(count, self.next_left(sequence, start) - start)

    def may_leave_state(self, sequence: EngineSequence) -> bool:
        """Returns whether what its planned steps come to is a state that its prefix should have, and has not."""
        num_tokens = sequence.num_planned
        if not num_tokens or num_tokens % self._unit or sequence.hasher is None or not sequence.confirmed or sequence.state_source:
            return False
        if self.next_left(sequence, num_tokens - 1) != num_tokens:
            return False
        return not self.pool.state_at(sequence.block_hashes()[num_tokens // self.block_size - 1])

    def leave_state(self, sequence: EngineSequence) -> LeftState:
        """Gives it other blocks to go on in. What it has left is to be kept (`keep_state`) when the step that goes on is settled."""
        sequence.state_source, sequence.state_blocks = sequence.state_blocks, self.pool.allocate(self.num_state_blocks)
        return LeftState(sequence, sequence.num_planned, sequence.state_source)

    def keep_state(self, left: LeftState) -> None:
        """Makes it findable, if its prefix is. Of what a sequence has come by in its answer, only the last is kept."""
        sequence, num_tokens, blocks = left
        if sequence.hasher is None or not sequence.confirmed or not 0 < num_tokens <= sequence.num_registered * self.block_size:
            return
        digest = sequence.block_hashes()[num_tokens // self.block_size - 1]
        if self.pool.keep_state(digest, blocks) and num_tokens >= len(sequence.given):
            if sequence.state_kept is not None:
                self.pool.drop_state(sequence.state_kept)
            sequence.state_kept = digest

    def leave(self, sequence: EngineSequence) -> None:
        """Frees blocks of a running sequence that are out of reach of all tokens to come; findable ones stay so for a while. One that is
        handed over keeps all: they are read by others."""
        num_behind = max(0, sequence.num_computed + 1 - self.reach) // self.block_size
        if sequence.hasher is not None:
            num_behind = min(num_behind, sequence.num_registered)
        if num_behind > sequence.num_left and not sequence.hold:
            self.pool.free(sequence.blocks[sequence.num_left : num_behind])
            sequence.num_left = num_behind

    def loaded(self, load: HostLoad, *, ok: bool) -> None:
        """Notes that what was found in the host tier is copied. Not `ok`: it is not, and is to be computed."""
        self.tier.loaded(load, ok=ok)
        sequence, num_intact = load.sequence, load.first * self.block_size
        if ok and load.is_new:
            num_tokens = len(load.blocks) * self.block_size
            self.num_hit_tokens += num_tokens
            self.num_host_hit_tokens += num_tokens
        elif not ok:
            sequence.num_cached = min(sequence.num_cached, num_intact)
            if sequence.state is SequenceState.RUNNING:
                sequence.num_computed = sequence.num_planned = num_intact
            else:
                sequence.num_intact = num_intact

    def free(self, sequence: EngineSequence) -> None:
        """Takes all its blocks. It begins anew, or from what is findable of it."""
        if sequence.state_blocks and sequence.num_planned == sequence.num_computed and not sequence.num_computed % self._unit:
            self.keep_state(LeftState(sequence, sequence.num_computed, sequence.state_blocks))
        self.pool.free(sequence.owned)
        if sequence.table >= 0:
            self.tables.give_back(sequence.table, len(sequence.blocks))
        sequence.table = -1
        sequence.blocks, sequence.state_blocks = [], ()
        sequence.num_left = 0
        sequence.num_slots = 0
        sequence.num_computed = sequence.num_planned = sequence.num_registered = 0
        sequence.num_matched = sequence.num_stateless = 0

    def withdraw(self, sequence: EngineSequence) -> None:
        """Lets no other sequence find what it computed: that is likely not finite."""
        hashes = sequence.block_hashes()
        self.pool.withdraw(hashes)
        self.tier.withdraw(hashes)
        sequence.hasher = None
