"""Prompts that are pooled here: nothing of them is handed over, and nothing is left once the router's call is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from twostep.engine.types import EngineRequest, StepOutput
from twostep.errors import TwostepError
from twostep.pooling import PoolingParams
from twostep.worker.engine_port import EnginePort


@dataclass(slots=True, eq=False, kw_only=True)
class Embedding:
    """One attempt. `pooled`: its vector, float32 [hidden_size], once it is there."""

    request: EngineRequest
    pooled: asyncio.Future[npt.NDArray[np.float32]]
    submitted_at: float = field(default_factory=time.monotonic)
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def seq_id(self) -> str:
        return self.request.seq_id

    @property
    def computed(self) -> bool:
        return self.pooled.done() and not self.pooled.cancelled() and self.pooled.exception() is None

    @property
    def error(self) -> BaseException | None:
        return self.pooled.exception() if self.pooled.done() and not self.pooled.cancelled() else None


class Embedder:
    """Has all of one worker life, on its event loop."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._live: dict[str, Embedding] = {}  # by the engine's name of the sequence

    @asynccontextmanager
    async def queued(self, request: EngineRequest) -> AsyncIterator[Embedding]:
        """Gives the embedding of a request, as a context around the wait for its vector: the prompt is queued, and what is left of it at
        the end is freed. Raises ResourceExhausted and InvalidRequest."""
        embedding = Embedding(request=request, pooled=asyncio.get_running_loop().create_future())
        await self._engine.submit(request)
        self._live[request.seq_id] = embedding
        try:
            yield embedding
        finally:
            del self._live[request.seq_id]
            # Whoever is cancelled while it waits for a future cancels that.
            if not embedding.pooled.done() or embedding.pooled.cancelled():
                embedding.pooled.cancel()
                self._engine.cancel(request.seq_id)

    def on_step(self, output: StepOutput) -> None:
        for progress in output.progress:
            if (embedding := self._live.get(progress.seq_id)) is not None and progress.first_scheduled:
                embedding.queue_s = max(0.0, output.began_at - embedding.submitted_at)
                embedding.num_cached_tokens = progress.num_cached_tokens
        for pooled in output.pooled:
            if (embedding := self._live.get(pooled.seq_id)) is not None and not embedding.pooled.done():
                embedding.prefill_s = max(0.0, time.monotonic() - embedding.submitted_at - embedding.queue_s)
                embedding.pooled.set_result(pooled.vector)
        for failure in output.failures:
            if (embedding := self._live.get(failure.seq_id)) is not None:
                self._fail(embedding, failure.as_error())

    def fail_all(self, error: TwostepError) -> None:
        for embedding in self._live.values():
            self._fail(embedding, error)

    def _fail(self, embedding: Embedding, error: TwostepError) -> None:
        if not embedding.pooled.done():
            embedding.pooled.set_exception(error)
            # Of a sequence that has ended it says nothing.
            self._engine.cancel(embedding.seq_id)


def encode_vector(vector: npt.NDArray[np.float32], params: PoolingParams) -> bytes:
    """Returns what is asked of a vector, as little-endian float32. One of zeros has no length and stays."""
    cut = vector[: params.dimensions or None]
    length = float(np.linalg.norm(cut.astype(np.float64))) if params.normalize else 0.0
    return (cut / length if length else cut).astype("<f4").tobytes()
