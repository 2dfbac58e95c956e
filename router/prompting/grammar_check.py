"""Grammars are made and checked before their requests wait for anything, and by a process that may die of it.

    terms ─ known? ─┬─ yes ───────────────────────────────────────▶ grammar, or what is wrong
                    └─ no ─ a probe, in turn ─ makes it, tries it ─▶ the same, remembered
                               └─ out of memory, or of processor time: it is over ─▶ refused, remembered

Probes (twostep/text/grammar_probe.py) start with the first grammar; a router that never sees one has none.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from router.prompting.helper_pool import Helper, HelperPool, Lost
from router.waiting.fair_queue import EVERYBODY_ALIKE, Quota
from router.waiting.turns import Turns
from twostep.errors import InvalidRequest, SetupError
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.answer_grammar import AnswerTerms
from twostep.text.chat_format import ChatFormat
from twostep.text.grammar_probe import terms_to_json

log = logging.getLogger(__name__)

_MAX_PROBES = 2
# Of the two processes, so that the other one is free for the next caller.
_MAX_PROBES_EACH = 1
_MAX_WAITING = 128
# Of the processor. A grammar takes milliseconds; thousands of properties some tenths of a second.
_CHECK_S = 2.0
_MAX_VERDICTS = 4096
_MAX_VERDICT_BYTES = 64 << 20
# Beside the largest grammar that is allowed (MAX_COMPILED_BYTES): what making it takes for a while.
_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Verdict:
    """`error`: what is wrong; None: nothing is."""

    grammar: Grammar | None
    error: str | None

    @property
    def num_bytes(self) -> int:
        """Returns about how much it takes."""
        return len(self.error or "") + (0 if self.grammar is None else len(self.grammar.text))


class GrammarChecker:
    """Makes and checks the grammars of one router's requests. Belongs to its event loop."""

    def __init__(
        self,
        model_dir: Path,
        chat_format: ChatFormat,
        *,
        quota: Quota = EVERYBODY_ALIKE,
        check_s: float = _CHECK_S,
        memory_bytes: int = _MEMORY_BYTES,
    ) -> None:
        """`check_s`, `memory_bytes`: what one grammar may take."""
        self._check_s = check_s
        # By hash: what is known, and by caller and hash: what is being looked at. One caller does not wait for another's turn.
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._num_bytes = 0
        self._looking: dict[tuple[str, bytes], asyncio.Task[_Verdict]] = {}
        setup = {"model": str(model_dir), "formats": chat_format.names, "memory_bytes": memory_bytes}
        helper = Helper(module="twostep.text.grammar_probe", setup=json.dumps(setup).encode(), purpose="look at grammars")
        self._pool = HelperPool(helper, _MAX_PROBES)
        what = "grammars are being looked at"
        self._turns = Turns(what, most=_MAX_WAITING, at_once=_MAX_PROBES, each=_MAX_PROBES_EACH, quota=quota)

    async def grammar(self, terms: AnswerTerms, caller: str) -> Grammar | None:
        """Returns the grammar that workers are to hold the answer to; None: the answer is free. Raises InvalidRequest naming what is wrong,
        ResourceExhausted (too many are being looked at), SetupError (no grammars here)."""
        if terms.own is None and not terms.tools:
            return None
        key = _digest(terms)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._look_at(key, terms, caller)
        else:
            self._verdicts.move_to_end(key)
        if verdict.error is not None:
            raise InvalidRequest(verdict.error)
        return verdict.grammar

    async def _look_at(self, key: bytes, terms: AnswerTerms, caller: str) -> _Verdict:
        """Asks once for all of a caller's requests that need the same at the same time."""
        if (caller, key) not in self._looking:
            looking = self._looking[caller, key] = asyncio.create_task(self._ask(terms, caller))
            looking.add_done_callback(lambda task: self._remember(caller, key, task))
        looking = self._looking[caller, key]
        await asyncio.wait((looking,))
        return looking.result()

    def _remember(self, caller: str, key: bytes, looked: asyncio.Task[_Verdict]) -> None:
        del self._looking[caller, key]
        if looked.cancelled() or looked.exception() is not None or key in self._verdicts:
            return
        self._verdicts[key] = looked.result()
        self._num_bytes += looked.result().num_bytes
        while len(self._verdicts) > _MAX_VERDICTS or self._num_bytes > _MAX_VERDICT_BYTES:
            self._num_bytes -= self._verdicts.popitem(last=False)[1].num_bytes

    async def _ask(self, terms: AnswerTerms, caller: str) -> _Verdict:
        try:
            answer = json.loads(await self._pool.ask(self._turns, caller, terms_to_json(terms), cpu_s=self._check_s))
        except SetupError as error:
            raise SetupError(f"grammars cannot be used here: {error.message}") from error
        except Lost as lost:
            what = "tools" if terms.own is None else terms.own.kind.value
            log.warning("a grammar of %d characters ended its probe: %s", _num_chars(terms), lost)
            return _Verdict(None, f"grammar: the {what} takes too much {lost} to compile; make it simpler")
        if "error" in answer:
            return _Verdict(None, answer["error"])
        return _Verdict(None if answer["kind"] is None else Grammar(GrammarKind(answer["kind"]), answer["text"]), None)

    async def close(self) -> None:
        """Ends the probes. Called when nothing is asked any more."""
        await self._pool.close()


def _num_chars(terms: AnswerTerms) -> int:
    return sum(map(len, terms.tools)) + (0 if terms.own is None else len(terms.own.text))


def _digest(terms: AnswerTerms) -> bytes:
    """Identifies them. Each text goes with its length, so that no two make one."""
    own = () if terms.own is None else (terms.own.kind.value, terms.own.text)
    found = hashlib.sha256(repr((len(own), terms.plainly, terms.must, terms.parallel, terms.begun)).encode())
    for text in (*own, *terms.tools):
        data = text.encode("utf-8", "surrogatepass")
        found.update(b"%d\0" % len(data))
        found.update(data)
    return found.digest()
