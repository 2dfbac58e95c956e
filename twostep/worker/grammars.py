"""Grammars of requests, compiled beside the event loop: what a request waits for before it is queued.

A compiled grammar is there at once; another one takes a thread, of which there are few, for a millisecond to some tenths of a second. What
llguidance spends is bounded by its own limits (twostep/text/grammar.py); whoever waits longer than it should take is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from twostep.engine.grammar import GrammarCompiler, GrammarState
from twostep.errors import ResourceExhausted
from twostep.sampling_params import Grammar

_THREADS = 2
_MAX_PENDING = 256
# The first one loads the tokenizer.
_TIMEOUT_S = 60.0


class Grammars:
    """Compiles the grammars of one worker's requests. Belongs to its event loop."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="compile")
        self._num_pending = 0

    async def state(self, grammar: Grammar, tokens: Sequence[int]) -> GrammarState:
        """The grammar after the tokens generated before. Raises InvalidRequest, SetupError, and ResourceExhausted where others' grammars
        keep the threads busy."""
        state = self._compiler.cached(grammar)
        if state is not None and not tokens:
            return state
        if self._num_pending >= _MAX_PENDING:
            raise ResourceExhausted(f"{self._num_pending} grammars are being compiled here; try another worker, or later")
        self._num_pending += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._work, grammar, tokens)
        work.add_done_callback(self._done)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await asyncio.shield(work)
        except TimeoutError as error:
            raise ResourceExhausted(f"the grammar was not compiled within {_TIMEOUT_S:g} s; try another worker, or later") from error

    def _work(self, grammar: Grammar, tokens: Sequence[int]) -> GrammarState:
        return self._compiler.compile(grammar).after(tokens)

    def _done(self, work: asyncio.Future[GrammarState]) -> None:
        self._num_pending -= 1
        if not work.cancelled():
            work.exception()  # perhaps nobody waits for it any more

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
