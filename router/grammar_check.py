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
import signal
import sys
from collections import OrderedDict
from pathlib import Path

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
# Of a probe's answer.
_MAX_LINE = 1 << 16
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
        self._idle: list[_Probe] = []
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
            verdict = await probe.ask(grammar)
            sound = True
        except TimeoutError as error:
            raise ResourceExhausted("the machine is too busy to look at grammars; repeat later", retry_after_s=1.0) from error
        except _Lost as lost:
            log.warning("a grammar of %d characters ended its probe: %s", len(grammar.text), lost)
            return f"grammar: the {grammar.kind.value} takes too much {lost} to compile; make it simpler"
        finally:
            # Also where the client went away meanwhile.
            if sound:
                self._idle.append(probe)
            else:
                self._end(probe)
        return verdict

    async def _start(self) -> _Probe:
        """Raises SetupError."""
        probe, trouble = await _Probe.start(self._file, self._memory_bytes, self._check_s), "its start was given up"
        try:
            trouble = await probe.answer(_START_S) or ""
        except _Lost:
            trouble = "the process that looks at them ended"
        except TimeoutError:
            trouble = f"the process that looks at them was not there after {_START_S:g} s"
        finally:
            if trouble:
                self._end(probe)
        if trouble:
            raise SetupError(f"grammars cannot be used here: {trouble}")
        return probe

    def _end(self, probe: _Probe) -> None:
        task = asyncio.create_task(probe.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """When nothing is asked any more."""
        while self._idle:
            self._end(self._idle.pop())
        if self._ending:
            await asyncio.wait(self._ending)


class _Lost(Exception):
    """The probe is of no use any more. Says what there was too little of."""


class _Probe:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, tokenizer_file: Path, memory_bytes: int, check_s: float) -> _Probe:
        """Its first answer says whether it can be asked."""
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "twostep.text.grammar_probe",
                str(tokenizer_file),
                str(memory_bytes),
                str(check_s),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_MAX_LINE,
            )
        )

    async def ask(self, grammar: Grammar) -> str | None:
        """What is wrong with it. Raises _Lost, TimeoutError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"kind": grammar.kind.value, "text": grammar.text}).encode() + b"\n")
            return await self.answer(_WAIT_S)
        except ConnectionError as error:
            raise _Lost("memory") from error

    async def answer(self, timeout_s: float) -> str | None:
        """What is wrong. Raises _Lost, TimeoutError."""
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            line = await self._process.stdout.readline()
            if not line:
                raise _Lost("time" if await self._process.wait() == -signal.SIGPROF else "memory")
        trouble: str | None = json.loads(line)["error"]
        return trouble

    async def end(self) -> None:
        """Returns when it is gone."""
        if self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:
                pass
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
