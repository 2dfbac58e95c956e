"""A process whose pool others read over NIXL: says its endpoint and one chunk of it, and lives until its standard input ends."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict

import numpy as np
import torch

from kv_transfer.nixl.memory import NixlMemory
from kv_transfer.nixl.transport import NixlTransport

# Over TCP a read needs the source's process, so that a stopped one stops it. Other paths within a host do not.
TCP = {"engine_config": "TLS=tcp"}
NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 20
CONTENTS = np.random.default_rng(11).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)


def transport_of(pool: np.ndarray, arena_bytes: int) -> NixlTransport:
    return NixlTransport(NixlMemory(torch.from_numpy(pool), arena_bytes=arena_bytes, probe_bytes=1 << 20), backend_params=TCP)


async def main() -> None:
    transport = transport_of(CONTENTS, 1 << 20)
    await transport.start()
    chunk = await transport.publish("a", 0, 0, range(NUM_BLOCKS), ttl_s=300, deadline=time.monotonic() + 60)
    print(json.dumps([transport.endpoint, asdict(chunk)]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main())
