"""The blocking client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from twostep.client import _channel
from twostep.client._answer import Answer, finished
from twostep.client._base import ClientBase, Wire
from twostep.client._pool import ConnectionLease, HealthProbe
from twostep.client._status import ClusterStatus
from twostep.client._types import Completion, Embeddings, EmbedOptions, Model, Piece, Tokens
from twostep.client._wire import Messages
from twostep.errors import InvalidRequest


class Generation(Answer):
    """An answer on its way. Iterate over it once for its pieces, or call result() for all of it.

    The request is sent when this object is made. Leaving the loop early cancels it, and so does dropping the object.
    Raises while iterating: any twostep.errors.TwostepError; StreamBroken if the answer broke off half-way.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        self._woken = threading.Event()
        super().__init__(*given, **named)

    def __iter__(self) -> Iterator[Piece]:
        try:
            while not self._over:
                piece = finished(self._next())
                if piece is not None:
                    yield piece
        finally:
            # Reached at the end, by an error, and by the generator's close when the caller leaves its loop.
            self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends the request and frees everything it holds on the servers. From any thread; nothing happens after the end."""
        super().cancel()
        self._woken.set()

    def result(self) -> Completion:
        """Waits for the end and returns the whole answer, with what earlier iteration took."""
        for _ in self:
            pass
        return self._completion()

    async def _read(self) -> object:
        try:
            return next(self._call)
        except StopIteration:
            return None
        except grpc.RpcError:
            raise
        except BaseException:
            self._lease.abandon()
            raise

    async def _metadata(self) -> Iterable[tuple[str, str | bytes]]:
        found: Iterable[tuple[str, str | bytes]] = self._call.initial_metadata()
        return found

    async def _pause(self, seconds: float) -> None:
        self._woken.wait(seconds)


class Client(ClientBase[Generation]):
    """The routers of a deployment, for any number of threads and concurrent requests. Close it, or use it as a context manager.

        with Client("localhost:50051") as client:
            for piece in client.generate("Once upon a time", max_tokens=64, temperature=0.0):
                print(piece.text, end="", flush=True)

    `target` is one router, a name with several behind it, or a list. A request goes to the router of the list that has the fewest requests
    of this client, unless it has failed lately (twostep/client/_pool.py); behind a name, to each address in turn. A router with many
    requests gets up to `max_connections` connections, 100 requests on each.

    `timeout` (seconds) bounds a whole request with its retries, and goes to the router as the call's deadline; each call may give its own.
    `max_retries` more tries are made, with growing jittered pauses, when a request was refused for want of room or the server was away:
    the same request if nothing of its answer had arrived, otherwise one that goes on after what had. While a well router is left that has
    not been tried, there is no pause, and it does not count; 0: nothing is ever sent twice.

    `api_key` is shown to the router with every call. `compression="gzip"` is for long prompts over slow links: requests of 1 KiB and more
    are compressed. `tls` trusts the system's authorities, `tls_ca` those in a file.
    """

    _answer = Generation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancels whatever is still running and closes the connections."""
        self._pool.closed = True
        for wire in self._pool.wires():
            wire.channel.close()

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> Tokens:
        """The token ids that `generate(text)` or `chat(messages)` would send to the model."""
        return finished(self._tokenize(text, messages, tools, model, timeout))

    def embed(self, inputs: str | Sequence[str] | Sequence[Sequence[int]], **options: Unpack[EmbedOptions]) -> Embeddings:
        """Returns a vector for each input: texts, or lists of token ids. Every option is described in EmbedOptions. The first input that
        fails ends all of them; what was refused for want of room, or lost, is asked again, as often as the client may."""
        return finished(self._embed(inputs, options))

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """Returns the models that are served here."""
        return finished(self._models(timeout))

    def status(self, *, timeout: float | None = None) -> ClusterStatus:
        """All workers and their load, as one of the routers sees them, and what that router did in the last seconds."""
        return finished(self._cluster(timeout))

    # ---- hooks ---------------------------------------------------------------------------------------------------------------

    def _channel_to(self, address: str, options: Any, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
        return grpc.insecure_channel(address, options) if credentials is None else grpc.secure_channel(address, credentials, options)

    def _when_done(self, call: Any, then: Callable[[], None]) -> None:
        if not call.add_callback(then):
            then()

    async def _finish(self, call: Callable[[], Any]) -> Any:
        return call()

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  nothing else is on this thread

    def _dispose(self, wire: Wire) -> None:
        wire.channel.close()

    def _ask(self, probe: HealthProbe[Wire]) -> None:
        """Nobody waits for the answer: grpc's own thread brings it."""
        future = probe.wire.check.future(_channel.HEALTH_REQUEST, timeout=_channel.HEALTH_TIMEOUT_S, metadata=self._key)
        # Dropped, it would be cancelled.
        probe.held = future

        def told(answer: Any) -> None:
            probe.held = None
            error = answer.exception() if not answer.cancelled() else grpc.FutureCancelledError()
            if isinstance(error, grpc.RpcError) or error is None:
                self._pool.probed(probe, well=_channel.is_well(answer.result() if error is None else None, error))
            else:
                self._pool.probed(probe, well=False)

        future.add_done_callback(told)

    def _let_go(self, lease: ConnectionLease[Wire], error: BaseException) -> None:
        """Releases the lease of a call that came to nothing: grpc refused to make it, as it does with a ValueError on a closed channel, or
        it was interrupted. Raises InvalidRequest if the client was closed meanwhile."""
        super()._let_go(lease, error)
        if isinstance(error, ValueError) and self._pool.closed:
            raise InvalidRequest("this client was closed meanwhile; make a new one") from error
        if not isinstance(error, ValueError | TypeError):
            lease.abandon()
