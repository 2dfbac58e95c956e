"""`python gated_worker.py prefill|decode GATES FLAGS…`: the real worker on the fake model, with gates where hand-overs can be held.

    reserved      the first step of a prompt that begins with RESERVED_TOKEN
    publishing    a request's chunks from the third on, before they are published
    ready         all of a request's chunks, before the decode worker fetches them
    fetching      a request's chunks from the third on, before the decode worker fetches them

A request is held by its name (`publishing-…`), in its first attempt only. The fake model's KV is made large enough that a chunk is an
object of its own in Ray's store.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from gates import Gate

import twostep.worker.model
from kv_transfer.ray.transport import RayTransport
from twostep.engine.batch import Batch, Sampled
from twostep.engine.fake import FakeRunner
from twostep.worker.engine_child import EngineChild

RESERVED_TOKEN = 3
# 1 KiB a token: blocks of 16 KiB.
_FAKE_SHAPE = {"num_layers": 2, "head_dim": 64}
_THIRD = 2


class GatedRunner(FakeRunner):
    gate: Gate

    def run(self, batch: Batch, *args: Any, **kwargs: Any) -> Sampled:
        if bool(((batch.token_ids == RESERVED_TOKEN) & (batch.positions == 0)).any()):
            self.gate.wait_blocking("reserved")
        return super().run(batch, *args, **kwargs)


def _name_of(lease_id: str) -> str:
    """worker/epoch/name-n~digits/attempt → name; empty for later attempts."""
    _, _, request_id, attempt = lease_id.rsplit("/", 3)
    return request_id.partition("-")[0] if attempt == "1" else ""


def _gated(method: Callable[..., Any], gate: Gate, starts: dict[str, int]) -> Callable[..., Any]:
    """`starts`: name of a request → index of its first chunk that is held."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def held(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        name = _name_of(given["lease_id"])
        index = given["index"] if "index" in given else given["chunk"].index
        if name in starts and index >= starts[name]:
            await gate.wait(name)
        return await method(*args, **kwargs)

    return held


def install(directory: str, worker_id: str) -> None:
    """Puts gates into the process that has the engine."""
    gate = Gate(Path(directory), worker_id)
    GatedRunner.gate = gate
    twostep.worker.model.FakeRunner = functools.partial(GatedRunner, **_FAKE_SHAPE)  # type: ignore[misc, assignment]
    RayTransport.publish = _gated(RayTransport.publish, gate, {"publishing": _THIRD})  # type: ignore[method-assign]
    RayTransport.fetch = _gated(RayTransport.fetch, gate, {"ready": 0, "fetching": _THIRD})  # type: ignore[method-assign]


def main(role: str, directory: str, flags: list[str]) -> int:
    os.environ["GATES"], os.environ["GATED"] = directory, flags[flags.index("--worker-id") + 1]
    os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    start = EngineChild.start
    EngineChild.start = lambda _: start("gated_engine")  # type: ignore[method-assign, assignment]
    code: int = import_module(f"{role}_worker.__main__").main(flags)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
