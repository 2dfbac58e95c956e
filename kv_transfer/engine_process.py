"""`python -P -m kv_transfer.engine_process`: a worker starts it with its own end of a socket (twostep/worker/remote_engine.py)."""

from __future__ import annotations

import sys

from kv_transfer.remote import RemoteKv
from twostep.worker.engine_process import main

if __name__ == "__main__":
    sys.exit(main(lambda engine, link: RemoteKv(engine, link).plane))
