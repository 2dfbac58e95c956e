"""Who joins the running sequences next, and with which blocks: some found in the pool, some in the host tier below it, some copied back
after the sequence gave way, the others new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge

import numpy as np

from twostep.engine.block_pool import BlockCopy, BlockPool
from twostep.engine.host_tier import HostLoad, HostTier
from twostep.engine.preemptor import Preemptor
from twostep.engine.scheduler import Waiting
from twostep.engine.sequence import EngineSequence, SequenceState
from twostep.engine.step_work import BlockLoad
from twostep.request_class import RequestClass


def num_blocks_now(sequence: EngineSequence, block_size: int) -> int:
    """For the tokens it has."""
    return -(-len(sequence.tokens) // block_size)


def num_blocks_in_the_end(sequence: EngineSequence, block_size: int) -> int:
    return -(-sequence.num_kv_tokens // block_size)


def grows(sequence: EngineSequence, block_size: int) -> bool:
    """Whether it will need more blocks than for its tokens now: then it is let in with room for one more."""
    return num_blocks_in_the_end(sequence, block_size) > num_blocks_now(sequence, block_size)


class Admission:
    """Part of the ledger: the engine's lock guards it. `waiting` are the prompts that were never admitted, in the order they came."""

    def __init__(
        self, pool: BlockPool, tier: HostTier, preemptor: Preemptor, running: dict[str, EngineSequence], *, block_size: int
    ) -> None:
        """`running` is the ledger's own table: who is admitted is put into it."""
        self.waiting: dict[str, EngineSequence] = {}
        # Prompt tokens looked up among cached prefixes and found there, ever; of these, those found in the host tier. Who comes back after
        # giving way does not count again.
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_host_hit_tokens = 0
        self._pool = pool
        self._tier = tier
        self._preemptor = preemptor
        self._running = running
        self._block_size = block_size

    def candidates(self, now: float, ageing_s: float, *, below: int) -> Iterator[Waiting[EngineSequence]]:
        """Those of ranks below `below`, by rank; of one rank, preempted sequences, then waiting prompts, in the order they came; with what
        is cached or saved of them now. One token at least is computed, for its logits: if all blocks are cached, the last one is copied
        to be written to, or left out where there is no room for both."""
        size = self._block_size
        for sequence in self._by_rank(now, ageing_s):
            if sequence.patience.rank >= below:
                return
            num_blocks = num_blocks_now(sequence, size) + grows(sequence, size)
            hashes = sequence.block_hashes()
            cached = self._pool.lookup(hashes)
            num_matched = min(len(cached) * size, len(sequence.tokens) - 1)
            # What is copied from the host tier is the sequence's own: its last block is left out, not written to, if all are there.
            in_host = self._tier.lookup(hashes[: (len(sequence.tokens) - 1) // size], len(cached)) if sequence.saved is None else ()
            if sequence.saved is not None and sequence.saved.num_tokens > num_matched:
                num_matched = sequence.saved.num_tokens
            cost = num_blocks - min(num_matched // size, len(cached)) + self._pool.num_unowned(cached)
            if num_matched < len(cached) * size and (num_matched % size == 0 or cost > self._pool.num_available):
                cached.pop()
                num_matched = len(cached) * size
                cost = num_blocks - len(cached) + self._pool.num_unowned(cached)
            if in_host:
                num_matched = (len(cached) + len(in_host)) * size
            sequence.matched = cached
            sequence.matched_in_host = in_host
            sequence.num_matched = num_matched
            yield Waiting(sequence, len(sequence.tokens) - num_matched, cost, num_matched, sequence.patience.rank)

    def _by_rank(self, now: float, ageing_s: float) -> Iterator[EngineSequence]:
        """Lazy: a class waits in the order it came, so its first one has the lowest rank."""

        def place(sequence: EngineSequence) -> tuple[int, bool, int]:
            return sequence.patience.rank, sequence.state is SequenceState.WAITING, sequence.arrival

        def queue(request_class: RequestClass) -> Iterator[EngineSequence]:
            for sequence in self.waiting.values():
                if sequence.request.request_class is request_class:
                    sequence.patience.wait(now, ageing_s)
                    yield sequence

        # Who has no mask yet could not sample; it is a moment.
        preempted = [s for s in self._preemptor.waiting.values() if s.constraint is None or s.constraint.mask is not None]
        for sequence in preempted:
            sequence.patience.wait(now, ageing_s)
        return merge(sorted(preempted, key=place), *map(queue, RequestClass), key=place)

    def admit(self, admitted: Sequence[EngineSequence]) -> tuple[list[BlockCopy], list[BlockLoad]]:
        """Moves preempted sequences and waiting prompts to the running ones, with blocks for their tokens."""
        # All shares first: no allocation may evict what another one found.
        for sequence in admitted:
            self._pool.share(sequence.matched)
        copies: list[BlockCopy] = []
        loads: list[BlockLoad] = []
        for sequence in admitted:
            blocks = sequence.matched
            num_found = len(blocks)
            sequence.num_computed = sequence.num_planned = sequence.num_matched
            sequence.num_registered = min(sequence.num_matched // self._block_size, num_found)
            if sequence.num_registered < num_found:
                copy = self._pool.copy_on_write(blocks[-1])
                assert copy is not None, "a cached block is never written to"
                copies.append(copy)
                blocks[-1] = copy.target
            blocks.extend(self._pool.allocate(num_blocks_now(sequence, self._block_size) - len(blocks)))
            sequence.blocks = np.array(blocks, np.int32)
            sequence.matched = []
            in_host, sequence.matched_in_host = sequence.matched_in_host, ()
            self._tier.load(sequence, num_found, in_host, is_new=sequence.state is SequenceState.WAITING)
            if sequence.state is SequenceState.PREEMPTED:
                del self._preemptor.waiting[sequence.seq_id]
                loads += self._loads(sequence, num_found)
            else:
                del self.waiting[sequence.seq_id]
                self.found(sequence, sequence.num_matched, num_in_host=len(in_host) * self._block_size)
            sequence.state = SequenceState.RUNNING
            self._running[sequence.seq_id] = sequence
        return copies, loads

    def found(self, sequence: EngineSequence, num_cached: int, *, num_in_host: int) -> None:
        """So many tokens' KV of a sequence that comes new was there, the last of them in the host tier: they count once copied."""
        sequence.num_cached = num_cached
        self.num_queried_tokens += len(sequence.tokens)
        self.num_hit_tokens += num_cached - num_in_host
        self._tier.asked(sequence.block_hashes())

    def loaded(self, load: HostLoad) -> None:
        """What was found in the host tier is copied."""
        if load.is_new:
            num_tokens = len(load.blocks) * self._block_size
            self.num_hit_tokens += num_tokens
            self.num_host_hit_tokens += num_tokens

    def _loads(self, sequence: EngineSequence, num_found: int) -> list[BlockLoad]:
        """What is to be copied back of a preempted sequence, whose first `num_found` blocks were found in the pool."""
        saved, sequence.saved = sequence.saved, None
        if saved is None:
            return []
        num_saved = len(saved.rows)
        if num_found >= num_saved or sequence.num_matched != saved.num_tokens:
            self._preemptor.release(saved)
            return []
        return [BlockLoad(saved=saved, first=num_found, blocks=sequence.blocks[num_found:num_saved].tolist())]
