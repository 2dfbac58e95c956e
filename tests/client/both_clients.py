"""An AsyncClient that is used as a Client is, so that one suite is for both."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from twostep import AsyncClient, Client, Piece
from twostep.client import AsyncGeneration


class Looped:
    """Its event loop runs while something is asked of it, and a moment longer where `routers` are looked at."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.runner = asyncio.Runner()
        try:
            self._client: AsyncClient = self.run(lambda: AsyncClient(*given, **named))
        except BaseException:
            self.runner.close()
            raise

    def run(self, make: Callable[[], Any]) -> Any:
        async def work() -> Any:
            made = make()
            return await made if inspect.isawaitable(made) else made

        return self.runner.run(work())

    @property
    def routers(self) -> Any:
        self.run(lambda: asyncio.sleep(0.005))
        return self._client.routers

    def generate(self, *given: Any, **named: Any) -> LoopedGeneration:
        return LoopedGeneration(self, self.run(lambda: self._client.generate(*given, **named)))

    def chat(self, *given: Any, **named: Any) -> LoopedGeneration:
        return LoopedGeneration(self, self.run(lambda: self._client.chat(*given, **named)))

    def close(self) -> None:
        self.run(self._client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self.runner.close()

    def __repr__(self) -> str:
        return repr(self._client).removeprefix("Async")

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: self.run(lambda: getattr(self._client, name)(*given, **named))


class LoopedGeneration:
    def __init__(self, client: Looped, answer: AsyncGeneration) -> None:
        self._client, self._answer = client, answer

    def __iter__(self) -> Iterator[Piece]:
        pieces: Any = aiter(self._answer)
        try:
            while (piece := self._client.run(lambda: anext(pieces, None))) is not None:
                yield piece
        finally:
            self._client.run(pieces.aclose)

    def result(self) -> Any:
        return self._client.run(self._answer.result)

    def cancel(self) -> None:
        self._client.run(self._answer.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __repr__(self) -> str:
        return repr(self._answer).removeprefix("Async")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answer, name)


def until(condition: Callable[[], object], client: Client | Looped | None = None, seconds: float = 60.0) -> None:
    """Waits for what happens on the server's side, or in grpc's threads, and lets an asyncio client go on meanwhile."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        _ = client.routers if client is not None else None
        time.sleep(0.005)
