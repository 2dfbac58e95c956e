"""A process whose pool others read over NIXL: says its endpoint and one chunk of it, and lives until its standard input ends.

python nixl_source.py BACKEND_PARAMS_JSON NUM_BLOCKS BLOCK_BYTES
"""

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

SEED = 11


def contents(num_blocks: int, block_bytes: int) -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, 256, (num_blocks, block_bytes), np.uint8)


async def main(params: dict[str, str], num_blocks: int, block_bytes: int) -> None:
    memory = NixlMemory(torch.from_numpy(contents(num_blocks, block_bytes)), arena_bytes=1 << 20, probe_bytes=1 << 20)
    transport = NixlTransport(memory, backend_params=params)
    await transport.start()
    chunk = await transport.publish("a", 0, 0, list(range(num_blocks)), ttl_s=300, deadline=time.monotonic() + 60)
    print(json.dumps([transport.endpoint, asdict(chunk)]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
