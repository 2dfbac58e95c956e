"""Channels to the prefill workers that hand over to this one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from twostep.rpc.channel import TlsFiles, open_channel

_MAX_IDLE = 32


@dataclass(slots=True)
class _Peer:
    channel: grpc.aio.Channel
    num_users: int = 0


class Peers:
    """One channel for each address, kept while used and, the latest few, afterwards."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    @asynccontextmanager
    async def channel(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(open_channel(address, tls=self._tls))
        self._peers.move_to_end(address)
        peer.num_users += 1
        try:
            yield peer.channel
        finally:
            peer.num_users -= 1
            await self._close_idle(_MAX_IDLE)

    async def close(self) -> None:
        await self._close_idle(0)

    async def _close_idle(self, keep: int) -> None:
        idle = [address for address, peer in self._peers.items() if peer.num_users == 0]
        # All out of the table before the first is awaited: nobody may begin to use one that is about to be closed.
        unused = [self._peers.pop(address) for address in idle[: max(0, len(idle) - keep)]]
        for peer in unused:
            await peer.channel.close()
