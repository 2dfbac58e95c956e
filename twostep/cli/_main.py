"""One command from its words to its exit status."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from twostep.cli._extras import require_worker_extra
from twostep.cli._flags import parser
from twostep.errors import TwostepError, Unauthenticated, WrongSettings
from twostep.process.printable import harmless
from twostep.settings.reading import check_variables

# `vllm serve MODEL` and `twostep serve MODEL` do alike.
_ALIASES = {"serve": "up"}


def run(argv: Sequence[str] | None) -> int:
    """Returns the exit status, but for wrong usage, which exits with 2. Raises KeyboardInterrupt."""
    # Before grpc is loaded: its remarks on closed connections are no business of a command's user.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character is no reason to lose the answer.
            stream.reconfigure(errors="replace")
    args = parser().parse_args(argv)
    args.command = _ALIASES.get(args.command, args.command)
    if sys.stdin is not None and sys.stdin.isatty() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Begun by a shell that keeps Ctrl-C from what it runs in the background; whoever has a terminal means it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ctrl-C may strike when the blocking client has made a coroutine and not yet begun it: no fault, and nothing to tell the user.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    try:
        words = [args.command, args.kind] if args.command in ("bench", "lab") else [args.command]
        if words[-1] not in ("up", "demo"):
            for problem in check_variables(os.environ):
                print(f"warning: {problem}", file=sys.stderr)
        if words[-1] in ("up", "demo", "engine", "quality", "eagle"):
            require_worker_extra(f"twostep {' '.join(words)}")
        command = importlib.import_module(f"twostep.cli._{'_'.join(words)}")
        status: int = command.run(args)
        sys.stdout.flush()
    except TwostepError as error:
        # Whoever refused speaks of headers; here a key is given otherwise.
        here = "; here: TWOSTEP_API_KEY, or --api-key" if isinstance(error, Unauthenticated) and "api_key" in args else ""
        print(f"twostep: {harmless(error.message)}{here}", file=sys.stderr)
        status = 2 if isinstance(error, WrongSettings) else 1
    except BrokenPipeError:
        # Who read our output has left; keep Python from complaining when it flushes what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    return status
