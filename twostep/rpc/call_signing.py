"""Calls to workers are signed with the deployment's secret: whoever does not hold it gets nothing from a worker but its health.

A signature names who calls, and one life of one worker (its id and epoch, as its record in Redis and its tickets have them):

    twostep-call-bin: caller, worker id, epoch, HMAC-SHA256 of the three under a key of its own (while the secret is changed, under two)

It is made once for each channel, and no clock is asked. One that was overheard is of use at that worker only, and until it starts again or
changes its role; against being overheard there is TLS. A call that is meant for another life is refused with UNAVAILABLE: look again.
Whoever is refused for want of a signature is told which worker refused, so that who knows only an address can sign as well
(`channel_to_worker`).
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from twostep.errors import CHALLENGE, Unauthenticated, Unavailable
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.channel import Signature, SignedChannel, error_from_rpc, open_channel
from twostep.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostep.settings.tls import PLAINTEXT, TlsFiles

HEADER = "twostep-call-bin"
_PURPOSE = "twostep.call.v1"
_ASK_S = 5.0
# Signatures that verified, so that each is worked out once; those of a deployment are fewer.
_MAX_KNOWN = 4096

Life = tuple[str, int]


class CallSigner:
    def __init__(self, secret: DeploymentSecret, caller: str) -> None:
        """`caller`: the process's own id. Workers share their places out among callers."""
        self._keys = secret.keys_for(_PURPOSE)
        self._caller = caller

    def sign(self, worker_id: str, epoch: int) -> Signature:
        """Metadata of calls to that life of that worker."""
        said = b"".join(map(_counted, (self._caller, worker_id, str(epoch))))
        return ((HEADER, said + self._keys.sign(said)),)


@asynccontextmanager
async def channel_to_worker(
    address: str, secret: DeploymentSecret, *, caller: str, tls: TlsFiles = PLAINTEXT
) -> AsyncIterator[grpc.aio.Channel]:
    """For who knows an address alone: a channel whose calls are signed for whatever life of a worker answers there now. Raises Unavailable,
    and what else its error says."""
    async with open_channel(address, tls=tls) as channel:
        yield await introduced(channel, CallSigner(secret, caller))


async def introduced(channel: grpc.aio.Channel, signer: CallSigner) -> grpc.aio.Channel:
    """The same, of a channel that is there already."""
    stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
    try:
        await stub.Stats(worker_pb2.WorkerStatsRequest(), timeout=_ASK_S)
    except grpc.aio.AioRpcError as error:
        life = challenge_in(error.trailing_metadata())
        if life is None:
            raise error_from_rpc(error) from None
        return SignedChannel(channel, signer.sign(*life))
    return channel


class CallGate:
    """A worker's: which calls are for its present life, and signed."""

    def __init__(self, secret: DeploymentSecret, life: Callable[[], Life]) -> None:
        """`life`: the worker's id, and its epoch now."""
        self._keys = secret.keys_for(_PURPOSE)
        self._life = life
        self._known: dict[bytes, tuple[str, Life]] = {}

    def admit(self, _method: str, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        told = next((value for key, value in metadata if key == HEADER), b"")
        life = self._life()
        found = self._known.get(told) if isinstance(told, bytes) else None
        if found is None:
            found = self._verified(told, life)
        caller, meant = found
        if meant != life:
            raise Unavailable(f"the call is for {meant[0]} of epoch {meant[1]}, this is {life[0]} of {life[1]}; look it up again")
        return caller

    def _verified(self, told: str | bytes, life: Life) -> tuple[str, Life]:
        said, mac = _said_and_mac(told) if isinstance(told, bytes) else (b"", b"")
        if not self._keys.is_signed(said, mac):
            wrong = "is not signed" if not told else "is signed with another secret"
            raise Unauthenticated(
                f"the call {wrong}: worker {life[0]} serves its own deployment only; give it and whoever calls the same --secret-file",
                challenge=_counted(life[0]) + _counted(str(life[1])),
            )
        caller, rest = _split(said)
        found = caller, _life_in(rest)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[said + mac] = found
        return found


def challenge_in(metadata: Iterable[tuple[str, Any]] | None) -> Life | None:
    """Which worker refused an unsigned call, and in which life; None: it was not for that."""
    for key, value in metadata or ():
        if key == CHALLENGE and isinstance(value, bytes):
            try:
                return _life_in(value)
            except (struct.error, ValueError) as error:
                raise Unavailable("what answers there is no worker that is known here; give a worker's address") from error
    return None


def _said_and_mac(told: bytes) -> tuple[bytes, bytes]:
    """The three counted texts, and what follows them. Of anything else, nothing: it is signed by nobody."""
    end = 0
    for _ in range(3):
        if len(told) < end + 4:
            return b"", b""
        end += 4 + int(struct.unpack_from("<I", told, end)[0])
    return told[:end], told[end:]


def _life_in(data: bytes) -> Life:
    worker_id, rest = _split(data)
    return worker_id, int(_split(rest)[0])


def _counted(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<I", len(raw)) + raw


def _split(data: bytes) -> tuple[str, bytes]:
    (size,) = struct.unpack_from("<I", data)
    return data[4 : 4 + size].decode("utf-8", "surrogatepass"), data[4 + size :]
