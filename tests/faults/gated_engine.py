"""`python -m gated_engine`: kv_transfer.engine_process with the gates of gated_worker.py, where its environment says."""

from __future__ import annotations

import os
import sys

from gated_worker import install

from kv_transfer.remote import RemoteKv
from twostep.worker.engine_process import main

if __name__ == "__main__":
    install(os.environ["GATES"], os.environ["GATED"])
    sys.exit(main(lambda engine, link: RemoteKv(engine, link).plane))
