"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from twostep.client import _channel
from twostep.client._answer import Answer
from twostep.client._base import ClientBase, Wire
from twostep.client._pool import HealthProbe
from twostep.client._status import ClusterStatus
from twostep.client._types import Completion, Embeddings, EmbedOptions, Model, Piece, Tokens
from twostep.client._wire import Messages


class AsyncGeneration(Answer):
    """An answer on its way. Iterate over it once for its pieces, or await result() for all of it.

    The request is sent when this object is made. Leaving the loop early cancels it, and so do cancelling the task that iterates and
    dropping the object. Raises while iterating: any twostep.errors.TwostepError; StreamBroken if the answer broke off half-way.
    """

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while not self._over:
                piece = await self._next()
                if piece is not None:
                    yield piece
        finally:
            # Reached at the end, by an error, by the task's cancellation and, through the loop's generator hook, when the caller leaves.
            self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        # grpc's own tasks keep the call alive after the last reference of ours is gone.
        call = getattr(self, "_call", None)
        if call is None or self._over:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # the loop is gone, and the connection with it
        call.cancel()

    async def result(self) -> Completion:
        """Waits for the end and returns the whole answer, with what earlier iteration took."""
        async for _ in self:
            pass
        return self._completion()

    async def _read(self) -> object:
        try:
            return await self._call.read()
        except asyncio.CancelledError:
            # grpc raises this for its call's cancellation as well as for the task's.
            if not self._was_cancelled():
                raise
            return None

    async def _metadata(self) -> Iterable[tuple[str, str | bytes]]:
        found: Iterable[tuple[str, str | bytes]] = await self._call.initial_metadata()
        return found

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class AsyncClient(ClientBase[AsyncGeneration]):
    """The routers of a deployment, for one event loop and any number of concurrent requests. Close it, or use it with `async with`.

        async with AsyncClient("localhost:50051") as client:
            async for piece in client.generate("Once upon a time", max_tokens=64, temperature=0.0):
                print(piece.text, end="", flush=True)

    Options are those of Client.
    """

    _answer = AsyncGeneration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels whatever is still running and closes the connections."""
        self._pool.closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for wire in self._pool.wires():
            await wire.channel.close()

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> Tokens:
        """The token ids that `generate(text)` or `chat(messages)` would send to the model."""
        return await self._tokenize(text, messages, tools, model, timeout)

    async def embed(self, inputs: str | Sequence[str] | Sequence[Sequence[int]], **options: Unpack[EmbedOptions]) -> Embeddings:
        """Returns a vector for each input: texts, or lists of token ids. Every option is described in EmbedOptions. The first input that
        fails ends all of them; what was refused for want of room, or lost, is asked again, as often as the client may."""
        return await self._embed(inputs, options)

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """Returns the models that are served here."""
        return await self._models(timeout)

    async def status(self, *, timeout: float | None = None) -> ClusterStatus:
        """All workers and their load, as one of the routers sees them, and what that router did in the last seconds."""
        return await self._cluster(timeout)

    # ---- hooks ---------------------------------------------------------------------------------------------------------------

    def _channel_to(self, address: str, options: Any, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        return (
            grpc.aio.insecure_channel(address, options) if credentials is None else grpc.aio.secure_channel(address, credentials, options)
        )

    def _when_done(self, call: Any, then: Callable[[], None]) -> None:
        call.add_done_callback(lambda _: then())

    async def _finish(self, call: Callable[[], Any]) -> Any:
        return await call()

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _dispose(self, wire: Wire) -> None:
        self._spawn(wire.channel.close())

    def _ask(self, probe: HealthProbe[Wire]) -> None:
        async def ask() -> None:
            well = False
            try:
                response = await probe.wire.check(_channel.HEALTH_REQUEST, timeout=_channel.HEALTH_TIMEOUT_S, metadata=self._key)
                well = _channel.is_well(response, None)
            except grpc.RpcError as error:
                well = _channel.is_well(None, error)
            finally:
                self._pool.probed(probe, well=well)

        self._spawn(ask())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
