"""The command `twostep` in this process, with streams and variables of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from unittest import mock

from twostep.cli import main


def run(*words: str, stdin: str | bytes = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Status, output and errors of `twostep WORDS`."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    status: object = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, env))
        stack.enter_context(mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            main(words)
        except SystemExit as ended:
            status = ended.code
    assert isinstance(status, int)
    return subprocess.CompletedProcess(words, status, *(stream.buffer.getvalue().decode() for stream in (out, err)))  # type: ignore[attr-defined]
