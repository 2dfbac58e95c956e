"""`python -P -m kv_transfer.ray.local_head`: a RayHead as a process, for whoever may not import this package. Becomes the head."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kv_transfer.ray.head import RayHead
from twostep.errors import SetupError


def main(arguments: Sequence[str]) -> None:
    """Prepares the directory (an existing token file in it is kept) and replaces this process. Raises SetupError."""
    parser = argparse.ArgumentParser(prog="python -P -m kv_transfer.ray.local_head", description="A small Ray head on this machine.")
    parser.add_argument("--temp-dir", type=Path, required=True, help="private and short")
    parser.add_argument("--port", type=int, required=True, help="what KV agents join")
    parser.add_argument("--client-port", type=int, required=True, help="Ray's client server, which nobody uses")
    parser.add_argument("--object-store-bytes", type=int, default=512 << 20, help="shared memory for KV on its way")
    head = RayHead(**vars(parser.parse_args(arguments)))
    head.prepare()
    os.execve(sys.executable, head.argv(), head.env(os.environ))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SetupError as error:
        sys.exit(error.message)
