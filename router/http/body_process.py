"""A process that parses bodies of strangers, so that the router's event loop and its memory do not.

    python -P -m router.http.body_process BYTES SECONDS        (started by router/http/body_parser.py)

BYTES is how much memory bodies may take, and SECONDS how much of the processor one may: SIGPROF ends the process then. In: a pickle of the
function that reads a body, and the body. Out: ("read", what it made), ("refused", an HttpError's arguments) or ("failed", the name of
another exception); before the first, one byte: it is there. Only a router writes and reads these pickles. It ends with its standard input.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from pathlib import Path
from typing import Any

# Imported before memory is bounded, and before the first body waits for it.
from router.http import chat_body, completion_body
from router.http.errors import HttpError

_READERS = (chat_body, completion_body)


def main(argv: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + int(argv[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # An interrupt at the terminal is for the router to see.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.buffer.write(b"!")
    sys.stdout.buffer.flush()
    while True:
        try:
            read, raw = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, float(argv[1]))
        answer = _answer(read, raw)
        pickle.dump(answer, sys.stdout.buffer, protocol=5)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.flush()
        # Else as much stays here as the largest of them took.
        del read, raw, answer


def _answer(read: Any, raw: bytes) -> tuple[str, Any]:
    try:
        return "read", read(raw)
    except HttpError as error:
        told = {"status": error.status, "message": error.message, "param": error.param, "code": error.code}
        return "refused", told
    except MemoryError:
        return "refused", {"status": 400, "message": "the body takes too much memory to read; send fewer values"}
    except Exception as error:  # noqa: BLE001  # it is told, and what it may quote is not
        return "failed", type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1:])
