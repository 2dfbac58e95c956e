"""Makes of a request what only the engine's own process can hold: its prefix hashes and its compiled grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from twostep.engine.grammar import GrammarCompiler, GrammarState
from twostep.engine.types import EngineRequest
from twostep.errors import InvalidRequest, ResourceExhausted
from twostep.prefix import PrefixHasher
from twostep.sampling_params import Grammar

# Longer prompts are hashed in a thread, so many tokens at a time: 128 Ki of them take tens of milliseconds, for which nobody's stream is
# to wait.
_MAX_INLINE_TOKENS = 4096

_GRAMMAR_THREADS = 2
_MAX_PENDING_GRAMMARS = 256
# The first one loads the tokenizer.
_GRAMMAR_TIMEOUT_S = 60.0


class Preparation:
    """Prepares one engine's requests. Belongs to one event loop."""

    def __init__(self, compiler: GrammarCompiler, block_size: int) -> None:
        self._grammars = Grammars(compiler)
        self._block_size = block_size

    async def of(self, request: EngineRequest) -> EngineRequest:
        """Prepares a request, at once but for a long prompt and a request with a grammar. Raises InvalidRequest, ResourceExhausted and
        SetupError (of grammars)."""
        hasher, grammar = None, None
        if request.prefix_key and len(request.token_ids) > _MAX_INLINE_TOKENS:
            hasher = await asyncio.to_thread(_hashed, request.token_ids, PrefixHasher(request.prefix_key, self._block_size))
        if request.sampling.grammar is not None:
            if not 1 <= request.num_prompt_tokens <= len(request.token_ids):
                raise InvalidRequest(f"num_prompt_tokens is {request.num_prompt_tokens}; give 1 to {len(request.token_ids)}")
            grammar = await self._grammars.state(request.sampling.grammar, request.token_ids[request.num_prompt_tokens :])
        return request if hasher is None and grammar is None else replace(request, hasher=hasher, grammar=grammar)

    def close(self) -> None:
        self._grammars.close()


class Grammars:
    """Compiles the grammars of one worker's requests, beside its event loop: what a request waits for before it is queued.

    A compiled grammar is there at once; another one takes a thread, of which there are few, for a millisecond to some tenths of a second.
    What llguidance spends is bounded by its own limits (twostep/text/grammar.py); whoever waits longer than it should take is refused."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(max_workers=_GRAMMAR_THREADS, thread_name_prefix="compile")
        self._num_pending = 0

    async def state(self, grammar: Grammar, tokens: Sequence[int]) -> GrammarState:
        """Returns the state of a grammar after the tokens generated before. Raises InvalidRequest, SetupError, and ResourceExhausted where
        others' grammars keep the threads busy."""
        state = self._compiler.cached(grammar)
        if state is not None and not tokens:
            return state
        if self._num_pending >= _MAX_PENDING_GRAMMARS:
            raise ResourceExhausted(f"{self._num_pending} grammars are being compiled here; try another worker, or later")
        self._num_pending += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._work, grammar, tokens)
        work.add_done_callback(self._done)
        try:
            async with asyncio.timeout(_GRAMMAR_TIMEOUT_S):
                return await asyncio.shield(work)
        except TimeoutError as error:
            raise ResourceExhausted(
                f"the grammar was not compiled within {_GRAMMAR_TIMEOUT_S:g} s; try another worker, or later"
            ) from error

    def _work(self, grammar: Grammar, tokens: Sequence[int]) -> GrammarState:
        return self._compiler.compile(grammar).after(tokens)

    def _done(self, work: asyncio.Future[GrammarState]) -> None:
        self._num_pending -= 1
        if not work.cancelled():
            work.exception()  # perhaps nobody waits for it any more

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _hashed(token_ids: Sequence[int], hasher: PrefixHasher) -> PrefixHasher:
    """Runs in a thread. Piece by piece, because the interpreter changes threads between calls, not within one."""
    for start in range(0, len(token_ids), _MAX_INLINE_TOKENS):
        hasher.extend(token_ids[start : start + _MAX_INLINE_TOKENS])
    return hasher
