"""Channels to prefill workers: one for each life, and only idle ones are closed."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from decode_worker.peers import Peers, Source
from twostep.rpc.call_signing import CallSigner
from twostep.settings.tls import PLAINTEXT


def source(address: str) -> Source:
    return Source(worker_id="p", epoch=1, address=address)


async def test_a_channel_asked_for_while_others_are_closed_is_an_open_one(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(PLAINTEXT, CallSigner(b"secret of a deployment", "d"))
    may_close = asyncio.Event()
    closed: list[grpc.aio.Channel] = []

    def slow_to_close(channel: grpc.aio.Channel) -> None:
        close = channel.close

        async def closing() -> None:
            await may_close.wait()
            closed.append(channel)
            await close()

        monkeypatch.setattr(channel, "close", closing)

    for address in ("a:1", "b:1"):
        async with peers.channel(source(address)) as channel:
            slow_to_close(channel)
    ending = asyncio.create_task(peers.close())
    await asyncio.sleep(0)
    async with peers.channel(source("b:1")) as again:
        may_close.set()
        await ending
        assert len(closed) == 2
        assert again not in closed
    await peers.close()
