"""A Runner over several devices: rank 0 in this process, a process for each of the others (tensor parallelism).

1. launch: the batch goes into shared memory and the other ranks are woken      twostep/model/parallel/channel.py
2. all ranks launch the same step; inside it they exchange partial results      twostep/model/parallel/group.py
3. rank 0 samples; where a later step carries its tokens, the others get them from its device
4. blocks are read and written whole, whatever rank holds which heads           twostep/model/parallel/blocks.py

The ranks live and die together. If one ends, or does not finish a step in time, `failure` is set, the others are killed, and nothing is
served any more: rank 0 may hang inside an exchange then, so that the process should be ended.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twostep.engine.batch import Batch, CapturedSteps, FinishedStep, InFlight, KvShape, LayerMark, LayerRange, Sampled
from twostep.errors import SetupError, Unavailable
from twostep.model.families.registry import parse_config
from twostep.model.families.sharding import shard_of, with_whole_experts
from twostep.model.parallel.blocks import BlockParts
from twostep.model.parallel.channel import (
    DONE,
    BlockMemory,
    BlockTransfer,
    EndCommand,
    Hello,
    StepMemory,
    blocks_at_once,
    pack,
    receive,
)
from twostep.model.parallel.group import Meeting
from twostep.model.parallel.member import Member
from twostep.model.parallel.processes import RankProcesses
from twostep.model.runner.model_runner import ModelRunner, with_quantization
from twostep.process.startup import Progress

log = logging.getLogger(__name__)

_END_S = 5.0


class ParallelRunner:
    """The Runner of a model on `size` devices (see twostep/engine/batch.py for the contract). Blocks are those of the whole model."""

    def __init__(
        self,
        model_dir: Path | str,
        *,
        size: int,
        device: str = "cpu",
        step_timeout_s: float = 120.0,
        one_shot: bool = True,
        log_json: bool = False,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """`device` cuda:N: ranks take that and the `size - 1` after it, counted round. `options` are ModelRunner's. The runner fails if a
        rank dies or takes longer than `step_timeout_s` for a step. `one_shot` False: all sums are NCCL's, for comparison.
        Raises SetupError with what to change; no rank is left then."""
        devices = _devices(device, size)
        # What can be refused is, before anything is started.
        config = with_quantization(parse_config(Path(model_dir), options.get("architecture", "")), options.get("quantization", "none"))
        shard_of(with_whole_experts(config) if options.get("enable_expert_parallel") else config, 0, size)
        if device == "cpu" and options.get("num_threads") is None:
            options["num_threads"] = max(1, torch.get_num_threads() // size)
        self.failure: Exception | None = None
        self._on_failure: Callable[[Exception], None] | None = None
        self._failing = threading.Lock()
        self._step_timeout_s = step_timeout_s
        self._size = size
        self._number = 0
        self._settled = 0
        self._last: Sequence[int] = ()
        # (number, when) of steps that not all ranks are done with.
        self._open: deque[tuple[int, float]] = deque()
        self._transfers = threading.Lock()
        self._directory = tempfile.TemporaryDirectory(prefix="twostep-ranks-")
        step_file, block_file = StepMemory.make_file(), BlockMemory.make_file(size)
        self._steps = StepMemory(step_file, size)
        self._blocks = BlockMemory(block_file, size)
        hellos = [
            Hello(
                rank=rank,
                size=size,
                parent=os.getpid(),
                directory=self._directory.name,
                model_dir=str(model_dir),
                device=devices[rank],
                timeout_s=step_timeout_s,
                one_shot=one_shot,
                log_json=log_json,
                log_level=logging.getLevelName(log.getEffectiveLevel()).lower(),
                options=options,
            )
            for rank in range(1, size)
        ]
        self._meeting = Meeting(Path(self._directory.name), 0, size)
        try:
            self._ranks = RankProcesses(hellos, step_file, block_file, self._watch, timeout_s=step_timeout_s)
        except BaseException:
            self._directory.cleanup()
            raise
        finally:
            os.close(step_file)
            os.close(block_file)
        try:
            member = Member(self._meeting, torch.device(devices[0]), timeout_s=step_timeout_s, one_shot=one_shot)
            self._group = member.group
            self._local = ModelRunner(model_dir, device=devices[0], progress=progress, member=member, **options)
            self._parts = BlockParts(self._local.kv_shape, self._local.config, size)
            self._at_once = blocks_at_once(self._local.kv_shape.block_bytes)
            self._meeting.exchange(b"ready")
        except BaseException as error:
            self._meeting.fail(str(error))
            self._ranks.end(_END_S)
            self._directory.cleanup()
            raise

    @property
    def kv_shape(self) -> KvShape:
        return self._parts.shape

    @property
    def vocab_size(self) -> int:
        return self._local.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._local.max_model_len

    @property
    def generates(self) -> bool:
        return self._local.generates

    @property
    def reads_shared_once(self) -> bool:
        return self._local.reads_shared_once

    @property
    def overlaps(self) -> bool:
        return self._local.overlaps

    @property
    def marks_layers(self) -> bool:
        return False

    @property
    def captured(self) -> CapturedSteps:
        """Of this rank; the others have captured the same."""
        return self._local.captured

    def launch(self, batch: Batch) -> InFlight:
        self._check()
        if not self.overlaps:
            batch = batch.with_carried(self._last)
        number = self._number + 1
        command = self._steps.put(number, batch, self._check, time.monotonic() + self._step_timeout_s)
        self._number = number
        self._ranks.send_all(command)
        self._open.append((number, time.monotonic()))
        try:
            step = _InFlight(self, number, self._local.launch(batch))
            # Without a device of its own a step is done by now, and the next one may carry its tokens.
            return step if self.overlaps else FinishedStep(step.result())
        except Exception as error:
            # Nobody knows what the others wait for inside the step.
            self._fail(Unavailable(f"a step failed on rank 0 of {self._size}: {type(error).__name__}: {error}"))
            raise

    def run(self, batch: Batch) -> Sampled:
        """Launches a step that carries nothing, and waits for it."""
        return self.launch(batch).result()

    def new_host_blocks(self, count: int) -> npt.NDArray[np.uint8]:
        return np.empty((count, self.kv_shape.block_bytes), np.uint8)

    def pin_host(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        # Blocks go through memory that the ranks share.
        return lambda: None

    def read_blocks(self, block_ids: Sequence[int], out: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        self._check_blocks(block_ids, out, layers)
        with self._transfers:
            for start in range(0, len(block_ids), self._at_once):
                ids = block_ids[start : start + self._at_once]
                whole = out[start : start + len(ids)]
                others = [rank for rank in self._parts.owners if rank != 0]
                self._ask(ids, others, layers, to_pool=False)
                part = np.empty((len(ids), self._part_bytes(layers)), np.uint8)
                self._local.read_blocks(ids, part, layers)
                self._parts.join(part, 0, whole)
                for rank in others:
                    self._await(rank)
                    self._parts.join(self._blocks.part(rank, *part.shape), rank, whole)

    def write_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None = None) -> None:
        self._check_blocks(block_ids, data, layers)
        with self._transfers:
            for start in range(0, len(block_ids), self._at_once):
                ids = block_ids[start : start + self._at_once]
                whole = data[start : start + len(ids)]
                part = np.empty((len(ids), self._part_bytes(layers)), np.uint8)
                others = range(1, self._size)
                for rank in others:
                    self._parts.cut(whole, rank, self._blocks.part(rank, *part.shape))
                self._ask(ids, others, layers, to_pool=True)
                self._parts.cut(whole, 0, part)
                self._local.write_blocks(ids, part, layers)
                for rank in others:
                    self._await(rank)

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """`on_failure` is called once, from any thread, when the runner has failed; at once if it has already."""
        with self._failing:
            self._on_failure = on_failure
            failure = self.failure
        if failure is not None:
            on_failure(failure)

    def close(self) -> None:
        """Ends the other ranks. Idempotent; nothing may be called after it."""
        if self.failure is None:
            self._ranks.send_all(EndCommand())
        self._ranks.end(_END_S)
        if self.failure is None:
            # Else something of it may run on the device for ever, and the group's end would wait for that.
            self._local.close()
            self._group.close()
        self._directory.cleanup()

    def _settle(self, number: int, token_ids: Sequence[int]) -> None:
        self._settled = number
        self._last = token_ids

    def _part_bytes(self, layers: LayerRange | None) -> int:
        """Bytes of one block on one rank."""
        shape = self._local.kv_shape
        return shape.block_bytes if layers is None else layers.num_layers * shape.layer_bytes

    def _ask(self, ids: Sequence[int], ranks: Sequence[int], layers: LayerRange | None, *, to_pool: bool) -> None:
        self._blocks.ids(len(ids))[...] = ids
        # Rank 0 saw this step end; another one may still be writing its last layer.
        message = pack(BlockTransfer(to_pool, self._settled, len(ids), layers or LayerRange(0, self.kv_shape.num_layers)))
        for rank in ranks:
            self._ranks.blocks(rank).send(message)

    def _await(self, rank: int) -> None:
        if receive(self._ranks.blocks(rank)) != DONE:
            self._check()
            raise Unavailable(f"tensor-parallel rank {rank} is gone; restart the worker")

    def _check_blocks(self, block_ids: Sequence[int], data: npt.NDArray[np.uint8], layers: LayerRange | None) -> None:
        self._check()
        columns = self.kv_shape.bytes_of(layers or LayerRange(0, self.kv_shape.num_layers))
        want = (len(block_ids), columns.stop - columns.start)
        if data.shape != want or data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise ValueError(f"{len(block_ids)} blocks need a contiguous uint8 array of shape {want}, not {data.dtype} {data.shape}")
        if any(not 0 <= block < self.kv_shape.num_blocks for block in block_ids):
            raise ValueError(f"block ids must be from 0 to {self.kv_shape.num_blocks - 1}")

    def _check(self) -> None:
        if self.failure is not None:
            raise Unavailable(str(self.failure))

    def _watch(self, problem: str) -> None:
        """Now and then, from the thread that looks after the processes; `problem` is what is wrong with them, or empty."""
        if problem:
            self._fail(Unavailable(problem))
            return
        done = min(self._steps.least_done(), self._settled)
        while self._open and self._open[0][0] <= done:
            self._open.popleft()
        if self._open and time.monotonic() - self._open[0][1] > self._step_timeout_s:
            self._fail(Unavailable(f"a step of the tensor-parallel ranks is not done after {self._step_timeout_s:g} s; restart the worker"))

    def _fail(self, error: Exception) -> None:
        with self._failing:
            if self.failure is not None:
                return
            self.failure = error
            on_failure = self._on_failure
        log.error("%s", error)
        self._meeting.fail(str(error))
        self._ranks.kill()
        if on_failure is not None:
            on_failure(error)


@dataclass(frozen=True, slots=True)
class _InFlight:
    runner: ParallelRunner
    number: int
    inner: InFlight
    # Rank 0 does not know how far the others are.
    layer_marks: Sequence[LayerMark] = ()

    def result(self) -> Sampled:
        token_ids: Sequence[int] = ()
        try:
            sampled = self.inner.result()
            token_ids = sampled.token_ids
            return sampled
        finally:
            self.runner._settle(self.number, token_ids)


def _devices(device: str, size: int) -> list[str]:
    """One for each rank. Raises SetupError if there are not so many."""
    if size < 2:
        raise SetupError(f"--tensor-parallel-size is {size}; several ranks are at least 2")
    if not device.startswith("cuda"):
        return [device] * size
    first, count = int(device.partition(":")[2] or 0), torch.cuda.device_count()
    if size > count:
        raise SetupError(
            f"--tensor-parallel-size is {size}, and this machine shows {count} GPUs; lower it, or look at CUDA_VISIBLE_DEVICES"
        )
    return [f"cuda:{(first + rank) % count}" for rank in range(size)]
