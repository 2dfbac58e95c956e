"""A rank other than 0 of a tensor-parallel worker: its own process, for its own device.

    python -P -m twostep.model.runner.parallel_rank FD …        (started by parallel_runner.py, with the files and sockets it inherits)

1. the first message says who it is and what to load; it loads its part of the model while the others load theirs
2. one thread carries out commands (steps, block copies) in order, one moves KV blocks
3. it ends with rank 0: by its command, or because the life line broke, or by the kernel when the process that started it is gone
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from twostep.engine.batch import InFlight
from twostep.errors import TwostepError
from twostep.model.parallel.channel import DONE, BlockMemory, BlockTransfer, EndCommand, Hello, StepMemory, receive, unpack
from twostep.model.parallel.group import Meeting
from twostep.model.parallel.member import Member
from twostep.model.runner.model_runner import ModelRunner
from twostep.process.ending import die_with
from twostep.process.log import setup_logging

log = logging.getLogger(__name__)

_NUM_EVENTS = 8
_IDLE_MS = 20


def main(argv: Sequence[str]) -> NoReturn:
    life_line, steps_fd, blocks_fd, step_memory, block_memory = map(int, argv)
    # A terminal's Ctrl-C and a service manager's signals are rank 0's to handle: it drains first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(life_line,), name="life line", daemon=True).start()
    steps, blocks = socket.socket(fileno=steps_fd), socket.socket(fileno=blocks_fd)
    hello: Hello = unpack(receive(steps))
    die_with(hello.parent)
    setup_logging(level=hello.log_level, json_lines=hello.log_json, process=f"rank-{hello.rank}")
    meeting = Meeting(Path(hello.directory), hello.rank, hello.size)
    try:
        device = torch.device(hello.device)
        member = Member(meeting, device, timeout_s=hello.timeout_s, one_shot=hello.one_shot)
        runner = ModelRunner(hello.model_dir, device=hello.device, member=member, **hello.options)
        meeting.exchange(b"ready")
        rank = _Rank(runner, device, StepMemory(step_memory, hello.size), BlockMemory(block_memory, hello.size), hello.rank)
        threading.Thread(target=_guarded, args=(rank.serve_blocks, blocks), name="blocks", daemon=True).start()
        rank.serve_steps(steps)
    except TwostepError as error:
        log.error("%s", error.message)
        meeting.fail(error.message)
        _exit(2)
    except Exception as error:
        log.exception("rank %d failed", hello.rank)
        meeting.fail(f"tensor-parallel rank {hello.rank} failed: {type(error).__name__}: {error}")
        _exit(1)
    _exit(0)


class _Rank:
    def __init__(self, runner: ModelRunner, device: torch.device, steps: StepMemory, blocks: BlockMemory, rank: int) -> None:
        self._runner = runner
        self._device = device
        self._steps = steps
        self._blocks = blocks
        self._rank = rank
        self._clock = _StepClock(device)

    def serve_steps(self, channel: socket.socket) -> None:
        """Returns when told to by a command, or when rank 0 is gone."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        idle = select.poll()
        idle.register(channel, select.POLLIN)
        in_flight: deque[tuple[int, InFlight]] = deque()
        launched = 0
        while True:
            # The last step is collected late, so that the next one is launched while it runs; but not never.
            while len(in_flight) > 1 or (in_flight and not idle.poll(_IDLE_MS)):
                number, step = in_flight.popleft()
                step.result()
                self._steps.set_done(self._rank, number)
            message = receive(channel)
            command = unpack(message) if message else EndCommand()
            if isinstance(command, EndCommand):
                return
            launched = command.number
            in_flight.append((launched, self._runner.launch(self._steps.get(command))))
            self._clock.note(launched)

    def serve_blocks(self, channel: socket.socket) -> None:
        layer_bytes = self._runner.kv_shape.layer_bytes
        while message := receive(channel):
            transfer: BlockTransfer = unpack(message)
            ids = self._blocks.ids(transfer.count).tolist()
            part = self._blocks.part(self._rank, transfer.count, transfer.layers.num_layers * layer_bytes)
            self._clock.wait(transfer.after)
            if transfer.to_pool:
                self._runner.write_blocks(ids, part, transfer.layers)
            else:
                self._runner.read_blocks(ids, part, transfer.layers)
            channel.send(DONE)


class _StepClock:
    """Which steps this rank's device has done. Rank 0 may be ahead of it by the end of one."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._changed = threading.Condition()
        self._launched = 0
        self._events: deque[tuple[int, torch.cuda.Event]] = deque(maxlen=_NUM_EVENTS)

    def note(self, number: int) -> None:
        """Command `number` was given to the device, on the current stream."""
        with self._changed:
            if self._cuda:
                event = torch.cuda.Event()
                event.record()
                self._events.append((number, event))
            self._launched = number
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Returns once the device has done it."""
        with self._changed:
            self._changed.wait_for(lambda: self._launched >= number)
            event = next((event for launched, event in self._events if launched >= number), None)
        if event is not None:
            event.synchronize()


def _guarded(serve: Any, channel: socket.socket) -> None:
    """A thread whose failure is the process's."""
    try:
        serve(channel)
    except Exception:
        log.exception("moving KV blocks failed")
        _exit(1)


def _end_with(life_line: int) -> None:
    """The life line carries nothing: it ends when rank 0 does."""
    os.read(life_line, 1)
    _exit(1)


def _exit(code: int) -> NoReturn:
    """At once: libraries that wait for other ranks as they are unloaded would wait for ever."""
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
