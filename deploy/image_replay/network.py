"""Hosts of a network that exists for the time of a replay: a network namespace each, and one for the bridge. For root on Linux."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from types import TracebackType

_PREFIX = "10.211.7"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL, timeout=30)


class Network:
    """Nothing outside can be reached from it, and nothing of it from outside. `names` are the hosts."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._tag = f"ts{os.getpid()}"

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    def address(self, name: str) -> str:
        return f"{_PREFIX}.{self._names.index(name) + 2}"

    def hosts_file(self) -> str:
        return "127.0.0.1 localhost\n" + "".join(f"{self.address(name)} {name}\n" for name in self._names)

    def inside(self, name: str) -> list[str]:
        """Returns what a command begins with to run on that host."""
        return ["ip", "netns", "exec", f"{self._tag}-{name}"]

    def _make(self) -> None:
        bridge = f"{self._tag}-bridge"
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", bridge, "addr", "add", f"{_PREFIX}.1/24", "dev", "br0")
        _ip("-n", bridge, "link", "set", "br0", "up")
        for at, name in enumerate(self._names):
            host = f"{self._tag}-{name}"
            _ip("netns", "add", host)
            _ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", f"to{at}", "netns", bridge)
            _ip("-n", bridge, "link", "set", f"to{at}", "master", "br0", "up")
            _ip("-n", host, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            # It leads nowhere, but Ray looks for the way out to find its own address.
            _ip("-n", host, "route", "add", "default", "via", f"{_PREFIX}.1")
            _ip("-n", host, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in [*self._names, "bridge"]:
            subprocess.run(["ip", "netns", "delete", f"{self._tag}-{name}"], check=False, stderr=subprocess.DEVNULL, timeout=30)
