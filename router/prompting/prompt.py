"""Turns a client's message into token ids and resolved sampling parameters; everything wrong with either is said here."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from router.prompting.chat import check_chat, continued_content, num_content_chars
from router.prompting.grammar_check import GrammarChecker
from router.prompting.renderer import Renderer
from router.prompting.tool_use import NO_TOOLS, ToolText, ToolUse, check_size
from router.request.answer import AnswerReader, resumed_tokens
from router.waiting.fair_queue import EVERYBODY_ALIKE, Quota
from router.waiting.turns import Turns
from twostep.errors import ContextExceeded, InvalidRequest
from twostep.rpc.convert import grammar_from_proto
from twostep.rpc.v1 import inference_pb2
from twostep.sampling_params import MAX_PROMPT_LOGPROBS, Grammar, SamplingParams
from twostep.text.chat_format import ChatFormat
from twostep.text.detokenizer import Detokenizer
from twostep.text.harmony import HarmonyFormat
from twostep.text.model_card import ModelCard
from twostep.text.reasoning import Begun, ReasoningFormat
from twostep.text.tokenizer import MAX_INLINE_CHARS, Tokenizer

# Detokenizing goes token by token.
_CHARS_FOR_TOKEN = 32
_NUM_THREADS = 2
_MAX_THREADED = 128

# Fields of the message that are copied as they are: those of SamplingParams less those that are resolved here.
_RESOLVED = {"max_tokens", "seed", "stop", "stop_token_ids", "logprobs", "grammar", "logit_bias", "prompt_logprobs"}
_NUMBERS = tuple(f.name for f in dataclasses.fields(SamplingParams) if f.name not in _RESOLVED)
# Optional fields of the message that a model's generation config may have a default for.
_MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and how the answer is to be read: `tokenizer` shows the special tokens that it is made of; `reasoning` is what the model
    marks its reasoning with, None for prompts that are no chats, and `begun` whether the prompt has begun it; `tools`, which calls to look
    for; `before`, what the answer's text goes on with, None: with the prompt. The last `num_added` of the ids were put behind
    those that the client sent, and are not counted or told as its own. `unasked`: max_tokens of a request that gives none; None: as the
    router has it."""

    ids: Sequence[int]
    tokenizer: Tokenizer
    reasoning: ReasoningFormat | HarmonyFormat | None = None
    begun: Begun = Begun.OVER
    tools: ToolUse = NO_TOOLS
    before: Sequence[int] | None = None
    num_added: int = 0
    unasked: int | None = None

    @property
    def client_ids(self) -> Sequence[int]:
        """Returns the ids that the client is told: sent again, they are the same prompt."""
        return self.ids[: -self.num_added] if self.num_added else self.ids

    def answer(self, sampling: SamplingParams) -> AnswerReader:
        splitter = None if self.reasoning is None else self.reasoning.splitter(self.begun)
        return AnswerReader(self.tokenizer, sampling, splitter, prompt=self._before(in_grammar=sampling.grammar is not None))

    def detokenizer(self, *, in_grammar: bool) -> Detokenizer:
        """Returns a new one, which reads an answer's tokens as `answer` does."""
        return Detokenizer(self.tokenizer, self._before(in_grammar=in_grammar))

    def _before(self, *, in_grammar: bool) -> Sequence[int]:
        """Returns the tokens that the answer's text goes on with."""
        before = self.ids if self.before is None else self.before
        # A grammar is of what tokens add to a text: it does not know that a prompt without any would take their first space.
        return self.tokenizer.anchor or before if in_grammar else before


ReadPrompt = Callable[[], Awaitable[Prompt]]


