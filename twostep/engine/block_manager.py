"""Gives sequences their KV blocks and takes them back.

    found in the pool (block_pool.py) │ found in the host tier (host_tier.py) │ new
    shared with others                │ copied to new blocks of its own       │ computed

A sequence's state, where the model has one, takes blocks of the same pool: what moves, counts and frees blocks serves both. A prefix is
of use then only as far as a state was kept, which costs no copy. At some boundaries (`next_left`) the sequence goes on in other blocks:

    step n     reads S, writes S     comes to the boundary
    step n+1   reads S, writes T     S is the prefix's once this is settled; from then on the sequence has T

And one that finds S begins with a step that reads S and writes blocks of its own. Where there is no room for these, nothing is kept: it
goes on in S. (When what is kept: Pan et al., Marconi: prefix caching for the era of hybrid LLMs, 2024, section 4.1.)

Blocks are owned for the tokens there are, and one more is taken whenever the last one is full, of each group of layers (KvShape).
Whatever a planned step may read or write keeps an owner until that step is settled. Of the groups with windows a sequence leaves behind
what no token to come sees:

    group A   0 1 2 3 4 5 6 7 8      reads all
    group B   · · · · ▓ ▓ ▓ ▓ ▓      num_left = 4: the first four are others', or cached, or were never its own

A prefix is of use as far as the first groups have all of it, and those with windows what its next token reaches.

Shared blocks are never written to: of a prompt that is there to its end, the last block is
computed again, since one token at least is computed, for its logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from twostep.block_order import num_out_of_reach
from twostep.engine.batch import KvShape
from twostep.engine.block_pool import BlockPool, group_key
from twostep.engine.block_tables import BlockTables
from twostep.engine.host_tier import HostLoad, HostTier
from twostep.engine.sequence import EngineSequence, SequenceState
from twostep.engine.step_work import LeftState


class BlockManager:
    """Owns which blocks each sequence has: nothing else changes that. Not thread-safe: the engine's lock guards it, and pool and tier
    too."""

    def __init__(self, pool: BlockPool, tier: HostTier, shape: KvShape, *, hash_unit: int = 0) -> None:
        """`hash_unit`: the pool's, where there are state blocks."""
        self.pool = pool
        self.tier = tier
        self.tables = BlockTables(shape.num_groups)
        self.block_size = shape.block_size
        self._shape = shape
        self.num_state_blocks = shape.num_state_blocks
        self._unit = hash_unit
        # A sequence grows by a block of each.
        self.num_groups = shape.num_groups
        self._num_full = shape.num_full
        self._num_windowed = shape.num_windowed
        # Of the groups with windows; 0: there are none.
        self.reach = shape.reach if shape.num_windowed else 0
        # Prompt tokens looked up among cached prefixes and found there, ever; of these, those found in the host tier. What comes back after
        # giving way does not count again.
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_host_hit_tokens = 0

    def owned(self, sequence: EngineSequence) -> list[int]:
        """Returns the blocks that a sequence owns, group by group in order, those of its state last."""
        if self.num_groups == 1 and not sequence.num_left and not sequence.state_blocks:
            return sequence.blocks[0] if sequence.blocks else []
        groups = (blocks[self._first_of(group, sequence.num_left) :] for group, blocks in enumerate(sequence.blocks))
        return [*chain.from_iterable(groups), *sequence.state_blocks]

    def handed_over(self, sequence: EngineSequence) -> list[int]:
        """Returns the blocks of what was given, then those of its state, in the order in which they are handed over."""
        if not sequence.blocks:
            return []
        # As is usual, at once.
        if self.num_groups == 1 and not self.reach:
            return [*sequence.blocks[0], *sequence.state_blocks]
        places = self._shape.order(len(sequence.given)).places()
        return [*(sequence.blocks[group][column] for group, column in places), *sequence.state_blocks]

    def _first_of(self, group: int, num_left: int) -> int:
        """Returns the first block of a group, where those with windows begin at `num_left`."""
        return num_left if group >= self._num_full else 0

    def _num_left_after(self, num_tokens: int) -> int:
        """Returns how many blocks of each group with windows a sequence needs no more, which goes on after so many tokens."""
        return num_out_of_reach(num_tokens, reach=self.reach, block_size=self.block_size) if self.reach else 0

    def num_now(self, sequence: EngineSequence) -> int:
        """Returns the blocks of a group that its tokens take."""
        return -(-len(sequence.tokens) // self.block_size)

    def num_at_most(self, sequence: EngineSequence) -> int:
        """Returns the blocks that it may own at once: of all its tokens, where it has to begin anew."""
        return sequence.end_blocks * self.num_groups + self.num_state_blocks

    def num_to_admit(self, sequence: EngineSequence) -> int:
        """Returns the blocks that there must be to let it in: room for one more of each group if it will grow."""
        num_columns = self.num_now(sequence)
        reserved = sequence.state is SequenceState.RESERVED
        num_left = self._num_left_after(len(sequence.tokens) if reserved else sequence.num_found)
        num_blocks = num_columns * self.num_groups - num_left * self._num_windowed
        return num_blocks + self.num_state_blocks + (sequence.end_blocks > num_columns) * self.num_groups

    def num_to_grow(self, sequence: EngineSequence) -> int:
        """Returns how many blocks more it may come to own."""
        num_columns = sequence.num_slots // self.block_size
        to_come = max(0, sequence.end_blocks - num_columns)
        if not self.reach:
            return to_come * self.num_groups
        # Those in reach begin and end anywhere, and one is taken before another is left.
        in_reach = max(0, self.reach // self.block_size + 3 - (num_columns - sequence.num_left))
        return to_come * self._num_full + min(to_come, in_reach) * self._num_windowed

    def num_exclusive(self, sequence: EngineSequence) -> int:
        """Returns how many blocks come free with it."""
        owned = self.owned(sequence)
        return self.first_to_free([sequence], len(owned))[1]

    def first_to_free(self, sequences: Sequence[EngineSequence], wanted: int) -> tuple[list[EngineSequence], int]:
        """Returns the first of the sequences that together free `wanted` blocks, or all of them, and how many blocks they free."""
        taken: list[EngineSequence] = []
        num_uses: Counter[int] = Counter()
        num_freed = 0
        for sequence in sequences:
            if num_freed >= wanted:
                break
            taken.append(sequence)
            for block in self.owned(sequence):
                num_uses[block] += 1
                num_freed += num_uses[block] == self.pool.num_owners(block)
        return taken, num_freed

    def match(self, sequence: EngineSequence) -> int:
        """Notes what is cached now of a sequence that waits, and returns the available blocks that admitting it would use up."""
        usable = 0 if sequence.wants_scores else (len(sequence.tokens) - 1) // self.block_size
        hashes = sequence.block_hashes()[:usable]
        num_columns, cached = self._find(hashes)
        if self.num_state_blocks:
            num_known = num_columns
            while (num_with_state := self.pool.num_with_state(hashes[:num_columns])) < num_columns:
                # Where there is a state, there may be less of a window.
                num_columns, cached = self._find(hashes[:num_with_state])
            # What it computed itself before it gave way says nothing of others.
            is_new = sequence.state is SequenceState.WAITING
            sequence.num_stateless = (num_known - num_columns) * self.block_size if is_new else 0
        sequence.matched = cached
        end, sequence.matched_in_host = self._find_in_host(hashes, num_columns)
        sequence.num_found, sequence.num_matched = num_columns * self.block_size, end * self.block_size
        found = list(chain.from_iterable(cached))
        return self.num_to_admit(sequence) - len(found) + self.pool.num_unowned(found)

    def _find(self, hashes: Sequence[bytes], num_left: int | None = None) -> tuple[int, list[list[int]]]:
        """Returns how far these blocks are cached, as far as a sequence needs them that goes on after them, or that needs of the groups
        with windows those from `num_left` on; and of each group the blocks that it needs."""
        num_columns, found = len(hashes), list[list[int]]()
        for group in range(self._num_full):
            blocks = self.pool.lookup(hashes[:num_columns], group)
            num_columns = len(blocks)
            found.append(blocks)
        if not self.reach:
            return num_columns, found

        def first(count: int) -> int:
            return self._num_left_after(count * self.block_size) if num_left is None else num_left

        windowed = range(self._num_full, self.num_groups)
        column = num_columns
        while column > first(num_columns):
            column -= 1
            if any(self.pool.find(hashes[column], group) is None for group in windowed):
                # Whatever ends behind it has it in reach, too.
                num_columns = column
        in_reach = hashes[first(num_columns) : num_columns]
        return num_columns, [blocks[:num_columns] for blocks in found] + [self.pool.lookup(in_reach, group) for group in windowed]

    def _find_in_host(self, hashes: Sequence[bytes], first: int) -> tuple[int, list[list[bytes]]]:
        """Returns how far these blocks are in the host tier from the `first` on, where those found in the pool end, as far as a sequence
        needs them that goes on after them; and of each group the keys of those. None: there are none."""
        if not self.tier.num_rows:
            return first, []
        end = len(hashes)
        for group in range(self._num_full):
            end = first + self.tier.lookup(hashes[:end], first, group)
        column = end
        while self.reach and column > max(first, self._num_left_after(end * self.block_size)):
            column -= 1
            if not all(self.tier.has(hashes[column], group) for group in range(self._num_full, self.num_groups)):
                end = column
        if end <= first:
            return first, []
        firsts = [max(first, self._first_of(group, self._num_left_after(end * self.block_size))) for group in range(self.num_groups)]
        return end, [[group_key(digest, group) for digest in hashes[first:end]] for group, first in enumerate(firsts)]

    def find_reserved(self, sequence: EngineSequence) -> tuple[int, list[list[int]]]:
        """Returns how many blocks of each group of a new sequence's are cached, of those with windows as far as they will be in reach of
        the tokens after those given; and these."""
        return self._find(sequence.block_hashes(), self._num_left_after(len(sequence.tokens)))

    def admit(self, sequences: Sequence[EngineSequence], spare: int = 0) -> list[EngineSequence]:
        """Gives waiting and preempted sequences, just matched, the blocks for their tokens, and returns them. `spare`: blocks beside those
        that they need, for states that they find to stay. Where there are too few, one of them has that state for itself; those that
        found it too get nothing, and are to be matched again."""
        # All shares first: no allocation may evict what another one found.
        admitted = []
        for sequence in sequences:
            if self.num_state_blocks and sequence.num_found:
                digest = sequence.block_hashes()[sequence.num_found // self.block_size - 1]
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
            self.pool.share(chain.from_iterable(sequence.matched))
            admitted.append(sequence)
        for sequence in admitted:
            sequence.num_computed = sequence.num_planned = sequence.num_matched
            is_new = sequence.state is SequenceState.WAITING
            if is_new:
                self._count_found(sequence, sequence.num_matched, sequence.num_matched - sequence.num_found)
            num_left = self._num_left_after(sequence.num_found)
            self._fill(sequence, sequence.num_found // self.block_size, sequence.matched, num_left)
            end = sequence.num_matched // self.block_size
            self.tier.load(sequence, sequence.num_registered, end, sequence.matched_in_host, is_new=is_new)
            sequence.matched, sequence.matched_in_host = [], ()
        return admitted

    def reserve(self, sequence: EngineSequence, num_columns: int, cached: list[list[int]]) -> None:
        """Gives a new sequence the `cached` blocks, just found in the pool, and others for the rest of its tokens."""
        self.pool.share(chain.from_iterable(cached))
        # Were what a window leaves out to be computed after all, there would be no place for it.
        end, in_host = (num_columns, []) if self.reach else self._find_in_host(sequence.block_hashes(), num_columns)
        self._count_found(sequence, end * self.block_size, (end - num_columns) * self.block_size)
        self._fill(sequence, num_columns, cached, self._num_left_after(len(sequence.tokens)))
        self.tier.load(sequence, num_columns, end, in_host, is_new=True)

    def _fill(self, sequence: EngineSequence, num_found: int, found: list[list[int]], num_left: int) -> None:
        """Takes new blocks after those found, which end with the first `num_found` of each group."""
        num_columns = self.num_now(sequence)
        sequence.num_registered, sequence.num_left = num_found, num_left
        num_owned = [num_columns - self._first_of(group, num_left) for group in range(self.num_groups)]
        new = self.pool.allocate(sum(num_owned) - sum(map(len, found)))
        if not sequence.state_blocks:
            sequence.state_blocks = self.pool.allocate(self.num_state_blocks)
        sequence.table = self.tables.take()
        sequence.blocks = [[0] * self._first_of(group, num_left) for group in range(self.num_groups)]
        taken = 0
        for there, count, blocks in zip(found, num_owned, sequence.blocks, strict=True):
            blocks += there
            blocks += new[taken : taken + count - len(there)]
            taken += count - len(there)
        self._write(sequence, 0)

    def _count_found(self, sequence: EngineSequence, num_cached: int, num_in_host: int) -> None:
        """Counts the tokens of a new sequence whose KV was there; the last `num_in_host` of them count once they are loaded."""
        sequence.num_cached = num_cached
        self.num_queried_tokens += len(sequence.tokens)
        self.num_hit_tokens += num_cached - num_in_host
        self.tier.asked(sequence.block_hashes())

    def extend(self, sequence: EngineSequence, count: int) -> None:
        """Gives a running sequence so many blocks more of each group."""
        new = self.pool.allocate(count * self.num_groups)
        first = len(sequence.blocks[0])
        for group, blocks in enumerate(sequence.blocks):
            blocks += new[group * count : (group + 1) * count]
        self._write(sequence, first)

    def _write(self, sequence: EngineSequence, first: int) -> None:
        """Notes a sequence's blocks from the `first` of each group on."""
        sequence.num_slots = len(sequence.blocks[0]) * self.block_size
        for group, blocks in enumerate(sequence.blocks):
            self.tables.write(sequence.table, group, first, blocks[first:])

    def register(self, sequence: EngineSequence, exchanged: list[int]) -> None:
        """Makes blocks that have become full findable. `exchanged` takes those that a launched step reads and the sequence has given up
        for others of the same content."""
        num_full = sequence.num_computed // self.block_size
        if num_full == sequence.num_registered or sequence.hasher is None or sequence.loading or not sequence.confirmed:
            return
        hashes = sequence.block_hashes()
        for group, blocks in enumerate(sequence.blocks):
            first = max(sequence.num_registered, self._first_of(group, sequence.num_left))
            for i, block in enumerate(blocks[first:num_full], first):
                if sequence.num_steps:
                    self.pool.share((block,))  # a launched step reads it, whatever the sequence owns from now on
                found = self.pool.register(block, hashes[i], i, group, exchange=not sequence.leaves_early)
                if sequence.num_steps and found == block:
                    self.pool.free((block,))
                elif sequence.num_steps:
                    exchanged.append(block)
                if found != block:
                    blocks[i] = found
                    self.tables.write(sequence.table, group, i, [found])
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
        """Frees blocks of a running sequence that are out of reach of all tokens to come; findable ones stay so for a while. Of one that is
        handed over these are none that others read."""
        num_behind = self._num_left_after(sequence.num_computed)
        if sequence.hasher is not None:
            num_behind = min(num_behind, sequence.num_registered)
        self._leave(sequence, num_behind)

    def _leave(self, sequence: EngineSequence, num_behind: int) -> None:
        """Frees the first blocks of the groups with windows."""
        if num_behind > sequence.num_left:
            for blocks in sequence.blocks[self._num_full :]:
                self.pool.free(blocks[sequence.num_left : num_behind])
            sequence.num_left = num_behind

    def loaded(self, load: HostLoad, *, ok: bool) -> None:
        """Notes that what was found in the host tier is copied. Not `ok`: it is not, and is to be computed."""
        self.tier.loaded(load, ok=ok)
        sequence, num_intact = load.sequence, load.first * self.block_size
        if ok and sequence.state is SequenceState.RUNNING:
            # Of what was loaded, nothing that the next token does not reach.
            self._leave(sequence, self._num_left_after(load.end * self.block_size))
        if ok and load.is_new:
            num_tokens = (load.end - load.first) * self.block_size
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
        self.pool.free(self.owned(sequence))
        if sequence.table >= 0:
            self.tables.give_back(sequence.table, len(sequence.blocks[0]))
        sequence.table = -1
        sequence.blocks, sequence.state_blocks = [], ()
        sequence.num_left = 0
        sequence.num_slots = 0
        sequence.num_computed = sequence.num_planned = sequence.num_registered = 0
        sequence.num_found = sequence.num_matched = sequence.num_stateless = 0

    def withdraw(self, sequence: EngineSequence) -> None:
        """Lets no other sequence find what it computed: that is likely not finite."""
        hashes = sequence.block_hashes()
        self.pool.withdraw(hashes)
        self.tier.withdraw(hashes)
        sequence.hasher = None
