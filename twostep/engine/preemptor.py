"""Gives running sequences their next blocks, and makes those give way, where none is left, that are least urgent and arrived last.

    RUNNING ──give way──▶ in launched steps still ──settle──┬─ recompute ─────────────────────▶ PREEMPTED: waits, oldest first
                                                            └─ swap: blocks are copied out ───▶     │
    RUNNING ◀──────────── room for it: admitted before any new prompt ──────────────────────────────┘

The policy is in preemption.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np

from twostep.engine.block_pool import BlockPool
from twostep.engine.host_blocks import HostRows
from twostep.engine.preemption import PreemptionMode, PreemptionRates, SavedBlocks, cheaper_to_swap
from twostep.engine.sequence import EngineSequence, SequenceState
from twostep.engine.step_work import BlockSave
from twostep.request_class import RequestClass

_TELLING_TOKENS = 32


def _place(sequence: EngineSequence) -> tuple[int, int]:
    """In the order of entitlement."""
    return sequence.patience.rank, sequence.arrival


class Preemptor:
    """Part of the ledger: the engine's lock guards it. `waiting` are the preempted sequences that can be admitted again, oldest first."""

    def __init__(
        self,
        pool: BlockPool,
        running: dict[str, EngineSequence],
        *,
        block_size: int,
        block_bytes: int,
        mode: PreemptionMode,
        host: HostRows,
    ) -> None:
        """`running` is the ledger's own table: who gives way is taken out of it."""
        self.waiting: dict[str, EngineSequence] = {}
        self.rates = PreemptionRates()
        self.num_preemptions = 0
        self.swapped_bytes = 0
        self._pool = pool
        self._running = running
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._mode = mode
        self._host = host
        # Of the step planned last.
        self.now = 0.0
        # Told to give way, and in launched steps still.
        self._yielding: dict[str, EngineSequence] = {}
        # Their blocks are being copied out: owned, and pinned as if by a step, until `saved`.
        self._saving: dict[str, EngineSequence] = {}
        self._to_save: list[BlockSave] = []

    @property
    def busy(self) -> bool:
        """Whether somebody is about to give blocks back."""
        return bool(self._yielding or self._saving)

    @property
    def most_urgent(self) -> int:
        """Rank of those about to give blocks back: nobody new is let in meanwhile who is not more urgent."""
        return min((s.patience.rank for s in chain(self._yielding.values(), self._saving.values())), default=len(RequestClass))

    @property
    def num_coming(self) -> int:
        """Blocks that they give back."""
        return sum(self._num_exclusive(sequence) for sequence in chain(self._yielding.values(), self._saving.values()))

    def holds_back(self, rank: int) -> bool:
        """Whether somebody as urgent as that gave way or is about to: newcomers of that rank take nothing before it."""
        return self.most_urgent <= rank or any(sequence.patience.rank <= rank for sequence in self.waiting.values())

    @property
    def num_preempted(self) -> int:
        return len(self.waiting) + sum(s.state is SequenceState.PREEMPTED for s in self._saving.values())

    @property
    def saving(self) -> Sequence[EngineSequence]:
        """Who counts one use more than it is in steps."""
        return list(self._saving.values())

    def resize(self, num_rows: int) -> None:
        """Another size of the host memory that sequences give way to. Nothing may be there."""
        assert not self._host.num_used
        self._host = HostRows(num_rows)

    # ---- growing ----------------------------------------------------------------------------------------------------

    def grow(self, sequences: Sequence[EngineSequence]) -> Sequence[EngineSequence]:
        """Those of the running sequences, in the same order, that own blocks for all their tokens, the one in flight included: they can
        be planned. The others give way, or wait for the blocks of those that do."""
        short = [(sequence, need) for sequence in sequences if (need := self._num_missing(sequence)) > 0]
        if not short:
            return sequences
        if sum(need for _, need in short) <= self._pool.num_available:
            for sequence, need in short:
                self._extend(sequence, need)
            return sequences
        stalled: set[str] = set()
        coming = self.num_coming
        spoken_for = 0
        for sequence, need in sorted(short, key=lambda pair: _place(pair[0])):
            if not sequence.is_plannable:
                continue
            while self._pool.num_available + coming - spoken_for < need and (victim := self._last_after(sequence)) is not None:
                coming += self._give_way(victim)
            if self._pool.num_available - spoken_for >= need:
                self._extend(sequence, need)
            else:
                spoken_for += need
                stalled.add(sequence.seq_id)
        return [sequence for sequence in sequences if sequence.is_plannable and sequence.seq_id not in stalled]

    def _num_missing(self, sequence: EngineSequence) -> int:
        return -(-(len(sequence.tokens) + sequence.num_pending) // self._block_size) - len(sequence.blocks)

    def _extend(self, sequence: EngineSequence, count: int) -> None:
        sequence.blocks = np.append(sequence.blocks, np.array(self._pool.allocate(count), np.int32))

    def _num_exclusive(self, sequence: EngineSequence) -> int:
        """Blocks that come free with it."""
        return sum(1 for block in sequence.blocks.tolist() if self._pool.num_owners(block) == 1)

    def _last_after(self, sequence: EngineSequence) -> EngineSequence | None:
        """Who gives way to `sequence` next: among those after it the least urgent, and of these the last to have arrived, if possible one
        that frees blocks. Prompts held for a hand-over are being read by others and never give way."""
        later = [s for s in self._running.values() if _place(s) > _place(sequence) and not s.hold and s.is_plannable]
        later.sort(key=_place, reverse=True)
        return next((s for s in later if self._num_exclusive(s)), later[0] if later else None)

    # ---- giving way -------------------------------------------------------------------------------------------------

    def make_room(self, least: int, wanted: int) -> bool:
        """The batch sequences that arrived last give way until `wanted` blocks come free, now or later; nobody, and False, if all of them
        together do not free `least`, or nothing is wanted."""
        victims: list[EngineSequence] = []
        num_uses: Counter[int] = Counter()
        num_freed = 0
        batch = [s for s in self._running.values() if s.patience.rank >= RequestClass.BATCH and not s.hold and s.is_plannable]
        for sequence in sorted(batch, key=_place, reverse=True):
            if num_freed >= wanted:
                break
            victims.append(sequence)
            for block in sequence.blocks.tolist():
                num_uses[block] += 1
                num_freed += num_uses[block] == self._pool.num_owners(block)
        if num_freed < least:
            return False
        for sequence in victims:
            self._give_way(sequence)
        return bool(victims)

    def _give_way(self, sequence: EngineSequence) -> int:
        """Now, or when the steps it is in are settled. Returns how many blocks come free later than now."""
        if not sequence.num_steps:
            return self.preempt(sequence)
        sequence.gives_way = True
        self._yielding[sequence.seq_id] = sequence
        return self._num_exclusive(sequence)

    def preempt(self, sequence: EngineSequence) -> int:
        """A running sequence that is in no step leaves the batch. Returns how many blocks come free later than now."""
        assert not sequence.num_steps
        assert not sequence.num_pending
        del self._running[sequence.seq_id]
        self._yielding.pop(sequence.seq_id, None)
        sequence.gives_way = False
        sequence.state = SequenceState.PREEMPTED
        self.num_preemptions += 1
        saved = self._room_to_save(sequence)
        if saved is None:
            self._put_back(sequence)
            return 0
        sequence.num_steps += 1
        self._saving[sequence.seq_id] = sequence
        self._to_save.append(BlockSave(sequence=sequence, blocks=sequence.blocks[: len(saved.rows)].tolist(), saved=saved))
        return self._num_exclusive(sequence)

    def drop(self, sequence: EngineSequence) -> None:
        """It has ended: it neither waits nor gives way any more, and what was saved of it is of no use. (If it is being copied out, that
        goes on.)"""
        self.waiting.pop(sequence.seq_id, None)
        self._yielding.pop(sequence.seq_id, None)
        sequence.gives_way = False
        if sequence.saved is not None:
            self.release(sequence.saved)
            sequence.saved = None

    def _room_to_save(self, sequence: EngineSequence) -> SavedBlocks | None:
        """Rows of host memory for its blocks; None: it is to be computed again."""
        num_blocks = -(-sequence.num_computed // self._block_size)
        if self._mode is PreemptionMode.RECOMPUTE or not num_blocks:
            return None
        if self._mode is PreemptionMode.AUTO and not cheaper_to_swap(
            num_tokens=sequence.num_computed, num_bytes=num_blocks * self._block_bytes, rates=self.rates
        ):
            return None
        rows = self._host.take(num_blocks)
        return None if rows is None else SavedBlocks(rows=rows, num_tokens=sequence.num_computed)

    def _put_back(self, sequence: EngineSequence) -> None:
        """Among those that wait, with no blocks."""
        self._pool.free(sequence.blocks.tolist())
        sequence.blocks = np.empty(0, np.int32)
        sequence.num_computed = sequence.num_planned = sequence.num_registered = 0
        sequence.num_matched = 0 if sequence.saved is None else sequence.saved.num_tokens
        sequence.patience.pause(self.now)
        self.waiting[sequence.seq_id] = sequence
        self.waiting = dict(sorted(self.waiting.items(), key=lambda item: item[1].arrival))

    # ---- swapping ---------------------------------------------------------------------------------------------------

    def take_saves(self) -> list[BlockSave]:
        """What is to be copied out now; then comes `saved` for each."""
        taken, self._to_save = self._to_save, []
        return taken

    def saved(self, save: BlockSave, seconds: float | None) -> None:
        """The blocks are copied out in so many seconds; None: that failed, and they are computed again. An ended sequence is left to the
        ledger."""
        sequence = save.sequence
        del self._saving[sequence.seq_id]
        sequence.num_steps -= 1
        if seconds is None or sequence.state is SequenceState.ENDED:
            self.release(save.saved)
        else:
            sequence.saved = save.saved
        if seconds is not None:
            self.copied(len(save.blocks), seconds)
        if sequence.state is not SequenceState.ENDED:
            self._put_back(sequence)

    def start_rates(self, num_blocks: int, seconds: float) -> None:
        """So many blocks were copied for a trial."""
        if seconds > 0:
            self.rates = PreemptionRates(copy_bytes_per_s=num_blocks * self._block_bytes / seconds)

    def copied(self, num_blocks: int, seconds: float) -> None:
        """So much went to the host or came back."""
        self.swapped_bytes += num_blocks * self._block_bytes
        self.rates = self.rates.with_copy(num_blocks * self._block_bytes, seconds)

    def computed(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step took so long. Only steps that are prompts for the most part say how fast those are."""
        if num_prompt_tokens >= _TELLING_TOKENS and num_prompt_tokens >= _TELLING_TOKENS * num_decodes:
            self.rates = self.rates.with_prefill(num_prompt_tokens, seconds)

    def release(self, saved: SavedBlocks) -> None:
        """Saved blocks were copied back, or nobody wants them any more."""
        self._host.give(saved.rows)
