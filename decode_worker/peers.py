"""Channels to the prefill workers that hand over to this one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from twostep.rpc.call_signing import CallSigner
from twostep.rpc.channel import open_channel
from twostep.settings.tls import TlsFiles

_MAX_IDLE = 32


@dataclass(slots=True)
class _Peer:
    channel: grpc.aio.Channel
    num_users: int = 0


class Life(Protocol):
    """One life of a prefill worker, and where it is: what its tickets say."""

    @property
    def worker_id(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def address(self) -> str: ...


class Peers:
    """One channel for each life of a worker, kept while used and, the latest few, afterwards."""

    def __init__(self, tls: TlsFiles, signer: CallSigner) -> None:
        self._tls = tls
        self._signer = signer
        self._peers: OrderedDict[tuple[str, int, str], _Peer] = OrderedDict()

    @asynccontextmanager
    async def channel(self, to: Life) -> AsyncIterator[grpc.aio.Channel]:
        key = to.worker_id, to.epoch, to.address
        peer = self._peers.get(key)
        if peer is None:
            signature = self._signer.sign(to.worker_id, to.epoch)
            peer = self._peers[key] = _Peer(open_channel(to.address, tls=self._tls, signature=signature))
        self._peers.move_to_end(key)
        peer.num_users += 1
        try:
            yield peer.channel
        finally:
            peer.num_users -= 1
            await self._close_idle(_MAX_IDLE)

    async def close(self) -> None:
        await self._close_idle(0)

    async def _close_idle(self, keep: int) -> None:
        idle = [key for key, peer in self._peers.items() if peer.num_users == 0]
        # All out of the table before the first is awaited: nobody may begin to use one that is about to be closed.
        unused = [self._peers.pop(key) for key in idle[: max(0, len(idle) - keep)]]
        for peer in unused:
            await peer.channel.close()
