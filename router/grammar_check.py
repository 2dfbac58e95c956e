"""What is wrong with a grammar is said before its request waits for anything, and by a process that may die of it.

    grammar ─ known? ─┬─ yes ───────────────────────────────────────▶ verdict
                      └─ no ─ a probe that is free ─ tries it ──────▶ verdict, remembered
                                 └─ out of memory, or of processor time: it is over ─▶ refused, remembered

Probes (twostep/text/grammar_probe.py) start with the first grammar; a router that never sees one has none.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from pathlib import Path

from router.helper_process import HelperProcess, Lost
from twostep.errors import InvalidRequest, ResourceExhausted, SetupError
from twostep.sampling_params import Grammar

log = logging.getLogger(__name__)

_MAX_PROBES = 2
_MAX_WAITING = 64
# Of the processor. A grammar takes milliseconds; thousands of properties a second or two.
_CHECK_S = 4.0
# On the clock, however busy the machine is. The start reads the tokenizer.
_START_S = 60.0
_WAIT_S = 30.0
_MAX_VERDICTS = 4096
_MEMORY_BYTES = 512 << 20


class GrammarChecker:
    """Of one router. Belongs to its event loop."""

    def __init__(self, tokenizer_file: Path, *, check_s: float = _CHECK_S, memory_bytes: int = _MEMORY_BYTES) -> None:
        """`check_s`, `memory_bytes`: what one grammar may take."""
        self._file = tokenizer_file
        self._check_s = check_s
        self._memory_bytes = memory_bytes
        # By hash: what is wrong, or nothing.
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._idle: list[HelperProcess] = []
        # Those that were ended, until they are gone.
        self._ending: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(_MAX_PROBES)
        self._num_waiting = 0

    async def check(self, grammar: Grammar | None) -> None:
        """Raises InvalidRequest naming what is wrong, ResourceExhausted (too many are being looked at), SetupError (no grammars here)."""
        if grammar is None:
            return
        key = hashlib.sha256(f"{grammar.kind.value}\0{grammar.text}".encode("utf-8", "surrogatepass")).digest()
        if key not in self._verdicts:
            await self._look_at(key, grammar)
        self._verdicts.move_to_end(key)
        if (trouble := self._verdicts[key]) is not None:
            raise InvalidRequest(trouble)

    async def _look_at(self, key: bytes, grammar: Grammar) -> None:
        if self._num_waiting >= _MAX_WAITING:
            raise ResourceExhausted(f"{self._num_waiting} grammars are being looked at; repeat later", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            async with self._places:
                verdict = self._verdicts[key] if key in self._verdicts else await self._ask(grammar)
        finally:
            self._num_waiting -= 1
        self._verdicts[key] = verdict
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    async def _ask(self, grammar: Grammar) -> str | None:
        probe = self._idle.pop() if self._idle else await self._start()
        sound = False
        try:
            verdict = await self._answer(probe, {"kind": grammar.kind.value, "text": grammar.text}, self._check_s, _WAIT_S)
            sound = True
        except TimeoutError as error:
            raise ResourceExhausted("the machine is too busy to look at grammars; repeat later", retry_after_s=1.0) from error
        except Lost as lost:
            log.warning("a grammar of %d characters ended its probe: %s", len(grammar.text), lost)
            return f"grammar: the {grammar.kind.value} takes too much {lost} to compile; make it simpler"
        finally:
            # Also where the client went away meanwhile.
            if sound:
                self._idle.append(probe)
            else:
                self._end(probe)
        return verdict

    async def _start(self) -> HelperProcess:
        """Raises SetupError."""
        probe, trouble = await HelperProcess.start("twostep.text.grammar_probe"), "its start was given up"
        try:
            told = {"tokenizer": str(self._file), "memory_bytes": self._memory_bytes}
            trouble = await self._answer(probe, told, 0.0, _START_S) or ""
        except Lost:
            trouble = "the process that looks at them ended"
        except TimeoutError:
            trouble = f"the process that looks at them was not there after {_START_S:g} s"
        finally:
            if trouble:
                self._end(probe)
        if trouble:
            raise SetupError(f"grammars cannot be used here: {trouble}")
        return probe

    async def _answer(self, probe: HelperProcess, question: dict[str, object], cpu_s: float, timeout_s: float) -> str | None:
        """What is wrong. Raises Lost, TimeoutError."""
        trouble: str | None = json.loads(await probe.ask(json.dumps(question).encode(), cpu_s=cpu_s, timeout_s=timeout_s))["error"]
        return trouble

    def _end(self, probe: HelperProcess) -> None:
        task = asyncio.create_task(probe.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """When nothing is asked any more."""
        while self._idle:
            self._end(self._idle.pop())
        if self._ending:
            await asyncio.wait(self._ending)
