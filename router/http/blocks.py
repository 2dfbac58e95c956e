"""An answer as a row of blocks, each reasoning, text or a call of a tool: what /v1/responses and /v1/messages are made of.

    pieces ─▶ BlockAnswer ─┬─ begin, opened, more …, closed, …, ended ──▶ events of a stream
                           └─ whole ────────────────────────────────────▶ one JSON document

An endpoint gives a Dialect, which says what each of these looks like there.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any

from router.http.chat import AnyChat, ChatGeneration
from router.http.choices import AnswerOptions, KeptText, Send
from router.http.logprobs import KeptLogprobs
from router.http.whole_answer import JSON_LOGPROB_BYTES, WholeAnswer
from router.json_pieces import compact, in_chunks, json_pieces
from router.request.memory_budget import Holding
from twostep.rpc.v1 import inference_pb2 as pb

# What a block takes beside its text, as it is kept.
_BLOCK_BYTES = 1000
# Pieces and tokens after which is counted what an answer holds.
_COUNT_AFTER = 128

Event = dict[str, Any]


class Kind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """`id` and `name` are those of a call. `text` is what is kept of it: the arguments of a call. `cut`: more would have followed."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    text: KeptText = field(default_factory=KeptText)
    logprobs: KeptLogprobs = field(default_factory=KeptLogprobs)
    cut: bool = False


class Dialect(ABC):
    """Says what an endpoint calls things. Events of a stream are objects with a `type`; long ones, of `closed` and `ended`, are made as
    they are sent."""

    # What goes to the client where nothing else has for long.
    ping: bytes
    # Events at the end tell the texts once more: they are kept until then.
    tells_again: bool
    # The answer's text is JSON as a whole.
    in_json = False

    @abstractmethod
    def begin(self, num_prompt_tokens: int) -> Iterable[Event]: ...

    @abstractmethod
    def opened(self, block: Block) -> Iterable[Event]: ...

    @abstractmethod
    def more(self, block: Block, text: str, logprobs: KeptLogprobs) -> Event:
        """Returns what goes out for each piece. `logprobs` are of the tokens of this text, if they were asked for."""

    @abstractmethod
    def closed(self, block: Block) -> Iterable[Event]: ...

    @abstractmethod
    def ended(self, blocks: Sequence[Block], end: pb.End) -> Iterable[Event]: ...

    @abstractmethod
    def failed(self, error: BaseException) -> Event:
        """Returns the last event of a stream that breaks off."""

    @abstractmethod
    def whole(self, blocks: Sequence[Block], end: pb.End) -> Event: ...


def _was_cut(block: Block, end: pb.End, *, in_json: bool) -> bool:
    """Returns whether more would have followed in the answer's last block. A stop string ends plain text as the client wishes; elsewhere it
    leaves a part."""
    reason, asked = end.finish_reason, bool(end.stop_reason)
    if reason == pb.FINISH_REASON_TOOL_CALLS or (reason == pb.FINISH_REASON_STOP and not asked):
        return False
    if block.kind is Kind.CALL or (block.kind is Kind.TEXT and in_json):
        return not _is_json(str(block.text))
    return block.kind is Kind.REASONING or reason != pb.FINISH_REASON_STOP


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _small(event: Event) -> str:
    return f"event: {event['type']}\ndata: {compact(event)}\n\n"


def _event_pieces(event: Event | str) -> Iterator[str]:
    """Yields an event's lines; one that is written already comes as it is."""
    if isinstance(event, str):
        yield event
        return
    yield f"event: {event['type']}\ndata: "
    yield from json_pieces(event)
    yield "\n\n"


