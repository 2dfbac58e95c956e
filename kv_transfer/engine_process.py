"""`python -P -m kv_transfer.engine_process`: a worker starts it with its own end of a socket (twostep/worker/remote_engine.py)."""

from __future__ import annotations

import gc
import sys

# What is imported stays, and looking for garbage in it takes a seventh of the time. `main` has garbage collected again.
gc.disable()

from kv_transfer.remote import RemoteKv  # noqa: E402
from twostep.worker.engine_process import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(lambda engine, link: RemoteKv(engine, link).plane))
