"""`twostep status`: the deployment as its routers see it, live."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from twostep.cli._connect import client_of, targets_of
from twostep.cli._status_table import RouterReply, render
from twostep.cli._terminal import Terminal, clipped
from twostep.client import Client
from twostep.errors import DeadlineExceeded, InvalidRequest, TwostepError

_MAX_ROUTERS = 16
# Of a look in the live table: a router that hangs must not hold the others up for long.
_LOOK_S = 3.0
_SCREEN_ON, _SCREEN_OFF = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def run(args: argparse.Namespace) -> int:
    if args.interval and not 0.1 <= args.interval <= 3600:
        raise InvalidRequest(f"--interval {args.interval:g}: give seconds from 0.1 to 3600, or 0 for one table")
    targets = list(dict.fromkeys(targets_of(args.target)))
    if len(targets) > _MAX_ROUTERS:
        raise InvalidRequest(f"--target has {len(targets)} routers; give {_MAX_ROUTERS} at most")
    terminal = Terminal.of(sys.stdout, os.environ)
    live = terminal.live and args.interval > 0 and not args.json
    timeout = min(_LOOK_S, args.timeout) if live else args.timeout
    with contextlib.ExitStack() as stack:
        clients = {target: stack.enter_context(client_of(args, target)) for target in targets}
        pool = stack.enter_context(ThreadPoolExecutor(len(clients)))

        def look(seconds: float = timeout) -> list[RouterReply]:
            return list(pool.map(lambda target: _look(target, clients[target], seconds), targets))

        # The first look fails as a command does, in one line, and like one not before its own time-out.
        looks = look()
        if live and all(isinstance(one.cause, DeadlineExceeded) for one in looks):
            looks = look(args.timeout)
        if all(one.status is None for one in looks):
            raise _error(looks)
        if args.json:
            print(json.dumps({"routers": [_plain(one) for one in looks]}))
        elif live:
            looks = _follow(terminal, looks, look, args.interval)
        if not args.json:
            # What was there last stays.
            print("\n".join(render(looks, terminal.size().columns, terminal.paint)))
    return 0


def _look(target: str, client: Client, timeout: float) -> RouterReply:
    try:
        return RouterReply(target, status=client.status(timeout=timeout))
    except TwostepError as error:
        return RouterReply(target, error=error.message, cause=error)


def _error(looks: Sequence[RouterReply]) -> TwostepError:
    kind = type(looks[0].cause) if looks[0].cause is not None else TwostepError
    return kind("; ".join(f"{look.target}: {look.error}" if look.target not in look.error else look.error for look in looks))


def _plain(look: RouterReply) -> dict[str, Any]:
    said = {"target": look.target}
    return said | ({"error": look.error} if look.status is None else dataclasses.asdict(look.status))


def _follow(terminal: Terminal, looks: list[RouterReply], look: Callable[[], list[RouterReply]], interval_s: float) -> list[RouterReply]:
    """Draws until Ctrl-C or q; returns what was seen last. A router that is gone meanwhile is shown with why."""
    with _screen(terminal), _keys() as pressed:
        try:
            while True:
                _draw(terminal, looks)
                if pressed(interval_s):
                    return looks
                looks = look()
        except KeyboardInterrupt:
            return looks


def _draw(terminal: Terminal, looks: Sequence[RouterReply]) -> None:
    size = terminal.size()
    lines = render(looks, size.columns, terminal.paint)
    room = max(1, size.lines - 1)
    if len(lines) > room:
        lines = [
            *lines[: room - 1],
            clipped(f"… {len(lines) - room + 1} more lines: make the window higher, or use --interval 0", size.columns),
        ]
    foot = terminal.paint(clipped(f"{time.strftime('%H:%M:%S')}  q or Ctrl-C leaves", size.columns), "dim")
    lines += [""] * (room - len(lines)) + [foot]
    terminal.write(_HOME + "\n".join(line + _END_OF_LINE for line in lines) + _BELOW)


@contextlib.contextmanager
def _screen(terminal: Terminal) -> Iterator[None]:
    terminal.write(_SCREEN_ON)
    try:
        yield
    finally:
        terminal.write(_SCREEN_OFF)


def _only_waits(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits so many seconds, and says whether q was pressed meanwhile."""
    if not sys.stdin.isatty():
        yield _only_waits
        return
    termios, tty = importlib.import_module("termios"), importlib.import_module("tty")
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left)[0] and os.read(descriptor, 64).lower() in (b"q", b"\x04", b""):
                return True
        return False

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
