"""Parses bodies of strangers without holding up the event loop: those of few values here and now, the others in a process.

    raw ─ how many values? ─┬─ few ──────────────────────────▶ parsed on the loop, in a millisecond or two
                            ├─ many ── a process ────────────▶ parsed there, and brought here as bytes and texts
                            └─ more than anybody needs ──────▶ refused before anything is made of them

This file is also the process's. Processes start with the first body that needs one. A body of more than a MiB is counted there too. A
process is asked first for a number, the bytes of memory that bodies may take; then again and again, with the function that reads a body:

    | u32 bytes N | N bytes: its pickle | the body |      ->      a pickle

of ("read", what it made), ("refused", an HttpError's arguments) or ("failed", the name of another exception). Only a router writes and
reads these pickles.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable
from typing import Any, TypeVar

# The process has these before its memory is bounded and before the first body waits for it.
from router.http import messages_body, responses_body  # noqa: F401
from router.http.errors import HttpError
from router.json_size import JsonSize, checked_size, rough_size
from router.prompting.helper_pool import Helper, HelperPool, Lost
from router.waiting.fair_queue import EVERYBODY_ALIKE, Quota
from router.waiting.turns import Turns
from twostep.errors import InvalidRequest, SetupError, Unavailable
from twostep.process.helper_service import limit_memory, serve

T = TypeVar("T")

_HEAD = struct.Struct("<I")
# What a millisecond or two is enough for.
_FEW_CONTAINERS = 600
_FEW_VALUES = 10_000
_SHORT_BYTES = 1 << 20
_NUM_PROCESSES = 3
# Whoever comes next need not wait for one caller's.
_MAX_EACH = 2
_MAX_WAITING = 128
# Of the processor, and of memory: what such a body takes is a second, and 300 MB.
_PARSE_S = 10.0
_MEMORY_BYTES = 1 << 30


class BodyParser:
    """Belongs to one router, and to its event loop."""

    def __init__(self, quota: Quota = EVERYBODY_ALIKE) -> None:
        helper = Helper(module="router.http.body_parser", setup=str(_MEMORY_BYTES).encode(), purpose="read large bodies")
        self._pool = HelperPool(helper, _NUM_PROCESSES)
        self._turn = asyncio.Lock()
        what = "large bodies wait to be read"
        self._turns = Turns(what, most=_MAX_WAITING, at_once=_NUM_PROCESSES, each=_MAX_EACH, quota=quota)

    async def parse(self, read: Callable[[bytes], T], raw: bytes, caller: str) -> T:
        """Returns what `read` makes of the bytes: a function that can be pickled, as its result can. Raises the HttpError that it does,
        InvalidRequest (too many values), ResourceExhausted (too many others wait)."""
        if len(raw) <= _SHORT_BYTES and (_is_light(rough_size(raw)) or _is_light(await self._checked(raw))):
            return read(raw)
        reader = pickle.dumps(read, protocol=5)
        try:
            kind, answer = pickle.loads(await self._pool.ask(self._turns, caller, _HEAD.pack(len(reader)), reader, raw, cpu_s=_PARSE_S))
        except SetupError as error:
            message = "the router cannot start the process that reads large bodies; repeat later, or send a smaller one"
            raise Unavailable(message) from error
        except Lost as error:
            raise HttpError(400, "the body takes too much time or memory to read; send fewer values") from error
        if kind == "refused":
            raise HttpError(**answer)
        if kind == "failed":
            raise RuntimeError(f"a body could not be parsed: {answer}")
        result: T = answer
        return result

    async def _checked(self, raw: bytes) -> JsonSize:
        """Takes some milliseconds of the event loop: one body in each of its turns."""
        async with self._turn:
            await asyncio.sleep(0)
            return checked_size(raw)

    async def close(self) -> None:
        """Ends the processes. Call it when nothing is asked any more."""
        await self._pool.close()


def _is_light(size: JsonSize) -> bool:
    return size.containers <= _FEW_CONTAINERS and size.values <= _FEW_VALUES


# ---- the process ---------------------------------------------------------------------------------------------------------


def main() -> None:
    def begin(num_bytes: bytes) -> Callable[[bytes], bytes]:
        limit_memory(int(num_bytes))
        return lambda question: pickle.dumps(_answer(question), protocol=5)

    serve(begin)


def _answer(question: bytes) -> tuple[str, Any]:
    (num_bytes,) = _HEAD.unpack_from(question)
    read, raw = pickle.loads(question[_HEAD.size : _HEAD.size + num_bytes]), question[_HEAD.size + num_bytes :]
    try:
        checked_size(raw)
        return "read", read(raw)
    except HttpError as error:
        fields = {"status": error.status, "message": error.message, "param": error.param, "code": error.code}
        return "refused", fields
    except InvalidRequest as error:
        return "refused", {"status": 400, "message": error.message}
    except MemoryError:
        return "refused", {"status": 400, "message": "the body takes too much memory to read; send fewer values"}
    except Exception as error:  # noqa: BLE001  # it is told, and what it may quote is not
        return "failed", type(error).__name__


if __name__ == "__main__":
    main()
