"""How processes reach Redis: one server, or the master that sentinels name. A Redis Cluster is refused: what belongs together has keys in
many slots. docs/redis.md says what works.

    redis://[user:password@]host:port/db               rediss:// the same over TLS, ?ssl_ca_certs=FILE
    unix:///path/to/redis.sock
    redis+sentinel://[user:password@]host:port,host:port/NAME[/db]     rediss+sentinel:// the same over TLS
                                                       ?sentinel_username=..&sentinel_password=.. where sentinels want others

Nothing here is on a request's way but the prefix lookup, which has a deadline of its own: a Redis that takes seconds is still a Redis.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError

from twostep.errors import SetupError

# One exchange of whatever runs beside the requests: a connection over TLS with a user's name takes seven round trips at first.
EXCHANGE_S = 10.0
_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 8
_SENTINEL_PORT = 26379
_SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_HELP = "give for example redis://127.0.0.1:6379/0"
_AGAIN_S = 0.2

T = TypeVar("T")


def connect(url: str) -> Redis:
    """Returns a client whose calls answer or fail within some seconds: who calls decides what to repeat. Raises SetupError for a bad
    URL."""
    options: dict[str, Any] = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S, "retry": Retry(NoBackoff(), 0)}
    try:
        if urlsplit(url).scheme in _SENTINEL_SCHEMES:
            return _by_sentinels(url, options)
        given = options | dict(parse_url(url))
        kind = _REACTING[given.pop("connection_class", Connection)]
        return Redis.from_pool(_Pool(connection_class=kind, max_connections=_MAX_CONNECTIONS, **given))
    except (ValueError, KeyError) as error:
        raise SetupError(f"--redis-url {public(url)!r}: {error}; {_HELP}") from error


def public(url: str) -> str:
    """Returns the URL without its password."""
    parts = urlsplit(url)
    return url if parts.password is None else url.replace(f":{parts.password}@", ":***@", 1)


async def refuse_cluster(redis: Redis) -> None:
    """Raises SetupError for a Redis Cluster, and RedisError, OSError where nobody answers. A user who may not ask is believed."""
    try:
        info = await redis.info("cluster")
    except RedisConnectionError:
        raise
    except RedisError:
        return
    if info.get("cluster_enabled") in (1, "1"):
        raise SetupError(
            "--redis-url is of a Redis Cluster, over whose slots one step's keys would lie; give a server that is none (a managed service: "
            "cluster mode off), alone or behind sentinels"
        )


async def at_start(redis: Redis, timeout_s: float, work: Callable[[], Awaitable[T]]) -> T:
    """Returns what `work` does with Redis at the start of a process: later Redis may come and go. Raises SetupError: for `timeout_s` nobody
    answers, or it is a Redis Cluster."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        try:
            await refuse_cluster(redis)
            return await work()
        except (RedisError, OSError) as error:
            if time.monotonic() >= give_up_at:
                raise SetupError(
                    f"no Redis at --redis-url takes what it is told within {timeout_s:g} s ({error}); start one (`redis-server`, or "
                    "`twostep up` brings its own), or give another --redis-url"
                ) from error
        await asyncio.sleep(_AGAIN_S)


async def wait_for_redis(redis: Redis, timeout_s: float) -> None:
    """Returns once it answers. Raises SetupError as at_start."""
    await at_start(redis, timeout_s, redis.ping)


def _by_sentinels(url: str, options: dict[str, Any]) -> Redis:
    """Raises ValueError."""
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    name, _, db = parts.path.strip("/").partition("/")
    if not name:
        raise ValueError("say which master the sentinels are to name: redis+sentinel://host:port/NAME")
    addresses = [urlsplit(f"//{host}") for host in hosts.split(",")]
    asked = dict(parse_qsl(parts.query))
    of_sentinels = {key.removeprefix("sentinel_"): asked.pop(key) for key in list(asked) if key.startswith("sentinel_")}
    query = "&".join(f"{key}={value}" for key, value in asked.items())
    given = options | dict(parse_url(f"{_SENTINEL_SCHEMES[parts.scheme]}://{user}{'@' if user else ''}sentinel/{db}?{query}"))
    for key in ("host", "port"):
        given.pop(key, None)
    if given.pop("connection_class", None) is not None:
        given["ssl"] = True
    tls = {key: value for key, value in given.items() if key.startswith("ssl")}
    where = [(unquote(address.hostname or ""), address.port or _SENTINEL_PORT) for address in addresses]
    make: Callable[..., Sentinel] = Sentinel
    return _SentinelRedis.of(make(where, sentinel_kwargs=options | tls | of_sentinels), name, given)


class _SentinelRedis(Redis):
    """Closes its connections to the sentinels too."""

    sentinels: Sentinel

    @classmethod
    def of(cls, sentinels: Sentinel, name: str, options: dict[str, Any]) -> _SentinelRedis:
        client: _SentinelRedis = sentinels.master_for(name, redis_class=cls, max_connections=_MAX_CONNECTIONS, **options)
        client.sentinels = sentinels
        return client

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        for each in self.sentinels.sentinels:
            await each.aclose()


# ---- a server that has become a replica --------------------------------------------------------------------------------------


class _Pool(ConnectionPool):
    """Its connections tell it when the server has changed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.connection_kwargs["moved"] = weakref.WeakMethod(self._moved)

    async def _moved(self) -> None:
        await self.disconnect(inuse_connections=False)


class _Reacting(AbstractConnection):
    """After a failover the name of a server may lead elsewhere while the old one still answers, as a replica that refuses writes: all are
    connected anew."""

    def __init__(self, *, moved: weakref.WeakMethod[Callable[[], Awaitable[None]]], **options: Any) -> None:
        super().__init__(**options)
        self._moved = moved

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ReadOnlyError as error:
            await self.disconnect(nowait=True)
            if (moved := self._moved()) is not None:
                await moved()
            raise RedisConnectionError(f"this server only reads ({error}); it is looked up again") from error


class _Tcp(_Reacting, Connection):
    pass


class _Tls(_Reacting, SSLConnection):
    pass


class _Unix(_Reacting, UnixDomainSocketConnection):
    pass


_REACTING: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _Tcp,
    SSLConnection: _Tls,
    UnixDomainSocketConnection: _Unix,
}
