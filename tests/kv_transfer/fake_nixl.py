"""A NIXL library of one process: the part of its Python interface that kv_transfer.nixl.agent uses, over memmove. Reads can be held back
and fail, and what is registered, known and not released can be asked for."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest


class nixlBackendError(Exception):
    """As the bindings name it."""


class nixlRemoteDisconnectError(Exception):
    """As the bindings name it."""


class FakeHandle:
    def __init__(self, name: str, near: np.ndarray, far: np.ndarray) -> None:
        assert near.dtype == far.dtype == np.uint64
        assert (near[:, 1] == far[:, 1]).all()
        self.name, self.near, self.far = name, near, far
        self.state = "NEW"


class FakeLibrary:
    """All agents of a test."""

    def __init__(self) -> None:
        # One that was closed is gone.
        self.agents: WeakValueDictionary[str, FakeAgent] = WeakValueDictionary()
        # Reads from these stay on their way, or fail.
        self.held: set[str] = set()
        self.dead: set[str] = set()
        self.live_handles = 0

    def copied_late(self, handle: FakeHandle) -> None:
        for near, far in zip(handle.near.tolist(), handle.far.tolist(), strict=True):
            ctypes.memmove(near[0], far[0], far[1])


class FakeAgent:
    library: FakeLibrary

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        assert not config["enable_prog_thread"]
        self.name = name
        self.regions: list[tuple[int, int]] = []
        self.known: set[str] = set()
        self.library.agents[name] = self

    def create_backend(self, backend: str, params: dict[str, str]) -> None:
        assert backend == "UCX"
        if "refuse" in params:
            raise nixlBackendError("NIXL_ERR_BACKEND")

    def register_memory(self, regions: list[tuple[int, int, int, str]], memory: str) -> None:
        self.regions += [(address, size) for address, size, _, _ in regions]

    def get_agent_metadata(self) -> bytes:
        return b"metadata of " + self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name = metadata.removeprefix(b"metadata of ").decode()
        if name not in self.library.agents or name in self.library.dead:
            raise nixlBackendError("NIXL_ERR_BACKEND")
        self.known.add(name)
        return name.encode()

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, descriptors: np.ndarray, memory: str) -> np.ndarray:
        return descriptors

    def initialize_xfer(self, operation: str, near: np.ndarray, far: np.ndarray, name: str) -> FakeHandle:
        assert operation == "READ"
        assert name == self.name or name in self.known
        if name not in self.library.agents:
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        for rows, agent in ((near, self), (far, self.library.agents[name])):
            for address, size, _ in rows.tolist():
                if not any(a <= address and address + size <= a + n for a, n in agent.regions):
                    raise nixlBackendError("NIXL_ERR_NOT_FOUND")
        self.library.live_handles += 1
        return FakeHandle(name, near, far)

    def transfer(self, handle: FakeHandle) -> str:
        handle.state = "PROC"
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: FakeHandle) -> str:
        if handle.state == "PROC" and handle.name in self.library.dead:
            handle.state = "ERR"
            raise nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")
        if handle.state == "PROC" and handle.name not in self.library.held:
            self.library.copied_late(handle)
            handle.state = "DONE"
        return handle.state

    def release_xfer_handle(self, handle: FakeHandle) -> None:
        assert handle.state != "PROC", "a read on its way was released"
        self.library.live_handles -= 1

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


@contextmanager
def fake_nixl(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    """In place of the real one, whether that is installed or not."""
    library = FakeLibrary()
    agent_class = type("nixl_agent", (FakeAgent,), {"library": library})
    errors = SimpleNamespace(nixlBackendError=nixlBackendError, nixlRemoteDisconnectError=nixlRemoteDisconnectError)
    api = SimpleNamespace(nixl_agent=agent_class, nixl_agent_config=lambda **config: config)
    package = SimpleNamespace(_api=api, _bindings=errors)
    with monkeypatch.context() as patch:
        for name, module in (("nixl", package), ("nixl._api", api), ("nixl._bindings", errors)):
            patch.setitem(sys.modules, name, module)
        yield library
    assert library.live_handles == 0
