"""Channels to the prefill workers that hand over to this one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from twostep.rpc.call_signing import CallSigner
from twostep.rpc.channel import open_channel
from twostep.settings.tls import TlsFiles

_MAX_IDLE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One life of a prefill worker, and where it is."""

    worker_id: str
    epoch: int
    address: str


@dataclass(slots=True)
class _Peer:
    channel: grpc.aio.Channel
    num_users: int = 0


class Peers:
    """One channel for each life of a worker, kept while used and, the latest few, afterwards."""

    def __init__(self, tls: TlsFiles, signer: CallSigner) -> None:
        self._tls = tls
        self._signer = signer
        self._peers: OrderedDict[Source, _Peer] = OrderedDict()

    @asynccontextmanager
    async def channel(self, to: Source) -> AsyncIterator[grpc.aio.Channel]:
        peer = self._peers.get(to)
        if peer is None:
            signature = self._signer.sign(to.worker_id, to.epoch)
            peer = self._peers[to] = _Peer(open_channel(to.address, tls=self._tls, signature=signature))
        self._peers.move_to_end(to)
        peer.num_users += 1
        try:
            yield peer.channel
        finally:
            peer.num_users -= 1
            await self._close_idle(_MAX_IDLE)

    async def close(self) -> None:
        await self._close_idle(0)

    async def _close_idle(self, keep: int) -> None:
        idle = [source for source, peer in self._peers.items() if peer.num_users == 0]
        # All out of the table before the first is awaited: none is to be used that is about to be closed.
        unused = [self._peers.pop(source) for source in idle[: max(0, len(idle) - keep)]]
        for peer in unused:
            await peer.channel.close()