class PromptReader:
    """Shared by all requests."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        card: ModelCard,
        renderer: Renderer,
        *,
        default_max_tokens: int,
        chat_format: ChatFormat | None = None,
        grammars: GrammarChecker | None = None,
        quota: Quota = EVERYBODY_ALIKE,
        lowercase_embedded: bool = False,
    ) -> None:
        """`chat_format`: of the answers to chats; None: they are nothing but text. `grammars` None: there are none. `lowercase_embedded`:
        texts are lowercased before they are embedded."""
        self._lowercase_embedded = lowercase_embedded
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._format = chat_format or ChatFormat()
        # Parsers have to see the special tokens that a format is made of.
        self._chat_tokenizer = tokenizer.showing(self._format.special_ids(tokenizer, with_tools=False))
        self._tools_tokenizer = tokenizer.showing(self._format.special_ids(tokenizer, with_tools=True))
        self._open_tokenizer = tokenizer.showing(tokenizer.special_ids)
        self._card = card
        self._has_encoder = card.decoder_start_token_id is not None
        self._renderer = renderer
        self._default_max_tokens = default_max_tokens
        self._threads = ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix="tokenize")
        # A text that fits the context takes a thread for a second at most: a caller may have both.
        what = "long prompts are being tokenized"
        self._turns = Turns(what, most=_MAX_THREADED, at_once=_NUM_THREADS, each=_NUM_THREADS, quota=quota)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def text_ids(self, text: str, caller: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Raises InvalidRequest for an empty text, ResourceExhausted if too many long ones are being tokenized."""
        if not text:
            raise InvalidRequest("text is empty; send at least one character")
        self._check_length(len(text))

        def encoded() -> Sequence[int]:
            self._check_tokens(text)
            return self._tokenizer.encode(text, add_special_tokens)

        return await self._in_thread_if_long(encoded, len(text), caller)

    async def chat_ids(self, chat: inference_pb2.Chat, caller: str) -> Sequence[int]:
        """Raises InvalidRequest, ResourceExhausted if too many long ones are being tokenized."""
        return (await self._chat(chat, caller)).ids

    async def _chat(self, chat: inference_pb2.Chat, caller: str) -> Prompt:
        check_chat(chat)
        self._check_length(num_content_chars(chat))
        tokenizer = self._tools_tokenizer if chat.tools else self._chat_tokenizer
        reasoning = self._format.reasoning
        rendered = await self._renderer.render(chat, caller)
        text = rendered.text
        self._check_length(len(text))
        begun = Begun.OVER if reasoning is None else reasoning.begun_in(text, continued_content(chat))

        def encoded() -> Sequence[int]:
            self._check_tokens(text)
            return self._tokenizer.encode_chat(text, rendered.clients)

        return Prompt(await self._in_thread_if_long(encoded, len(text), caller), tokenizer, reasoning, begun)

    async def prompt(self, request: inference_pb2.GenerateRequest, caller: str) -> Prompt:
        """Reads a Generate request's: at least one token, all within the vocabulary, and behind them the one that a decoder begins with
        whose encoder reads the prompt. Raises InvalidRequest (ContextExceeded), ResourceExhausted."""
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequest("the prompt is missing; set text, token_ids or chat")
        if kind == "token_ids":
            prompt = Prompt(self._given_ids(request.token_ids.ids), self._tokenizer)
        elif kind == "text":
            prompt = Prompt(await self.text_ids(request.text, caller), self._tokenizer)
        else:
            prompt = await self._chat(request.chat, caller)
        if not prompt.ids:
            raise InvalidRequest(f"{kind} gives no tokens; send some text")
        if (start := self._card.decoder_start_token_id) is not None:
            prompt = replace(prompt, ids=[*prompt.ids, start], before=(start,), num_added=1)
        return replace(prompt, tokenizer=self._open_tokenizer) if request.keep_special_tokens else prompt

    async def embedding_input(
        self, given: str | Sequence[int], caller: str, *, most: int, cut_to: int | None, add_special_tokens: bool = True
    ) -> Prompt:
        """Reads what is to be embedded, of at most `most` tokens. With `cut_to`, of a longer text the first tokens are kept, and of token
        ids the last, as vLLM does it. Raises InvalidRequest (ContextExceeded), ResourceExhausted."""
        if self._has_encoder:
            raise InvalidRequest("this model has an encoder, of which no embeddings are made; ask another model for them")
        if not isinstance(given, str):
            if not len(given):
                raise InvalidRequest("token_ids is empty; send at least one id")
            ids = given if cut_to is None else given[-cut_to:]
            if len(ids) > most:
                raise _too_long(len(ids), most)
            return Prompt(self._known_ids(ids), self._tokenizer)
        if not given:
            raise InvalidRequest("text is empty; send at least one character")
        if self._lowercase_embedded:
            given = given.lower()
        if cut_to is None:
            ids = await self.text_ids(given, caller, add_special_tokens=add_special_tokens)
        else:
            first = partial(self._tokenizer.encode_first, given, cut_to, add_special_tokens)
            ids = await self._in_thread_if_long(first, len(given), caller)
        if not ids:
            raise InvalidRequest("text gives no tokens; send some text")
        if len(ids) > most:
            raise _too_long(len(ids), most)
        return Prompt(ids, self._tokenizer)

    async def tool_use(self, chat: inference_pb2.Chat, caller: str) -> ToolUse:
        """Reads what a request asks of its chat's calls; without calls the chat loses its tools. Raises InvalidRequest,
        ResourceExhausted."""
        check_chat(chat)
        check_size(chat.tools)

        def read() -> ToolUse:
            return ToolUse.of(chat.tool_use, [ToolText.read(i, text) for i, text in enumerate(chat.tools)], self._format.tool_calls)

        tools = await self._in_thread_if_long(read, sum(map(len, chat.tools)), caller)
        if tools.format is None:
            del chat.tools[:]
        return tools

    def _given_ids(self, given: Sequence[int]) -> Sequence[int]:
        num_ids = len(given)
        if not num_ids:
            raise InvalidRequest("token_ids is empty; send at least one id")
        if num_ids >= self._card.max_model_len:
            # Looking at each of millions would hold up all other requests.
            raise no_room(num_ids, self._card.max_model_len)
        return self._known_ids(given)

    def _known_ids(self, given: Sequence[int]) -> Sequence[int]:
        ids = list(given[:])  # a slice is made in half the time that going through the field takes
        if max(ids) >= self._card.vocab_size:
            at = next(i for i, token_id in enumerate(ids) if token_id >= self._card.vocab_size)
            raise InvalidRequest(
                f"token_ids[{at}] is {ids[at]}; the vocabulary of this model has ids from 0 to {self._card.vocab_size - 1}"
            )
        return ids

    def sampling(
        self,
        proto: inference_pb2.SamplingParams,
        num_prompt_tokens: int,
        max_model_len: int,
        *,
        pool_tokens: int,
        unasked: int | None = None,
    ) -> SamplingParams:
        """Resolves the client's values, but for the grammar, then the model's defaults, then neutral ones; bounded by the context. Where
        max_tokens is not given, an answer may have `unasked` tokens (None: the router's default), as far as the context and
        `pool_tokens`, the most that a worker could hold, have room.

        Raises InvalidRequest (a value out of range), ContextExceeded (no room for the prompt and one, or max_tokens, more)."""
        room = max_model_len - num_prompt_tokens
        if room < 1:
            raise no_room(num_prompt_tokens, max_model_len)
        max_tokens = proto.max_tokens if proto.HasField("max_tokens") else self._unasked(unasked, room, pool_tokens - num_prompt_tokens)
        max_tokens = max_tokens or 1  # where no answer is asked for, the prompt's last step samples one all the same
        if max_tokens > room:
            raise ContextExceeded.of(
                f"the prompt has {num_prompt_tokens} and max_tokens is {max_tokens}",
                f"shorten the prompt or ask for at most {room}",
                max_model_len=max_model_len,
                prompt_tokens=num_prompt_tokens,
                max_tokens=max_tokens,
            )
        values = {name: getattr(self._card.generation, name) for name in _MODEL_DEFAULTS}
        given = {field.name: value for field, value in proto.ListFields()}
        values |= {name: given[name] for name in _NUMBERS if name in given}
        named = [(f"stop_token_ids[{i}]", token_id) for i, token_id in enumerate(proto.stop_token_ids)]
        for field, token_id in [*named, *(("logit_bias", token_id) for token_id in proto.logit_bias)]:
            if not 0 <= token_id < self._card.vocab_size:
                raise InvalidRequest(f"{field} is {token_id}; the vocabulary of this model has ids from 0 to {self._card.vocab_size - 1}")
        prompt_logprobs = proto.prompt_logprobs if proto.HasField("prompt_logprobs") else None
        if prompt_logprobs is not None and self._has_encoder:
            raise InvalidRequest(
                f"prompt_logprobs is {prompt_logprobs}, and this model's encoder reads the prompt, whose tokens have no log probabilities; "
                "leave it out (and echo with logprobs)"
            )
        if prompt_logprobs is not None and num_prompt_tokens * (1 + prompt_logprobs) > MAX_PROMPT_LOGPROBS:
            raise InvalidRequest(
                f"prompt_logprobs is {prompt_logprobs} and the prompt has {num_prompt_tokens} tokens, each with its own; "
                f"a prompt has up to {MAX_PROMPT_LOGPROBS} log probabilities: ask for fewer, or shorten it"
            )
        return SamplingParams(
            max_tokens=max_tokens,
            seed=proto.seed if proto.HasField("seed") else secrets.randbits(63),
            stop=tuple(proto.stop),
            stop_token_ids=tuple(proto.stop_token_ids),
            logprobs=proto.logprobs if proto.HasField("logprobs") else None,
            logit_bias=tuple(sorted(proto.logit_bias.items())),
            prompt_logprobs=prompt_logprobs,
            **values,
        )

    def most_unasked(self, max_model_len: int) -> int:
        """Returns the most that max_tokens may be where it is not given."""
        return min(self._default_max_tokens or max_model_len, max_model_len)

    def _unasked(self, unasked: int | None, room: int, pool_room: int) -> int:
        """Returns max_tokens of a request that gives none."""
        return max(1, min(unasked or self._default_max_tokens or room, room, pool_room))

    async def grammar(self, proto: inference_pb2.SamplingParams, prompt: Prompt, caller: str) -> Grammar | None:
        """Returns what the whole answer is held to, its reasoning and its calls included; None: nothing. Raises InvalidRequest naming what
        is wrong with it, ResourceExhausted, SetupError."""
        own = grammar_from_proto(proto.grammar) if proto.HasField("grammar") else None
        plainly = proto.grammar.HasField("strict") and not proto.grammar.strict
        terms = prompt.tools.terms(own, plainly=plainly, begun=None if prompt.reasoning is None else prompt.begun)
        if self._grammars is None:
            return None
        return await self._grammars.grammar(terms, caller)

    async def resume(self, answer: AnswerReader, token_ids: Sequence[int], sampling: SamplingParams, caller: str) -> str:
        """Brings `answer` to where a client is that has `token_ids` of it, and returns their text. Raises InvalidRequest,
        ResourceExhausted."""
        tokens = resumed_tokens(token_ids, sampling, eos_token_ids=self._card.eos_token_ids, vocab_size=self._card.vocab_size)
        return await self._in_thread_if_long(lambda: answer.resume(tokens), len(tokens) * _CHARS_FOR_TOKEN, caller)

    def text_of(self, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
        """Returns the text that a client sees which has these tokens of an answer."""
        if self._has_encoder:
            prompt = prompt[-1:]
        return Detokenizer(self._tokenizer, prompt).push(token_ids) if token_ids else ""

    def _check_length(self, num_chars: int) -> None:
        """Megabytes that can never fit would keep the tokenizer's threads from other requests for seconds."""
        if (least := self._tokenizer.least_tokens(num_chars)) >= (most := self._card.max_model_len):
            what = f"the prompt has {num_chars} characters, at least {least} tokens"
            raise ContextExceeded.of(what, "shorten it", max_model_len=most, prompt_tokens=least)

    def _check_tokens(self, text: str) -> None:
        if self._tokenizer.is_beyond(text, most := self._card.max_model_len):
            what = f"the prompt has {len(text)} characters, which are more tokens"
            raise ContextExceeded.of(what, "shorten it", max_model_len=most, prompt_tokens=most + 1)

    async def _in_thread_if_long(self, work: Callable[[], T], num_chars: int, caller: str) -> T:
        """Raises ResourceExhausted."""
        if num_chars <= MAX_INLINE_CHARS:
            return work()
        turn = await self._turns.take(caller)
        begun = time.monotonic()
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # A client that leaves takes no thread with it.
        working.add_done_callback(lambda _: turn.over(time.monotonic() - begun))
        return await working


def _too_long(num_tokens: int, most: int) -> ContextExceeded:
    advice = "shorten it, or have it cut with truncate_prompt_tokens"
    return ContextExceeded.of(f"the input has {num_tokens}", advice, max_model_len=most, prompt_tokens=num_tokens)


def no_room(num_prompt_tokens: int, max_model_len: int) -> ContextExceeded:
    """Returns what is wrong with a prompt of so many tokens."""
    what, advice = f"the prompt has {num_prompt_tokens}", "shorten it, leaving one for the answer"
    return ContextExceeded.of(what, advice, max_model_len=max_model_len, prompt_tokens=num_prompt_tokens)
