"""How rank 0 tells the other ranks of its worker what to do: data in shared memory, a few bytes on a socket to wake them.

    step memory      | done: int64 per rank | slot 0 | slot 1 | slot 2 | slot 3 |     a batch's arrays, one slot a step, round and round
    steps socket     rank 0 → rank: one message a command                             order of the commands = order on every device
    block memory     | ids: int64 | rank 0's bytes | rank 1's bytes | …               KV blocks on their way
    blocks socket    rank 0 ↔ rank: a message for a transfer, one back when it is done

Both memories are anonymous files that the ranks inherit: they go with the last process, however that dies. Slots are as long as the
longest step may be, but only what was written takes memory.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twostep.engine.batch import Batch, LayerRange, PooledRows, RowsBehind, ScoredRows
from twostep.errors import InternalError, Unavailable

_NUM_SLOTS = 4
_SLOT_BYTES = 64 << 20
_HEAD_BYTES = 4096
_ALIGNMENT = 64
_POLL_S = 20e-6

# More than any message has.
_MAX_MESSAGE = 1 << 16
DONE = b"done"

# Most blocks of one transfer, and the bytes of a rank's part of it.
MAX_TRANSFER_BLOCKS = 1024
TRANSFER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Rank 0's first message. `options` are ModelRunner's, all but those below."""

    rank: int
    size: int
    parent: int
    directory: str
    model_dir: str
    device: str
    timeout_s: float
    one_shot: bool
    log_level: str
    log_json: bool
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepCommand:
    """Launches the batch in a step's slot, of so many tokens, groups of layers, sequences, blocks of a table, sampled, scored and pooled
    rows, blocks of a state, and rows behind drafts with so many columns. Numbers start at 1."""

    number: int
    num_tokens: int
    num_groups: int
    num_seqs: int
    width: int
    num_rows: int
    carried: bool
    num_scored: int
    num_top: int
    num_pooled: int
    num_vectors: int
    num_state_blocks: int
    num_behind: int
    behind_width: int


@dataclass(frozen=True, slots=True)
class EndCommand:
    pass


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Moves some layers of `count` blocks out of the pool, or into it, once step `after` is done."""

    to_pool: bool
    after: int
    count: int
    layers: LayerRange


def pack(message: object) -> bytes:
    """Messages pass between a process and its children only, on sockets that they alone have."""
    return pickle.dumps(message)


def unpack(message: bytes) -> Any:
    return pickle.loads(message)


class StepMemory:
    """Rank 0 puts batches in, the others look at them in place."""

    def __init__(self, file: int, size: int) -> None:
        """`file`: of `make_file`."""
        self._memory = mmap.mmap(file, _step_bytes())
        # Written by one rank each, a cache line apart.
        self._done = np.frombuffer(self._memory, np.int64, _HEAD_BYTES // 8)[:: _ALIGNMENT // 8][:size]

    @staticmethod
    def make_file() -> int:
        return _anonymous_file("twostep-steps", _step_bytes())

    def least_done(self) -> int:
        """Returns the number of the last step that every other rank has carried out."""
        return int(self._done[1:].min())

    def set_done(self, rank: int, number: int) -> None:
        self._done[rank] = number

    def put(self, number: int, batch: Batch, check: Callable[[], None], deadline: float) -> StepCommand:
        """Copies a batch into its slot, but for what only rank 0 needs (sampling). Waits until the slot's last batch is done with; calls
        `check` meanwhile, which raises if it never will be. Raises InternalError for a batch beyond the slot."""
        while self.least_done() < number - _NUM_SLOTS:
            check()
            if time.monotonic() > deadline:
                raise Unavailable("a tensor-parallel rank hangs; restart the worker")
            time.sleep(_POLL_S)
        arrays = _arrays(batch)
        if sum(_aligned(array.nbytes) for array in arrays) > _SLOT_BYTES:
            raise InternalError(
                f"a step of {len(batch.token_ids)} tokens, with block and state tables of {len(batch.seq_lens)} sequences, does not fit "
                f"{_SLOT_BYTES >> 20} MiB; lower --max-num-batched-tokens or --max-num-seqs"
            )
        start = _slot_start(number)
        for array in arrays:
            np.frombuffer(self._memory, array.dtype, array.size, start).reshape(array.shape)[...] = array
            start += _aligned(array.nbytes)
        num_groups, num_seqs, width = batch.block_tables.shape
        scored = (0, 0) if batch.scored is None else (len(batch.scored.rows), batch.scored.num_top)
        pooled = (0, 0) if batch.pooled is None else (len(batch.pooled.rows), len(batch.pooled.counts))
        carried = batch.carried is not None
        states = 0 if batch.state_tables is None else batch.state_tables.shape[1]
        behind = (0, 0) if batch.behind is None else batch.behind.table.shape
        sizes = len(batch.token_ids), num_groups, num_seqs, width, len(batch.sample_rows)
        return StepCommand(number, *sizes, carried, *scored, *pooled, states, *behind)

    def get(self, command: StepCommand) -> Batch:
        """Returns the batch of a command, in the shared memory: valid until `set_done` of it. Nothing of it is to be sampled here."""
        start = _slot_start(command.number)
        groups, seqs, width = command.num_groups, command.num_seqs, command.width

        def take(dtype: type[np.generic], count: int) -> npt.NDArray[Any]:
            nonlocal start
            array = np.frombuffer(self._memory, dtype, count, start)
            start += _aligned(array.nbytes)
            return array

        def take_states() -> npt.NDArray[np.int32] | None:
            count = command.num_state_blocks
            return take(np.int32, seqs * count).reshape(seqs, count) if count else None

        return Batch(
            token_ids=take(np.int64, command.num_tokens),
            positions=take(np.int64, command.num_tokens),
            query_start=take(np.int32, seqs + 1),
            seq_lens=take(np.int32, seqs),
            block_tables=take(np.int32, groups * seqs * width).reshape(groups, seqs, width),
            slots=take(np.int64, groups * command.num_tokens).reshape(groups, -1),
            sample_rows=take(np.int64, command.num_rows),
            sampling=(),
            carried=take(np.int32, command.num_tokens) if command.carried else None,
            scored=ScoredRows(take(np.int64, count), take(np.int64, count), command.num_top) if (count := command.num_scored) else None,
            pooled=PooledRows(take(np.int64, count), take(np.int64, command.num_vectors)) if (count := command.num_pooled) else None,
            state_sources=take_states(),
            state_tables=take_states(),
            behind=RowsBehind(take(np.int32, count * command.behind_width).reshape(count, -1)) if (count := command.num_behind) else None,
        )


class BlockMemory:
    """KV blocks on their way between rank 0 and the others."""

    def __init__(self, file: int, size: int) -> None:
        self._memory = mmap.mmap(file, _block_bytes(size))

    @staticmethod
    def make_file(size: int) -> int:
        return _anonymous_file("twostep-blocks", _block_bytes(size))

    def ids(self, count: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._memory, np.int64, count)

    def part(self, rank: int, count: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """uint8 [count, num_bytes]: a rank's parts of blocks."""
        start = MAX_TRANSFER_BLOCKS * 8 + rank * TRANSFER_BYTES
        return np.frombuffer(self._memory, np.uint8, count * num_bytes, start).reshape(count, num_bytes)


