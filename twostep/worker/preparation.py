"""Makes of a request what only the engine's own process can hold: its prefix hashes and its compiled grammar."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
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

_MAX_PENDING_GRAMMARS = 256
# Of a thread's processor time. What took longer once has a thread of its own from then on.
_SLOW_S = 0.1
_MAX_SLOW_KNOWN = 4096
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

    A compiled grammar is there at once; another one takes a thread for a millisecond to some tenths of a second. Grammars that are known to
    take longer take turns at one thread, and all others at another: whoever sends slow ones again and again delays no quick one. Routers
    try each grammar before (router/prompting/grammar_check.py), a caller's one by one; whoever waits longer than it should take is
    refused."""

    def __init__(self, compiler: GrammarCompiler, *, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock`: seconds of the calling thread."""
        self._compiler = compiler
        self._clock = clock
        self._quick, self._slow = (ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"compile-{name}") for name in ("quick", "slow"))
        # Hashes of grammars, those that came up last at the end.
        self._slow_known: OrderedDict[int, None] = OrderedDict()
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
        threads = self._slow if hash(grammar) in self._slow_known else self._quick
        work = asyncio.get_running_loop().run_in_executor(threads, self._work, grammar, tokens)
        work.add_done_callback(self._done)
        try:
            async with asyncio.timeout(_GRAMMAR_TIMEOUT_S):
                return await asyncio.shield(work)
        except TimeoutError as error:
            raise ResourceExhausted(
                f"the grammar was not compiled within {_GRAMMAR_TIMEOUT_S:g} s; try another worker, or later"
            ) from error

    def _work(self, grammar: Grammar, tokens: Sequence[int]) -> GrammarState:
        self._compiler.load()
        begun = self._clock()
        state = self._compiler.compile(grammar)
        if self._clock() - begun > _SLOW_S:
            self._slow_known[hash(grammar)] = None
            self._slow_known.move_to_end(hash(grammar))
            if len(self._slow_known) > _MAX_SLOW_KNOWN:
                self._slow_known.popitem(last=False)
        return state.after(tokens)

    def _done(self, work: asyncio.Future[GrammarState]) -> None:
        self._num_pending -= 1
        if not work.cancelled():
            work.exception()  # perhaps nobody waits for it any more

    def close(self) -> None:
        for threads in (self._quick, self._slow):
            threads.shutdown(wait=False, cancel_futures=True)


def _hashed(token_ids: Sequence[int], hasher: PrefixHasher) -> PrefixHasher:
    """Runs in a thread. Piece by piece, because the interpreter changes threads between calls, not within one."""
    for start in range(0, len(token_ids), _MAX_INLINE_TOKENS):
        hasher.extend(token_ids[start : start + _MAX_INLINE_TOKENS])
    return hasher
