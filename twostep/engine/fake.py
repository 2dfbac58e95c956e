"""A runner without a model: its tokens can be worked out by hand, its timing is set, and its KV is real bytes in real blocks.

The KV of a token says which token it is and where it stands; the next token is computed from what is *read back* out of the
sequence's blocks, never from the batch. A block that was lost, swapped, stale or not handed over gives a wrong token.

    next = (sum over i of token[i] * (i + 1)  +  n) mod vocab_size              n tokens, i from 0

    tokens 5, 7, 2 with a vocabulary of 100:   5*1 + 7*2 + 2*3 + 3 = 28        next is 28
    then   5, 7, 2, 28:                        25 + 28*4 + 4 = 141             next is 41
    with a window of 2                         2*3 + 28*4 + 4 = 122            next is 22: the sum is over the last two

With several groups of layers there is a sum for each, of all tokens or of those in its window, and the n-th group's counts n times.

With a state, as models have it whose layers remember without KV, the state of all tokens so far is added to that:

    state = (31 * state + token + 1) mod 2**31 - 1, from 0 on             in every state block, those read and those written

Every (layer, K/V, head) of a slot holds the same two int32, token + group and position + 1, repeated over head_dim. The sum takes
tokens from the first of these planes and positions from the last, so that a half-moved block does not pass either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import numpy.typing as npt

from twostep.engine.batch import (
    NO_TOKEN,
    Batch,
    InFlight,
    KvShape,
    LayerMark,
    LayerRange,
    PooledRows,
    Sampled,
    SamplingRow,
    ScoredRows,
    TopToken,
)
from twostep.errors import InvalidRequest

_STATE_MODULUS = 2**31 - 1


def fake_next_token(
    token_ids: Sequence[int],
    vocab_size: int,
    window: int = 0,
    *,
    stateful: bool = False,
    num_groups: int = 1,
    num_windowed: int | None = None,
) -> int:
    """Returns what FakeRunner samples after `token_ids` (where min_tokens does not forbid it)."""
    num_full = num_groups - (num_groups if num_windowed is None else num_windowed)
    state = state_after(0, token_ids) if stateful else 0
    total = len(token_ids) + state
    for group in range(num_groups):
        first = max(0, len(token_ids) - window) if window and group >= num_full else 0
        total += (group + 1) * sum(token * (i + 1) for i, token in enumerate(token_ids[first:], first))
    return total % vocab_size


def state_after(state: int, token_ids: Sequence[int]) -> int:
    """Returns the state after these tokens more."""
    for token in token_ids:
        state = (31 * state + token + 1) % _STATE_MODULUS
    return state


def fake_states(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.float32]:
    """Returns the hidden states of FakeRunner, float32 [len(token_ids), 4]: of each token what would be sampled after it, the token itself,
    how many there are up to it, and 1."""
    nexts = [fake_next_token(token_ids[: i + 1], vocab_size) for i in range(len(token_ids))]
    return np.array([[each, token, i + 1, 1] for i, (each, token) in enumerate(zip(nexts, token_ids, strict=True))], np.float32)


def next_allowed(token: int, allowed: npt.NDArray[np.int64]) -> int:
    """Returns of the allowed ids, ascending, the first from `token` on; the least one where there is none."""
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


class FakeRunner:
    """A twostep.engine.batch.Runner on numpy. Sampling parameters are ignored but for three: what a mask does not allow, and a stop id
    before `min_tokens`, is not sampled (the next higher id that may be is, modulo the vocabulary), and `logprobs` are 0.0 for the token,
    and for the k-th of the likeliest, k from 0, -k with the id k above the token's. A
    prompt's token that is k above what would have been sampled has -k, too."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 1000,
        max_model_len: int = 8192,
        step_s: float = 0.0,
        per_token_s: float = 0.0,
        num_layers: int = 1,
        num_kv_heads: int = 1,
        head_dim: int = 4,
        num_planes: int = 2,
        dtype: str = "float32",
        marks_layers: bool = False,
        broken_token: int | None = None,
        num_state_blocks: int = 0,
        generates: bool = True,
        window: int = 0,
        num_groups: int = 1,
        num_windowed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """A step takes at least `step_s + per_token_s * tokens` seconds (both may be changed at any time). Layers, planes, heads and
        head_dim only make blocks larger. After `broken_token` there is no next token (NO_TOKEN); while `broken` is set there is none in
        any row, as on a device whose memory is damaged. `window`: on how many tokens the next one depends in the last `num_windowed` of
        `num_groups` groups of layers, by default in all; 0: on all tokens. With `marks_layers` a
        step's time is spread over its layers, whose KV is written as late as any device may.
        Raises InvalidRequest if one head's slot is no multiple of 8 bytes."""
        self._shape = KvShape(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            num_planes=num_planes,
            num_state_blocks=num_state_blocks,
            num_groups=num_groups,
            num_windowed=(num_groups if num_windowed is None else num_windowed) if window else 0,
            reach=window,
        )
        if self._shape.block_bytes % (num_layers * num_planes * num_kv_heads * block_size * 8):
            raise InvalidRequest(f"head_dim {head_dim} of {dtype} is no multiple of 8 bytes; give a multiple of 4")
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self.step_s = step_s
        self.per_token_s = per_token_s
        self.broken = False
        self._broken_token = broken_token
        self.generates = generates
        # Of each group.
        self._windows = [window if group >= self._shape.num_full else 0 for group in range(num_groups)]
        self._clock = clock
        self._sleep = sleep
        self._marks_layers = marks_layers
        self._marks: Sequence[FakeMark] = ()  # of the step that runs
        self._last_token_ids: Sequence[int] = ()
        # uint8 [block, block_bytes], and the same bytes as int32 [block, layer, plane, kv_head, slot, word].
        self._bytes = np.zeros((num_blocks, self._shape.block_bytes), np.uint8)
        self._words = self._bytes.view(np.int32).reshape(num_blocks, num_layers, num_planes, num_kv_heads, block_size, -1)
        self._tokens = self._words[:, 0, 0, 0, :, 0]
        self._places = self._words[:, -1, -1, -1, :, -1]

    @property
    def kv_shape(self) -> KvShape:
        return self._shape

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def reads_shared_once(self) -> bool:
        return False

    @property
    def overlaps(self) -> bool:
        return False

    @property
    def marks_layers(self) -> bool:
        return self._marks_layers

    def launch(self, batch: Batch) -> InFlight:
        """Returns a step that runs when its result is asked for: as late as any device may."""
        marks = [FakeMark(num_layers) for num_layers in batch.mark_layers] if self._marks_layers else []
        return _FakeStep(partial(self._step, batch, marks), marks)

    def _step(self, batch: Batch, marks: Sequence[FakeMark]) -> Sampled:
        batch = batch.with_carried(self._last_token_ids)
        # What a step that fails would have sampled is carried only by rows that are over.
        self._last_token_ids = [0] * len(batch.sample_rows)
        self._marks = marks
        try:
            sampled = self.run(batch)
        except BaseException as error:
            for mark in marks:
                mark.fail(error)
            raise
        self._last_token_ids = sampled.token_ids
        return sampled

    def run(self, batch: Batch) -> Sampled:
        """Runs one step of the device, now. Nothing is carried."""
        start = self._clock()
        if self._marks:
            self._write_slowly(batch)
        else:
            self._write(batch, slice(None))
        token_ids = self._next_tokens(batch)
        if batch.state_sources is not None and batch.state_tables is not None:
            states = self._next_states(batch, batch.state_sources, batch.state_tables)
            seqs = np.searchsorted(batch.query_start, batch.sample_rows, side="right") - 1
            token_ids = [(token + states[seq]) % self._vocab_size for token, seq in zip(token_ids, seqs, strict=True)]
        masked = {} if batch.masks is None else dict(zip(batch.masks.rows.tolist(), batch.masks.allowed(self._vocab_size), strict=True))
        for i, allowed in masked.items():
            token_ids[i] = next_allowed(token_ids[i], np.flatnonzero(allowed))
        for i, row in enumerate(batch.sampling):
            if row.position < row.params.min_tokens and i not in masked:
                candidates = ((token_ids[i] + k) % self._vocab_size for k in range(self._vocab_size))
                token_ids[i] = next((token for token in candidates if token not in row.stop_ids), NO_TOKEN)
        for i in self._broken_rows(batch):
            token_ids[i] = NO_TOKEN
        sampled = Sampled(
            token_ids=token_ids,
            logprobs=[None if row.params.logprobs is None else 0.0 for row in batch.sampling],
            top_logprobs=[self._top(token, row) for token, row in zip(token_ids, batch.sampling, strict=True)],
            scores=None if batch.scored is None else self._scores(batch, batch.scored),
            pooled=None if batch.pooled is None else self._pooled(batch, batch.pooled),
        )
        pause = self.step_s + self.per_token_s * len(batch.token_ids) - (self._clock() - start)
        if pause > 0:
            self._sleep(pause)
        return sampled

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        rows = self._bytes if layers is None else self._bytes[:, self._shape.bytes_of(layers)]
        np.take(rows, np.asarray(block_ids, dtype=np.int64), axis=0, out=out, mode="clip")

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        columns = slice(None) if layers is None else self._shape.bytes_of(layers)
        self._bytes[np.asarray(block_ids, dtype=np.int64), columns] = data

    def new_host_blocks(self, count: int) -> npt.NDArray[np.uint8]:
        return np.empty((count, self._shape.block_bytes), np.uint8)

    def pin_host(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        return lambda: None

    def _write_slowly(self, batch: Batch) -> None:
        """Writes KV layer by layer, each at the end of its share of the step's time."""
        num_layers = self._shape.num_layers
        for layer in range(num_layers):
            self._compute(layer, (self.step_s + self.per_token_s * len(batch.token_ids)) / num_layers)
            self._write(batch, slice(layer, layer + 1))
            for mark in self._marks:
                if mark.num_layers == layer + 1:
                    mark.reach()

    def _compute(self, layer: int, seconds: float) -> None:
        """Does what a device does before a layer's KV is there."""
        self._sleep(seconds)

    def _write(self, batch: Batch, layers: slice) -> None:
        size = self._shape.block_size
        rows = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start))
        assert np.array_equal(batch.positions[batch.query_start[1:] - 1] + 1, batch.seq_lens), "positions and seq_lens disagree"
        for group, (tables, all_slots) in enumerate(zip(batch.block_tables, batch.slots, strict=True)):
            blocks, slots = np.divmod(all_slots, size)
            assert np.array_equal(tables[rows, batch.positions // size], blocks), "slots and block tables disagree"
            assert np.array_equal(batch.positions % size, slots), "slots and positions disagree"
            cells = (blocks, layers, slice(None), slice(None), slots)
            shape = (-1, 1, 1, 1, 1)
            self._words[(*cells, slice(0, None, 2))] = batch.token_ids.reshape(shape) + group
            self._words[(*cells, slice(1, None, 2))] = batch.positions.reshape(shape) + 1

    def _next_tokens(self, batch: Batch) -> list[int]:
        if not len(batch.sample_rows):
            return []
        size = self._shape.block_size
        totals = batch.positions[batch.sample_rows] + 1
        for group, window in enumerate(self._windows):
            blocks, num_blocks, lens = self._read_by_row(batch, group)
            values = (self._tokens[blocks].astype(np.int64) - group) * self._places[blocks]
            first = np.cumsum(num_blocks) - num_blocks
            # What lies behind a sequence's end in its last block is not its own.
            values[first + num_blocks - 1] *= np.arange(size) < (lens - (num_blocks - 1) * size)[:, None]
            if window:
                places = (np.arange(len(blocks)) - np.repeat(first, num_blocks))[:, None] * size + np.arange(size)
                values *= places >= np.repeat(lens, num_blocks)[:, None] - window
            totals = totals + (group + 1) * np.add.reduceat(values.sum(axis=1), first)
        return [int(token) for token in totals % self._vocab_size]

    def _next_states(self, batch: Batch, sources: npt.NDArray[np.int32], tables: npt.NDArray[np.int32]) -> list[int]:
        """Returns each sequence's state after the step, which it leaves in the blocks of `tables`. All those of `sources` must agree."""
        states = []
        for source, blocks, start, stop in zip(sources, tables, batch.query_start[:-1], batch.query_start[1:], strict=True):
            words = self._bytes[source].view(np.int64)
            before = int(words[0, 0]) if batch.positions[start] else 0
            # A block of another's state, or one that was not handed over, spoils all tokens to come.
            torn = bool(batch.positions[start]) and not bool((words == before).all())
            state = state_after(before, batch.token_ids[start:stop].tolist()) + torn
            self._bytes[blocks] = np.full_like(words, state).view(np.uint8)
            states.append(state)
        return states

    def _read_by_row(self, batch: Batch, group: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns a group's blocks of all rows to sample, one row's after the other's; how many each has, and how many tokens."""
        seqs = np.searchsorted(batch.query_start, batch.sample_rows, side="right") - 1
        lens = batch.positions[batch.sample_rows] + 1
        num_blocks = -(-lens // self._shape.block_size)
        used = np.arange(batch.block_tables.shape[2]) < num_blocks[:, None]
        return batch.block_tables[group, seqs][used], num_blocks, lens

    def _broken_rows(self, batch: Batch) -> Sequence[int]:
        if self.broken:
            return range(len(batch.sample_rows))
        if self._broken_token is None or not len(batch.sample_rows):
            return ()
        blocks, num_blocks, lens = self._read_by_row(batch, 0)
        of_row = np.split(self._tokens[blocks], np.cumsum(num_blocks)[:-1])
        return [i for i, tokens in enumerate(of_row) if (tokens.reshape(-1)[self._seen(int(lens[i]))] == self._broken_token).any()]

    def _seen(self, num_tokens: int) -> slice:
        """Returns what the last of so many tokens sees in the first group."""
        return slice(max(0, num_tokens - self._windows[0]) if self._windows[0] else 0, num_tokens)

    def _scores(self, batch: Batch, scored: ScoredRows) -> npt.NDArray[np.float64]:
        """Scores each token against what would have been sampled there, from KV that is read back, too."""
        values = np.empty((len(scored.rows), 2 + 2 * scored.num_top))
        seqs = np.searchsorted(batch.query_start, scored.rows, side="right") - 1
        ranks = np.arange(scored.num_top)
        for i, (row, seq, target) in enumerate(zip(scored.rows, seqs, scored.targets, strict=True)):
            num_tokens = int(batch.positions[row]) + 1
            blocks = batch.block_tables[0, seq, : -(-num_tokens // self._shape.block_size)]
            products = self._tokens[blocks].astype(np.int64) * self._places[blocks]
            predicted = int(products.reshape(-1)[self._seen(num_tokens)].sum() + num_tokens) % self._vocab_size
            above = int(target - predicted) % self._vocab_size
            values[i] = [-above, above + 1, *-ranks, *(predicted + ranks) % self._vocab_size]
        return values

    def _pooled(self, batch: Batch, pooled: PooledRows) -> npt.NDArray[np.float32]:
        """Adds up `fake_states`, of KV that is read back. A broken token has none that are finite."""
        states = np.empty((len(pooled.rows), 4), np.float32)
        seqs = np.searchsorted(batch.query_start, pooled.rows, side="right") - 1
        for i, (row, seq) in enumerate(zip(pooled.rows, seqs, strict=True)):
            num_tokens = int(batch.positions[row]) + 1
            blocks = batch.block_tables[0, seq, : -(-num_tokens // self._shape.block_size)]
            seen = self._seen(num_tokens)
            tokens = self._tokens[blocks].reshape(-1)[seen].astype(np.int64)
            places = self._places[blocks].reshape(-1)[seen]
            states[i] = [int((tokens * places).sum() + num_tokens) % self._vocab_size, tokens[-1], places[-1], 1]
            if self.broken or (tokens == self._broken_token).any():
                states[i] = np.nan
        return np.add.reduceat(states, np.cumsum(pooled.counts) - pooled.counts)

    def _top(self, token: int, row: SamplingRow) -> tuple[TopToken, ...]:
        return tuple(TopToken((token + k) % self._vocab_size, -float(k)) for k in range(row.params.logprobs or 0))


class FakeMark:
    """A twostep.engine.batch.LayerMark."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._reached: Future[None] = Future()

    def wait(self) -> None:
        self._reached.result()

    def reach(self) -> None:
        self._reached.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self._reached.done():
            self._reached.set_exception(error)


class _FakeStep:
    def __init__(self, step: Callable[[], Sampled], layer_marks: Sequence[LayerMark]) -> None:
        self._step = step
        self.layer_marks = layer_marks

    def result(self) -> Sampled:
        return self._step()
