"""Text is shown to the operator's hook before it goes to the client (see twostep/hold_back.py for what the hook gets).

    pieces -> waiting, the last `window` characters of text and of reasoning -> the client
                 └ hook: allow | replace what waits | stop the answer

A piece leaves whole, when enough has come behind it: its token ids would tell the text that they stand for.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from twostep.errors import SetupError, Unavailable
from twostep.hold_back import Allow, Held, HeldRequest, Replace, Stop
from twostep.process.bounded_threads import BoundedThreads
from twostep.rpc.v1 import inference_pb2

log = logging.getLogger(__name__)

# Hooks that are no coroutines: so many at once.
_THREADS = 8

Kind = Literal["reasoning", "text"]
_KINDS: tuple[Kind, Kind] = ("reasoning", "text")  # in the order in which a piece has them
Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


def hold_back_of(name: str, *, window: int, timeout_s: float, fail_open: bool) -> HoldBack | None:
    """Reads --hold-back; None: text goes as it comes. Raises SetupError."""
    return HoldBack(load_hook(name), window=window, timeout_s=timeout_s, fail_open=fail_open) if name else None


class HoldBack:
    """The router's hook, and how it is asked."""

    def __init__(self, hook: Callable[[Held], Any], *, window: int, timeout_s: float, fail_open: bool) -> None:
        """`window` in characters; `timeout_s` of each call. `fail_open`: text that was not judged in time is sent; else its request
        fails."""
        self.window = window
        self._timeout_s = timeout_s
        self._fail_open = fail_open
        self._hook = hook
        self._threads = None if _is_async(hook) else BoundedThreads(_THREADS, "hold-back")
        self._complained = False

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    def begin(self, request: HeldRequest, write: Write, *, sent: str = "", position: int = 0) -> HeldAnswer:
        """Begins with one answer, of which the client has the text `sent` already, and `position` tokens."""
        return HeldAnswer(self, request, write, sent, position)

    async def verdict(self, held: Held) -> Allow | Replace | Stop:
        """Raises Unavailable if there is none, and that must not pass."""
        try:
            async with asyncio.timeout(self._timeout_s):
                found = self._check(await self._ask(held))
        except Exception as error:  # noqa: BLE001  # the hook is foreign code
            # Its message may quote what it was shown.
            if not self._complained:
                log.error("the hold-back hook gave no verdict (%s); said once until it gives one", type(error).__name__)
            self._complained = True
            if self._fail_open:
                return Allow()
            raise Unavailable("the answer could not be checked before it is sent; repeat the request") from None
        self._complained = False
        return found

    async def _ask(self, held: Held) -> Any:
        if self._threads is None:
            return await self._hook(held)
        return await self._threads.run(self._hook, held)

    def _check(self, found: Any) -> Allow | Replace | Stop:
        if found is None:
            return Allow()
        if not isinstance(found, Allow | Replace | Stop) or (isinstance(found, Replace | Stop) and not isinstance(found.text, str)):
            raise TypeError("a verdict is None, Allow(), Replace(text) or Stop(text)")
        return found


class HeldAnswer:
    """Pieces go to `write` when they may."""

    def __init__(self, hold_back: HoldBack, request: HeldRequest, write: Write, sent: str, position: int) -> None:
        self._hold_back = hold_back
        self._request = request
        self._write = write
        self._waiting: deque[inference_pb2.Piece] = deque()
        self._sent: dict[Kind, str] = {"reasoning": "", "text": sent}
        self._position = position
        self._replaced = False

    async def push(self, response: inference_pb2.GenerateResponse | None, *, last: bool) -> bool:
        """Takes the next piece; None if there is none any more. Returns False where the answer ends here, whatever else there is. Raises
        Unavailable."""
        piece = inference_pb2.Piece() if response is None else response.piece
        before = {kind: self._text(kind) for kind in _KINDS}
        self._waiting.append(piece)
        for kind in _KINDS:
            text = getattr(piece, kind)
            if not text and not (last and (kind == "text" or before[kind])):
                continue
            held = Held(request=self._request, kind=kind, sent=self._sent[kind], waiting=before[kind], piece=text, last=last)
            verdict = await self._hold_back.verdict(held)
            if isinstance(verdict, Stop):
                self._waiting.clear()
                if verdict.text:
                    self._replaced = True
                    await self._release(_piece(kind, verdict.text))
                return False
            if isinstance(verdict, Replace):
                self._replace(kind, verdict.text)
        await self._release_old(0 if last else self._hold_back.window, last=last)
        return True

    def _text(self, kind: Kind) -> str:
        return "".join(getattr(piece, kind) for piece in self._waiting)

    def _replace(self, kind: Kind, text: str) -> None:
        """Replaces what waits of one kind; the other stays."""
        self._replaced = True
        other: Kind = "text" if kind == "reasoning" else "reasoning"
        kept = [_piece(other, getattr(piece, other)) for piece in self._waiting if getattr(piece, other)]
        new = [_piece(kind, text)] if text else []
        # Reasoning comes before what it is about.
        self._waiting = deque(new + kept if kind == "reasoning" else kept + new)

    async def _release_old(self, window: int, *, last: bool) -> None:
        """Writes whatever has `window` characters of its kind behind it."""
        behind = {kind: len(self._text(kind)) for kind in _KINDS}
        while self._waiting:
            piece = self._waiting[0]
            for kind in _KINDS:
                behind[kind] -= len(getattr(piece, kind))
            # Reasoning that is over waits for the text behind it; ids without a text, for the piece that has it.
            if sum(behind.values()) < window or (not any(behind.values()) and not last and not piece.text and not piece.reasoning):
                return
            self._waiting.popleft()
            await self._release(piece)

    async def _release(self, piece: inference_pb2.Piece) -> None:
        for kind in _KINDS:
            self._sent[kind] += getattr(piece, kind)
        if self._replaced:
            # Ids, and what came with them, would reveal what was replaced; positions go on from the last that was sent.
            piece = inference_pb2.Piece(text=piece.text, reasoning=piece.reasoning, position=self._position)
            if not piece.text and not piece.reasoning:
                return
        elif not piece.ByteSize():
            return
        else:
            self._position = piece.position + len(piece.token_ids)
        await self._write(inference_pb2.GenerateResponse(piece=piece))


def _piece(kind: Kind, text: str) -> inference_pb2.Piece:
    return inference_pb2.Piece(text=text) if kind == "text" else inference_pb2.Piece(reasoning=text)


def load_hook(name: str) -> Callable[[Held], Any]:
    """`module:function`, as --hold-back has it. Raises SetupError."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise SetupError(f"--hold-back {name!r}: give MODULE:FUNCTION")
    try:
        hook: Any = importlib.import_module(module)
        for part in function.split("."):
            hook = getattr(hook, part)
    except (ImportError, AttributeError) as error:
        raise SetupError(
            f"--hold-back {name}: {error}; give a module that Python finds (PYTHONPATH says where) and a function in it"
        ) from error
    if not callable(hook):
        raise SetupError(f"--hold-back {name} is no function; give one that takes a twostep.hold_back.Held")
    found: Callable[[Held], Any] = hook
    return found


def _is_async(hook: Callable[[Held], Any]) -> bool:
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004  # of an object
