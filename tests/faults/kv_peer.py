"""`python kv_peer.py ADDRESS RUN_DIR NAME FILL`: one end of the ray transport as a process, told what to do by lines of JSON.

A line {"do": "publish", ...} on standard input is answered by one on standard output, in any order; "id" says which belongs to which.
It has `_NUM_BLOCKS` blocks of a MiB, block i filled with byte FILL + i, or with zeros if FILL is 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from one_sided import ArrayStore

from kv_transfer.ray.transport import RayTransport
from kv_transfer.transport import ChunkInfo
from twostep.errors import TwostepError

_NUM_BLOCKS = 40
_BLOCK_BYTES = 1 << 20


class Peer:
    def __init__(self, address: str, run_dir: str, name: str, fill: int) -> None:
        self.store = ArrayStore(np.zeros((_NUM_BLOCKS, _BLOCK_BYTES), np.uint8))
        if fill:
            self.store.blocks[:] = ((fill + np.arange(_NUM_BLOCKS)) % 256).astype(np.uint8)[:, None]
        self.transport = RayTransport(
            self.store, _BLOCK_BYTES, worker_id=name, epoch=time.time_ns(), ray_address=address, run_dir=Path(run_dir)
        )

    async def publish(self, lease: str, num_blocks: int) -> dict[str, Any]:
        chunk = await self.transport.publish(lease, 0, 0, range(num_blocks), ttl_s=120, deadline=time.monotonic() + 20)
        return {"endpoint": self.transport.endpoint, "chunk": dataclasses.asdict(chunk)}

    async def fetch(self, endpoint: str, lease: str, chunk: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The first byte of every block that was fetched."""
        info = ChunkInfo(**{key: tuple(value) if isinstance(value, list) else value for key, value in chunk.items()})
        self.store.blocks[:] = 0
        await self.transport.fetch(endpoint, lease, info, range(info.num_blocks), deadline=time.monotonic() + timeout_s)
        return {
            "blocks": self.store.blocks[: info.num_blocks, 0].tolist(),
            "uniform": bool((self.store.blocks == self.store.blocks[:, :1]).all()),
        }

    async def status(self) -> dict[str, Any]:
        session = self.transport.session
        return {
            "ready": self.transport.ready,
            "endpoint": self.transport.endpoint,
            "ring_used_bytes": 0 if session is None else session.ring_used_bytes,
            "objects": (await self.transport.stats()).num_objects,
        }

    async def drop(self, lease: str) -> dict[str, Any]:
        await self.transport.drop(lease)
        return {}

    async def answer(self, line: str) -> None:
        order: dict[str, Any] = json.loads(line)
        number, name = order.pop("id"), order.pop("do")
        begin = time.monotonic()
        try:
            result: dict[str, Any] = await getattr(self, name)(**order)
        except TwostepError as error:
            result = {"error": type(error).__name__, "message": error.message}
        sys.stdout.write(json.dumps({"id": number, "seconds": time.monotonic() - begin, **result}) + "\n")
        sys.stdout.flush()

    async def run(self) -> None:
        await self.transport.start()
        reader = asyncio.StreamReader(limit=1 << 20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        tasks: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            task = asyncio.create_task(self.answer(line.decode()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await self.transport.close()


if __name__ == "__main__":
    asyncio.run(Peer(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])).run())
