"""Grammars compiled for one model's vocabulary, by llguidance: which tokens may follow those generated so far.

    text ─ compile ─▶ state after no token ─ after(tokens) ─▶ state after these ─ LiveGrammar ─▶ one sequence's, token by token
                      └──── both immutable, shared by all that ask for the same ────┘

A state is a function of grammar and tokens alone, so that hand-over, preemption and migration only have to replay tokens. llguidance
shares a grammar's automaton among copies, and its bounds with it: where a copy fails, it is asked again from the start, on its own.

A Constraint is one sequence's grammar and its stop tokens. Which tokens may come: those that go on in the grammar, but for stop tokens;
where the answer may end, the stop tokens too, unless `min_tokens` or `ignore_eos` (of the model's own end-of-sequence tokens) still asks
for more; where nothing else can follow, all of them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from twostep.engine.batch import WORD, num_words
from twostep.errors import InvalidRequest, ResourceExhausted, SetupError
from twostep.sampling_params import Grammar, SamplingParams
from twostep.text.grammar import MAX_COMPILED_BYTES, error_of, grammar_tokenizer, library, limits, refused, source_of, work_of

# Compiled grammars kept: some ten kilobytes each, tens of megabytes of one whose every character may be any letter.
_MAX_CACHED = 64
_MAX_CACHED_BYTES = 256 << 20
# Of those in use, beyond which new ones are refused.
_MAX_USED_BYTES = 1 << 30
# Bytes for a character of a grammar, and for a unit of llguidance's work as it is compiled and as its automaton grows: estimates from
# some 25 measured grammars, on the high side of most.
_BYTES_PER_CHAR = 50
_BYTES_PER_COMPILED = 20
_BYTES_PER_GROWN = 150
# An automaton is begun anew when it has grown by so much, or by as much as it was work to compile.
_MAX_GROWN_BYTES = 16 << 20
# Tokens between two looks at how much it has grown.
_LOOK_EVERY = 64
# Beside the engine's thread.
_MAX_THREADS = 8
_MAX_WHY_CHARS = 300

DEAD_END = "none of the model's tokens can follow in the answer's grammar, once stop_token_ids are left out; change one or the other"


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """The tokens that may come next. bits int32 [num_words(vocab_size)]: those that go on; `complete`: the answer may end here. `failure`:
    the grammar cannot be followed any further, and why."""

    bits: npt.NDArray[np.int32]
    complete: bool
    failure: str = ""

    def has(self, token: int) -> bool:
        return bool(self.bits[token // WORD] >> (token % WORD) & 1)


@dataclass(frozen=True, slots=True, eq=False)
class NextTokens:
    """Says which tokens may come next, int32 [words], and after each of some drafts: one more mask than drafts."""

    masks: Sequence[npt.NDArray[np.int32]]
    drafts: Sequence[int] = ()


class Automaton:
    """What llguidance has made of one grammar, and goes on to make as answers come upon more of it: shared by all of them. From any
    thread."""

    def __init__(self, grammar: Grammar, matcher: Any) -> None:
        """`matcher`: at the beginning of an answer."""
        self.matcher = matcher
        work = work_of(matcher)
        self._compiled_work = 0 if work is None else work
        compiled = _BYTES_PER_COMPILED * self._compiled_work + _BYTES_PER_CHAR * len(grammar.text)
        self._compiled_bytes = MAX_COMPILED_BYTES if work is None else min(compiled, MAX_COMPILED_BYTES)
        self._grown_work = 0
        self._num_tokens = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Returns at most how much memory it takes, as far as it is known."""
        return self._compiled_bytes + _BYTES_PER_GROWN * self._grown_work

    @property
    def overgrown(self) -> bool:
        """Returns whether a new one would take so much less that it is worth the time."""
        return self._grown_work > max(self._compiled_work, _MAX_GROWN_BYTES // _BYTES_PER_GROWN)

    def followed(self, num_tokens: int) -> None:
        """Notes that an answer has gone on in it."""
        with self._lock:
            self._num_tokens += num_tokens
            if self._num_tokens < _LOOK_EVERY:
                return
            self._num_tokens = 0
        work = work_of(self.matcher)
        # Some 200 nodes for a token, where it is not told.
        self._grown_work = self._grown_work + 200 * _LOOK_EVERY if work is None else work - self._compiled_work


@dataclass(frozen=True, slots=True, eq=False)
class GrammarState:
    """A grammar after some tokens. Immutable: from any thread."""

    vocabulary: Vocabulary = field(repr=False)
    automaton: Automaton = field(repr=False)
    grammar: Grammar
    tokens: Sequence[int]
    matcher: Any = field(repr=False)
    allowed: AllowedTokens = field(repr=False)

    def after(self, tokens: Sequence[int]) -> GrammarState:
        """Returns the state that many tokens on: about 2 µs each, without the GIL for the most part. Raises InvalidRequest if they are no
        beginning of an answer in the grammar."""
        if not tokens:
            return self
        live = LiveGrammar(self)
        allowed = live.advance(tokens)
        if allowed.failure:
            raise InvalidRequest(f"the tokens generated so far are no beginning of an answer in the request's grammar: {allowed.failure}")
        return GrammarState(self.vocabulary, live.automaton, self.grammar, (*self.tokens, *tokens), live.matcher, allowed)


class LiveGrammar:
    """One sequence's grammar, which goes on with it. For one thread at a time."""

    def __init__(self, state: GrammarState) -> None:
        self.vocabulary = state.vocabulary
        self.tokens = list(state.tokens)
        self.grammar = state.grammar
        self.automaton = state.automaton
        self.matcher = state.matcher.deep_copy()

    def advance(self, tokens: Sequence[int]) -> AllowedTokens:
        """Returns what may follow these."""
        self.tokens += tokens
        return advance_all([(self, tokens)])[0]

    def draft(self, allowed: AllowedTokens, proposed: Sequence[int], most: int) -> list[tuple[int, AllowedTokens]]:
        """Returns at most `most` tokens that may come next, one after the other, each with what may follow it: text that the grammar
        forces, in the tokens in which it is usually written, and what is `proposed`, as far as that goes. `allowed`: what may come
        first. The state stays what it is."""
        matcher = self.matcher.deep_copy()
        found: list[tuple[int, AllowedTokens]] = []
        while len(found) < most:
            ahead: list[int] = matcher.compute_ff_tokens()
            if not ahead and list(proposed[: len(found)]) == [token for token, _ in found]:
                ahead = list(proposed[len(found) : len(found) + 1])
            if not ahead:
                break
            for token in ahead[: most - len(found)]:
                if not allowed.has(token):
                    return found
                matcher.consume_token(token)
                allowed = self.vocabulary.allowed([matcher])[0]
                if allowed.failure:
                    return found
                found.append((token, allowed))
        return found

    def again(self) -> AllowedTokens:
        """Returns the same by an automaton of its own: the shared one may be at its bounds because of others."""
        self._follow(self.vocabulary.automaton(self.grammar))
        return self.vocabulary.allowed([self.matcher])[0]

    def followed(self, num_tokens: int) -> None:
        """Notes that it has gone on. Goes over to a smaller automaton, shared with others that do so, if its own has grown too large."""
        self.automaton.followed(num_tokens)
        if self.automaton.overgrown:
            self._follow(self.vocabulary.renewed(self.grammar, self.automaton))

    def _follow(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.matcher = automaton.matcher.deep_copy()
        self.matcher.consume_tokens(self.tokens)


def advance_all(grammars: Sequence[tuple[LiveGrammar, Sequence[int]]]) -> Sequence[AllowedTokens]:
    """Returns what may follow in each grammar, whose `tokens` end in these, one at least; all of one vocabulary, and no grammar twice. Many
    are looked at side by side, without the GIL."""
    vocabulary = grammars[0][0].vocabulary
    vocabulary.consume([(live.matcher, tokens) for live, tokens in grammars])
    found = vocabulary.allowed([live.matcher for live, _ in grammars])
    for live, tokens in grammars:
        live.followed(len(tokens))
    return [live.again() if allowed.failure else allowed for (live, _), allowed in zip(grammars, found, strict=True)]


class Constraint:
    """Holds one sequence's tokens to its grammar. The engine's lock guards it, but for `live`, which belongs to the thread that makes masks
    while `next` is None."""

    def __init__(self, state: GrammarState, params: SamplingParams, eos_token_ids: frozenset[int]) -> None:
        """`state`: after the tokens generated before. Raises InvalidRequest where no token could end the answer, or none can follow."""
        asked = frozenset(params.stop_token_ids) | (frozenset[int]() if params.ignore_eos else eos_token_ids)
        every = eos_token_ids | asked
        if not every:
            raise InvalidRequest("the model has no end-of-sequence token that could end an answer in a grammar; give stop_token_ids")
        words = len(state.allowed.bits)
        # All stop tokens, and those that may come wherever the answer may end, from `min_tokens` on: int32 [words].
        self._every, self._asked = make_bits(words, every), make_bits(words, asked)
        self._min_tokens = params.min_tokens
        self.live = LiveGrammar(state)
        # Of the token to be sampled next; None: it is being made, or a step has it.
        self.next: NextTokens | None = self.after(state.allowed)
        if self.next is None:
            raise InvalidRequest(f"grammar: {DEAD_END}")

    @property
    def drafts(self) -> Sequence[int]:
        """Tokens after each of which a mask is known."""
        return () if self.next is None else self.next.drafts

    def take(self, num_drafts: int = 0) -> Sequence[npt.NDArray[np.int32]]:
        """Returns the masks for a step that samples the next token, and one after each of so many drafts."""
        taken, self.next = self.next, None
        assert taken is not None, "a sequence without its mask is not planned"
        return taken.masks[: num_drafts + 1]

    def after(self, allowed: AllowedTokens, proposed: Sequence[int] = (), most: int = 0) -> NextTokens | None:
        """Returns what may come after the tokens followed so far, with at most `most` drafts; None: nothing may. See LiveGrammar.draft."""
        mask = self._mask(allowed, 0)
        if mask is None:
            return None
        masks, drafts = [mask], list[int]()
        for token, following in self.live.draft(allowed, proposed, most) if most else ():
            mask = self._mask(following, len(drafts) + 1)
            # A stop token ends the answer.
            if mask is None or self._every[token // WORD] >> (token % WORD) & 1:
                break
            masks.append(mask)
            drafts.append(token)
        return NextTokens(masks, drafts)

    def _mask(self, allowed: AllowedTokens, num_drafts: int) -> npt.NDArray[np.int32] | None:
        """Returns the mask of the next token, int32 [words]; None: no token may come."""
        mask = allowed.bits & ~self._every
        if allowed.complete:
            if len(self.live.tokens) + num_drafts >= self._min_tokens:
                mask |= self._asked
            if not mask.any():
                mask = self._every
        return mask if mask.any() else None


class Vocabulary:
    """A model's tokens as llguidance sees them. From any thread, one grammar from one at a time."""

    def __init__(self, model_dir: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """`vocab_size`: rows of the embedding; ids that the tokenizer does not know never follow. Takes a second for 100,000 tokens.
        Raises SetupError."""
        self._words = num_words(vocab_size)
        self._tokenizer = grammar_tokenizer(model_dir, eos_token_ids)
        self._limits = limits(details=True)
        # Those that anything uses; and the newest of each grammar whose older one had grown too large.
        self._automata: weakref.WeakSet[Automaton] = weakref.WeakSet()
        self._newest: weakref.WeakValueDictionary[Grammar, Automaton] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._executor: Any = None
        size = min(vocab_size, int(self._tokenizer.vocab_size))
        # Of one mask of llguidance's.
        self._mask_words = num_words(int(self._tokenizer.vocab_size))
        self._others = make_bits(self._words, range(size)) & ~make_bits(self._words, self._tokenizer.eos_tokens)

    def automaton(self, grammar: Grammar) -> Automaton:
        """Compiles a grammar. Raises InvalidRequest if it is none."""
        matcher = library().LLMatcher(self._tokenizer, source_of(grammar), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise refused(grammar, error_of(matcher))
        made = Automaton(grammar, matcher)
        with self._lock:
            self._automata.add(made)
        return made

    def renewed(self, grammar: Grammar, grown: Automaton) -> Automaton:
        """Returns another one that is not overgrown."""
        with self._lock:
            newest = self._newest.get(grammar)
        if newest is None or newest is grown or newest.overgrown:
            newest = self.automaton(grammar)
            with self._lock:
                self._newest[grammar] = newest
        return newest

    @property
    def num_bytes(self) -> int:
        """Returns at most what all automata in use take."""
        with self._lock:
            return sum(each.num_bytes for each in self._automata)

    def state(self, grammar: Grammar) -> GrammarState:
        """Returns the state before any token. Raises InvalidRequest."""
        automaton = self.automaton(grammar)
        matcher = automaton.matcher.deep_copy()
        allowed = self.allowed([matcher])[0]
        if allowed.failure:
            raise refused(grammar, allowed.failure)
        if not allowed.complete and not allowed.bits.any():
            raise refused(grammar, "no answer is a sentence of it, in the tokens of this model")
        return GrammarState(self, automaton, grammar, (), matcher, allowed)

    def consume(self, matchers: Sequence[tuple[Any, Sequence[int]]]) -> None:
        """Feeds each matcher. One that does not take its tokens is in error from then on."""
        single = [(matcher, tokens[0]) for matcher, tokens in matchers if len(tokens) == 1]
        if len(single) == len(matchers) > 1:
            self._side_by_side().consume_token_par(single)
            return
        for matcher, tokens in matchers:
            matcher.consume_tokens(list(tokens))

    def allowed(self, matchers: Sequence[Any]) -> Sequence[AllowedTokens]:
        """Returns what may come next in each."""
        masks = np.empty((len(matchers), self._mask_words), np.int32)
        if len(matchers) == 1:
            matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        else:
            numbered = [(matcher, i) for i, matcher in enumerate(matchers)]
            self._side_by_side().unsafe_compute_mask_ptr(numbered, masks.ctypes.data, masks.strides[0], len(matchers))
        bits = np.zeros((len(matchers), self._words), np.int32)
        count = min(self._words, self._mask_words)
        # Neither the end, which is marked apart, nor what only one of model and tokenizer has.
        bits[:, :count] = masks[:, :count] & self._others[:count]
        return [self._allowed(matcher, row) for matcher, row in zip(matchers, bits, strict=True)]

    def _allowed(self, matcher: Any, bits: npt.NDArray[np.int32]) -> AllowedTokens:
        if not matcher.is_error():
            return AllowedTokens(bits=bits, complete=matcher.is_accepting())
        why = " ".join(error_of(matcher).split())
        return AllowedTokens(bits=bits, complete=False, failure=why[:_MAX_WHY_CHARS] or "the grammar does not take this token")

    def _side_by_side(self) -> Any:
        if self._executor is None:
            self._executor = library().LLExecutor(num_threads=min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2)))
        return self._executor


class GrammarCompiler:
    """Compiles grammars for one model, and keeps the latest, within a bound of bytes. From any thread; nothing is loaded before the first
    one."""

    def __init__(
        self,
        model_dir: Path | None,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_cached_bytes: int = _MAX_CACHED_BYTES,
        max_used_bytes: int = _MAX_USED_BYTES,
    ) -> None:
        """`model_dir` None: the model has no tokens that have a text. `max_cached_bytes`: beyond it those that were compiled earlier are
        dropped; `max_used_bytes`: of those that answers still use, beyond which no other is compiled."""
        self._max_cached_bytes = max_cached_bytes
        self._max_used_bytes = max_used_bytes
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._states: OrderedDict[Grammar, GrammarState] = OrderedDict()

    def cached(self, grammar: Grammar) -> GrammarState | None:
        """Returns the state of a grammar compiled lately, at once."""
        with self._lock:
            state = self._states.get(grammar)
            if state is not None and state.automaton.overgrown:
                del self._states[grammar]
                return None
            if state is not None:
                self._states.move_to_end(grammar)
            return state

    def compile(self, grammar: Grammar) -> GrammarState:
        """Takes a millisecond as a rule, tenths of a second at most; a second more for the first one. Raises InvalidRequest (with what is
        wrong with the grammar), SetupError, ResourceExhausted (answers under way use as much memory as they may)."""
        if (state := self.cached(grammar)) is not None:
            return state
        vocabulary = self.load()
        if (used := self._make_room(vocabulary)) > self._max_used_bytes:
            raise ResourceExhausted(f"grammars of answers under way here take {used >> 20} MiB; try another worker, or later")
        state = vocabulary.state(grammar)
        with self._lock:
            self._states[grammar] = state
        self._make_room(vocabulary)
        return state

    def _make_room(self, vocabulary: Vocabulary) -> int:
        """Drops the oldest beyond the bounds, but for the newest. Returns the bytes in use."""
        with self._lock:
            while len(self._states) > 1 and (len(self._states) > _MAX_CACHED or vocabulary.num_bytes > self._max_cached_bytes):
                self._states.popitem(last=False)
            return vocabulary.num_bytes

    def load(self) -> Vocabulary:
        """Returns the model's vocabulary; the first call takes a second. Raises SetupError."""
        with self._loading:
            if self._vocabulary is None:
                if self._model_dir is None or not (self._model_dir / "tokenizer.json").is_file():
                    raise SetupError("this worker has no tokenizer.json, so that it knows no grammars; start it with --model")
                self._vocabulary = Vocabulary(self._model_dir, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)
            return self._vocabulary


def make_bits(words: int, tokens: Iterable[int]) -> npt.NDArray[np.int32]:
    """Returns int32 [words] with these tokens' bits set, and no others; tokens beyond them are left out."""
    flags = np.zeros(words * WORD, np.uint8)
    there = np.fromiter(tokens, np.int64)
    flags[there[(there >= 0) & (there < len(flags))]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