def blocks_at_once(num_bytes: int) -> int:
    """Blocks of one transfer, where a rank's part of each has `num_bytes`. Raises InternalError if not even one fits."""
    if num_bytes > TRANSFER_BYTES:
        raise InternalError(f"a rank's part of a KV block has {num_bytes} bytes, more than {TRANSFER_BYTES}; lower --block-size")
    return min(MAX_TRANSFER_BLOCKS, TRANSFER_BYTES // num_bytes)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Keeps messages apart; the end of either process is the end of the other's messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def receive(channel: socket.socket) -> bytes:
    """One message; empty if the other side is gone."""
    try:
        return channel.recv(_MAX_MESSAGE)
    except ConnectionError:
        return b""


def _arrays(batch: Batch) -> Sequence[npt.NDArray[Any]]:
    """In the order of `StepMemory.get`."""
    arrays = (batch.token_ids, batch.positions, batch.query_start, batch.seq_lens, batch.block_tables, batch.slots, batch.sample_rows)
    carried = () if batch.carried is None else (batch.carried,)
    scored = () if batch.scored is None else (batch.scored.rows, batch.scored.targets)
    pooled = () if batch.pooled is None else (batch.pooled.rows, batch.pooled.counts)
    states = () if batch.state_sources is None or batch.state_tables is None else (batch.state_sources, batch.state_tables)
    behind = () if batch.behind is None else (batch.behind.table,)
    return (*arrays, *carried, *scored, *pooled, *states, *behind)


def _slot_start(number: int) -> int:
    return _HEAD_BYTES + number % _NUM_SLOTS * _SLOT_BYTES


def _step_bytes() -> int:
    return _HEAD_BYTES + _NUM_SLOTS * _SLOT_BYTES


def _block_bytes(size: int) -> int:
    return MAX_TRANSFER_BLOCKS * 8 + size * TRANSFER_BYTES


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _anonymous_file(name: str, num_bytes: int) -> int:
    file = os.memfd_create(name)
    os.ftruncate(file, num_bytes)
    return file