class BlockAnswer:
    """Reads one answer. With `send` its events go out as they come."""

    def __init__(
        self,
        dialect: Dialect,
        wanted: AnswerOptions,
        holding: Holding,
        *,
        with_reasoning: bool,
        send: Send | None,
        keep: Callable[[BlockAnswer], Awaitable[None]] | None = None,
    ) -> None:
        """`holding`: what is kept is counted there. `keep`: is awaited before the end is told."""
        self._wanted = wanted
        self._dialect, self._holding = dialect, holding
        self._with_reasoning, self._send, self._keep = with_reasoning, send, keep
        self._keeps = send is None or dialect.tells_again
        self._begun = self._thinking = False
        # Those of tokens whose text has not come yet.
        self._waiting = KeptLogprobs()
        self._num_counted = self._num_uncounted = 0
        self.blocks: list[Block] = []
        self.prompt: Sequence[int] = ()
        self.finished = pb.End()

    @property
    def num_json_bytes(self) -> int:
        """Estimates what it comes to as JSON."""
        return sum(_BLOCK_BYTES + each.text.num_bytes + JSON_LOGPROB_BYTES * each.logprobs.num_named for each in self.blocks)

    async def write_prompt(self, part: pb.PromptLogprobs) -> None:
        raise AssertionError("bodies of these endpoints ask for no log probabilities of a prompt")

    async def write(self, response: pb.GenerateResponse) -> None:
        piece = response.piece
        events = self._opening()
        if piece.reasoning and self._with_reasoning:
            events += self._more(Kind.REASONING, piece.reasoning)
        if piece.reasoning or piece.text:
            self._thinking = bool(piece.reasoning)
        if piece.logprobs and not self._thinking:
            self._waiting.add(piece.token_ids, piece.logprobs)
        if piece.tool_calls:
            events += self._calling(piece)
        elif piece.text:
            events += self._more(Kind.TEXT, piece.text)
        self._num_uncounted += 1 + len(piece.token_ids)
        if self._num_uncounted > _COUNT_AFTER:
            self._count()
        if events:
            await self._tell(events)

    async def end(self, end: pb.End) -> None:
        self.finished = end
        events = self._opening()
        if self.blocks:
            self.blocks[-1].cut = _was_cut(self.blocks[-1], end, in_json=self._dialect.in_json)
        self._count()
        if self._keep is not None:
            await self._keep(self)
        await self._tell(chain(events, self._close(), self._last(end)))

    def _last(self, end: pb.End) -> Iterator[Event]:
        *events, last = self._dialect.ended(self.blocks, end)
        yield from events
        yield last | self._wanted.phases_of_all([end])

    def _opening(self) -> list[Event | str]:
        if self._begun or self._send is None:
            return []
        self._begun = True
        return [*self._dialect.begin(len(self.prompt))]

    def _calling(self, piece: pb.Piece) -> list[Event | str]:
        events: list[Event | str] = []
        at, text = 0, piece.text
        for delta in piece.tool_calls:
            if delta.text_before > at:
                events += self._more(Kind.TEXT, text[at : delta.text_before])
                at = delta.text_before
            if delta.id:
                events += self._open(Block(len(self.blocks), Kind.CALL, delta.id, delta.name))
            if delta.arguments:
                events += self._more(Kind.CALL, delta.arguments)
        if text[at:]:
            events += self._more(Kind.TEXT, text[at:])
        return events

    def _more(self, kind: Kind, text: str) -> list[Event | str]:
        events: list[Event | str] = []
        if not self.blocks or self.blocks[-1].kind is not kind:
            events += self._open(Block(len(self.blocks), kind))
        block, logprobs = self.blocks[-1], self._waiting
        if logprobs.num_named:
            self._waiting = KeptLogprobs()
        if self._keeps:
            block.text.add(text)
            if kind is Kind.TEXT:
                block.logprobs.extend(logprobs)
        if self._send is not None:
            events.append(_small(self._dialect.more(block, text, logprobs)))
        return events

    def _open(self, block: Block) -> list[Event]:
        events = [*self._close()]
        self.blocks.append(block)
        return events if self._send is None else [*events, *self._dialect.opened(block)]

    def _close(self) -> Iterable[Event]:
        if not self.blocks or self._send is None:
            return ()
        return self._dialect.closed(self.blocks[-1])

    def _count(self) -> None:
        """Raises ResourceExhausted: there is no room for it."""
        num_bytes = sum(_BLOCK_BYTES + each.text.num_bytes + each.logprobs.num_bytes for each in self.blocks)
        self._holding.add(num_bytes - self._num_counted)
        self._num_counted, self._num_uncounted = num_bytes, 0

    async def _tell(self, events: Iterable[Event | str]) -> None:
        if self._send is None:
            return
        for number, chunk in enumerate(in_chunks(chain.from_iterable(map(_event_pieces, events)))):
            if number:
                await asyncio.sleep(0)  # a long answer that is told again is others' time too
            await self._send(chunk)


class BlockGeneration(ChatGeneration[AnyChat]):
    """A chat whose answer is told in blocks: one answer, see HttpGeneration."""

    dialect: Dialect

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[WholeAnswer]:
        async with self.front.inference.memory.hold(self.call.identity.caller) as holding:
            answer = self._answer(holding, None)
            await self._ask([answer])
            usage = self.wanted.usage_of_all([answer.finished])
            body = self.dialect.whole(answer.blocks, answer.finished) | self.wanted.phases_of_all([answer.finished])
            yield WholeAnswer(usage, answer.num_json_bytes, json_pieces(body))

    async def stream(self, send: Send) -> None:
        if self.dialect.tells_again:
            self.check_size()
        async with self.front.inference.memory.hold(self.call.identity.caller) as holding:
            await self._ask([self._answer(holding, send)])

    def _answer(self, holding: Holding, send: Send | None) -> BlockAnswer:
        return BlockAnswer(self.dialect, self.wanted, holding, with_reasoning=self.with_reasoning, send=send, keep=self.keep)

    async def keep(self, answer: BlockAnswer) -> None:
        """Stores an ended answer for later requests, where the API has them. A failure to store leaves the answer as it is."""

    @property
    def ping(self) -> bytes:
        return self.dialect.ping

    def failure(self, error: BaseException) -> bytes:
        return "".join(_event_pieces(self.dialect.failed(error))).encode("ascii")
