"""`python -m engine_with_local_kv`: an engine's process whose one transport is the local one: ready at once, and no peer can be reached."""

from __future__ import annotations

import sys

from kv_transfer import remote
from kv_transfer.local.transport import LocalHub, LocalTransport
from kv_transfer.transports import TransportParts, Transports
from twostep.worker.engine_process import main


def local_transport(parts: TransportParts) -> Transports:
    if parts.carried is not None:
        return parts.carried
    block_bytes = parts.runner.kv_shape.block_bytes
    return Transports([LocalTransport(parts.runner, block_bytes, LocalHub(), worker_id=parts.worker_id, epoch=parts.epoch)])


if __name__ == "__main__":
    remote.make_transports = local_transport
    sys.exit(main(lambda engine, link: remote.RemoteKv(engine, link).plane))
