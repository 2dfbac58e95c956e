"""A process that parses bodies of strangers, so that the router's event loop and its memory do not (started by router/http/body_parser.py).

Asked first to take a number: how many bytes of memory bodies may take. Then asked again and again, with the function that reads a body:

    | u32 bytes N | N bytes: its pickle | the body |      ->      a pickle

of ("read", what it made), ("refused", an HttpError's arguments) or ("failed", the name of another exception). Only a router writes and
reads these pickles.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

# Imported before memory is bounded, and before the first body waits for it.
from router.http import chat_body, completion_body
from router.http.errors import HttpError
from router.json_size import checked_size
from twostep.errors import InvalidRequest
from twostep.process.helper_service import limit_memory, serve

HEAD = struct.Struct("<I")
_READERS = (chat_body, completion_body)


def main() -> None:
    def begin(num_bytes: bytes) -> Callable[[bytes], bytes]:
        limit_memory(int(num_bytes))
        return lambda question: pickle.dumps(_answer(question), protocol=5)

    serve(begin)


def _answer(question: bytes) -> tuple[str, Any]:
    (num_bytes,) = HEAD.unpack_from(question)
    read, raw = pickle.loads(question[HEAD.size : HEAD.size + num_bytes]), question[HEAD.size + num_bytes :]
    try:
        checked_size(raw)
        return "read", read(raw)
    except HttpError as error:
        told = {"status": error.status, "message": error.message, "param": error.param, "code": error.code}
        return "refused", told
    except InvalidRequest as error:
        return "refused", {"status": 400, "message": error.message}
    except MemoryError:
        return "refused", {"status": 400, "message": "the body takes too much memory to read; send fewer values"}
    except Exception as error:  # noqa: BLE001  # it is told, and what it may quote is not
        return "failed", type(error).__name__


if __name__ == "__main__":
    main()
