"""The choices of an answer, whichever endpoint they belong to: kept until they are whole, or sent piece by piece.

An endpoint gives each a Teller, which says what a piece looks like there.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar, Protocol

from google.protobuf.message import Message

from router.http.logprobs import Kept, KeptLogprobs, KeptPromptLogprobs, LogprobsWriter, WithPrompt, kept_of
from router.http.sse import DONE
from router.http.whole_answer import JSON_ID_BYTES, JSON_LOGPROB_BYTES
from router.json_pieces import compact, json_pieces, small
from router.request.memory_budget import Holding
from twostep.rpc.v1 import inference_pb2 as pb

# Strings of a few characters take ten times as much memory as what they say.
_JOINED = 64


class KeptText:
    def __init__(self) -> None:
        self._whole: list[str] = []
        self._recent: list[str] = []
        # All but what came last.
        self.num_bytes = 0

    def add(self, text: str) -> None:
        if not text:
            return
        self._recent.append(text)
        if len(self._recent) >= _JOINED:
            self._whole.append("".join(self._recent))
            self._recent.clear()
            self.num_bytes += sys.getsizeof(self._whole[-1])

    def __str__(self) -> str:
        return "".join((*self._whole, *self._recent))


_FINISH = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CONTENT_FILTER: "content_filter",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


def finish_of(end: pb.End) -> str:
    return _FINISH.get(end.finish_reason, "stop")


def stop_reason_of(end: pb.End, stop_strings: Sequence[str]) -> str | int | None:
    """Returns the stop string, or the id of the stop token, that was asked for by name and ended the answer."""
    reason = end.stop_reason
    if not reason:
        return None
    return reason if reason in stop_strings else int(reason)


def usage_of(prompt_tokens: int, completion_tokens: int, *, cached_tokens: int = 0, reasoning_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def total_usage(prompts: Sequence[Sequence[pb.Usage]]) -> dict[str, Any]:
    """Adds up several answers to each of several prompts: a prompt counts once, with what of it was cached for its first answer."""
    return usage_of(
        sum(answers[0].prompt_tokens for answers in prompts),
        sum(answer.completion_tokens for answers in prompts for answer in answers),
        cached_tokens=sum(answers[0].cached_tokens for answers in prompts),
        reasoning_tokens=sum(answer.reasoning_tokens for answers in prompts for answer in answers),
    )


def phases_of(end: pb.End) -> dict[str, Any]:
    """`twostep` in an answer: seconds of each phase, how the KV cache travelled, how often the request was begun, and its longest gaps."""
    gaps = [{name: round(value, 6) for name, value in _fields(gap).items()} for gap in end.gaps]
    return {"phases": _fields(end.phases), "transfer": _fields(end.transfer), "attempts": end.attempts, "gaps": gaps}


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


_quoted: Callable[[str], str] = encode_basestring_ascii


class ChunkWriter:
    """Events of one choice. `head`: what all chunks of the answer have in common (id, object, created, model ...). `wrap` is the shape that
    text has within a choice, as the JSON before and after it. `with_usage`: chunks have a usage, null but in the last one."""

    def __init__(self, head: dict[str, Any], index: int, *, wrap: tuple[str, str], with_usage: bool) -> None:
        self._head = compact(head)[:-1]
        self._index = index
        self._tail = ',"usage":null}\n\n' if with_usage else "}\n\n"
        begin, end = wrap
        self._before = f'data: {self._head},"choices":[{{"index":{index},{begin}'
        self._after = f'{end},"logprobs":null,"finish_reason":null}}]{self._tail}'

    def text(self, text: str) -> bytes:
        """Returns a piece of text and nothing else."""
        return (self._before + _quoted(text) + self._after).encode("ascii")

    def choice(self, fields: dict[str, Any], **others: Any) -> bytes:
        """Returns any other piece; `others` stand beside the choices: usage, phases. None of them: what `text` has there."""
        choice = "".join(json_pieces({"index": self._index, **fields}))
        tail = "," + compact(others)[1:] + "\n\n" if others else self._tail
        return f'data: {self._head},"choices":[{choice}]{tail}'.encode("ascii")


def usage_chunk(head: dict[str, Any], usage: dict[str, Any], **others: Any) -> bytes:
    """Returns the last chunk, which has usage and no choices."""
    return f"data: {compact({**head, 'choices': [], 'usage': usage, **others})}\n\n".encode("ascii")


Send = Callable[[bytes], Awaitable[None]]
# What of a choice is an endpoint's own: {"delta": {"content": "Hel"}}, {"text": "Hel"}.
Said = dict[str, Any]
# Tokens and pieces after which a whole answer counts what it holds.
_COUNT_AFTER = 128
# What a call takes beside its arguments.
_CALL_BYTES = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Holds what a body asks of all its answers, `n` to each prompt. `logprobs`, `token_ids`, `phases`: they are told. `echoed_logprobs`:
    so many of the likeliest with each of the prompt's tokens, before the answer's; `prompt_logprobs`: in a field of their own."""

    n: int
    stop_strings: Sequence[str]
    logprobs: bool
    token_ids: bool
    phases: bool
    include_usage: bool
    continuous_usage: bool
    echoed_logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def tells_prompt(self) -> bool:
        return self.echoed_logprobs is not None or self.prompt_logprobs is not None

    def usage_of_all(self, ends: Sequence[pb.End]) -> dict[str, Any]:
        """`ends` in the order of the choices' indices."""
        return total_usage([[end.usage for end in ends[i : i + self.n]] for i in range(0, len(ends), self.n)])

    def phases_of_all(self, ends: Sequence[pb.End]) -> dict[str, Any]:
        """`twostep`, if it is asked for: that of the first choice, and in a list those of all if there are several."""
        if not self.phases:
            return {}
        phases = phases_of(ends[0])
        if len(ends) > 1:
            phases["choices"] = [phases_of(end) for end in ends]
        return {"twostep": phases}


class Teller(ABC):
    """Says what one answer looks like at its endpoint, piece by piece; a whole answer is what the pieces add up to."""

    # The name of an answer's text, and its shape within a choice, as the JSON before and after it.
    text: ClassVar[str]
    wrap: ClassVar[tuple[str, str]]
    # The first event says something before the first piece.
    opening: ClassVar[Said | None] = None
    # An event that has other things to tell.
    silence: ClassVar[Said]
    # Where ids of the prompt are told: beside the choices, or in each.
    prompt_ids_beside: ClassVar[bool]

    def __init__(self, logprobs: LogprobsWriter, *, plain: bool = True) -> None:
        """`plain`: the text of a piece is said as it is."""
        self.logprobs, self.plain = logprobs, plain

    def prompt_words(self) -> list[Said]:
        """Returns what is said of the prompt before the first piece, an event each."""
        return []

    @abstractmethod
    def pieces(self, piece: pb.Piece) -> list[Said]:
        """Returns what a piece adds, an event each; it may be nothing."""

    def last_words(self, end: pb.End) -> list[Said]:
        """Returns what was held back, an event each."""
        return []

    @abstractmethod
    def whole(self, folded: Folded) -> Said: ...

    def finish_reason(self, end: pb.End) -> str:
        return finish_of(end)


class AnswerSink(Protocol):
    """Takes one answer, piece by piece. `prompt` is set before the first."""

    prompt: Sequence[int]

    async def write_prompt(self, part: pb.PromptLogprobs) -> None: ...

    async def write(self, response: pb.GenerateResponse) -> None: ...

    async def end(self, end: pb.End) -> None: ...


class Folded:
    """Holds what the pieces of an answer add up to: texts by their names, and calls of tools as id, name and arguments."""

    def __init__(self) -> None:
        self.texts: defaultdict[str, KeptText] = defaultdict(KeptText)
        self.calls: list[tuple[str, str, KeptText]] = []

    @property
    def num_bytes(self) -> int:
        """But for what came last."""
        return sum(text.num_bytes for text in self.texts.values()) + sum(_CALL_BYTES + text.num_bytes for _, _, text in self.calls)

    def add(self, said: Said) -> None:
        for name, value in said.get("delta", said).items():
            if name == "reasoning_content":
                continue  # "reasoning" has the same
            if name != "tool_calls":
                self.texts[name].add(value)
                continue
            for call in value:
                if "id" in call:
                    self.calls.append((call["id"], call["function"]["name"], KeptText()))
                self.calls[call["index"]][2].add(call["function"]["arguments"])


class WholeChoice:
    """Keeps its answer until it is whole."""

    def __init__(
        self, teller: Teller, index: int, wanted: AnswerOptions, holding: Holding, of_prompt: KeptPromptLogprobs | None = None
    ) -> None:
        """`holding`: what it keeps is counted there. `of_prompt`: log probabilities that all answers to its prompt share."""
        self._of_prompt = KeptPromptLogprobs(holding) if of_prompt is None else of_prompt
        self._teller, self._index, self._wanted, self._holding = teller, index, wanted, holding
        self._folded = Folded()
        self._text = self._folded.texts[teller.text]
        self._quick = False
        self._logprobs = KeptLogprobs() if wanted.logprobs else None
        self._token_ids = array("I")
        self._num_counted = self._num_uncounted = 0
        self.prompt: Sequence[int] = ()
        self.finished = pb.End()

    @property
    def num_json_bytes(self) -> int:
        """Estimates what it comes to as JSON."""
        named = 0 if self._logprobs is None else self._logprobs.num_named
        num_ids = len(self._token_ids) + len(self.prompt) if self._wanted.token_ids else 0
        if self._wanted.tells_prompt:
            named += self._of_prompt.num_named
        return self._folded.num_bytes + JSON_ID_BYTES * num_ids + JSON_LOGPROB_BYTES * named

    async def write_prompt(self, part: pb.PromptLogprobs) -> None:
        self._of_prompt.add(part)

    async def write(self, response: pb.GenerateResponse) -> None:
        piece = response.piece
        if self._quick and not piece.reasoning:
            # Nearly every piece comes this way.
            self._text.add(piece.text)
        else:
            self._quick = self._teller.plain
            for said in self._teller.pieces(piece):
                self._folded.add(said)
        if self._wanted.token_ids:
            self._token_ids.extend(piece.token_ids)
        if self._logprobs is not None:
            self._logprobs.add(piece.token_ids, piece.logprobs)
        self._num_uncounted += 1 + len(piece.token_ids)
        if self._num_uncounted > _COUNT_AFTER:
            self._count()

    async def end(self, end: pb.End) -> None:
        for said in self._teller.last_words(end):
            self._folded.add(said)
        self.finished = end
        self._count()

    def _count(self) -> None:
        """Raises ResourceExhausted: there is no room for it."""
        num_bytes = self._folded.num_bytes + self._token_ids.itemsize * len(self._token_ids)
        if self._logprobs is not None:
            num_bytes += self._logprobs.num_bytes
        self._holding.add(num_bytes - self._num_counted)
        self._num_counted, self._num_uncounted = num_bytes, 0

    def choice(self) -> dict[str, Any]:
        """Returns the choice, for json_pieces."""
        choice = {
            "index": self._index,
            **self._teller.whole(self._folded),
            "logprobs": None if self._logprobs is None else self._teller.logprobs.of_all(self._all_logprobs(self._logprobs)),
            "finish_reason": self._teller.finish_reason(self.finished),
            "stop_reason": stop_reason_of(self.finished, self._wanted.stop_strings),
        }
        if self._wanted.token_ids:
            choice["token_ids"] = self._token_ids
            if not self._teller.prompt_ids_beside:
                choice["prompt_token_ids"] = list(self.prompt)
        return choice if self._teller.prompt_ids_beside else choice | self.prompt_logprobs()

    def prompt_logprobs(self) -> dict[str, Any]:
        """Returns the field, if it is asked for. Its list is an iterator."""
        most = self._wanted.prompt_logprobs
        if most is None:
            return {}
        return {"prompt_logprobs": small(self._teller.logprobs.prompt_entries(self._of_prompt.of(self.prompt), most))}

    def _all_logprobs(self, answer: KeptLogprobs) -> Iterable[Kept]:
        most = self._wanted.echoed_logprobs
        return answer if most is None else WithPrompt(self._of_prompt, self.prompt, most, answer)


class Events:
    """Holds what the choices of one stream share: the head of its chunks, the way to the client, and what follows the end of the last
    choice to end: usage if it is asked for, and `[DONE]`."""

    def __init__(self, wanted: AnswerOptions, head: dict[str, Any], num_choices: int, send: Send) -> None:
        self.wanted, self.head, self.send = wanted, head, send
        self._ends: list[pb.End] = [pb.End()] * num_choices
        self._num_under_way = num_choices

    def beside(self, end: pb.End) -> dict[str, Any]:
        """Returns what stands beside a choice in the chunk that ends it. The usage chunk, if there is one, tells the phases."""
        others: dict[str, Any] = {}
        if self.wanted.continuous_usage:
            others["usage"] = usage_of(end.usage.prompt_tokens, end.usage.completion_tokens)
        elif self.wanted.include_usage:
            others["usage"] = None
        if self.wanted.phases and not self.wanted.include_usage:
            others["twostep"] = phases_of(end)
        return others

    def after(self, index: int, end: pb.End) -> bytes:
        """Returns what is sent behind a choice's end: nothing while other choices go on."""
        self._ends[index] = end
        self._num_under_way -= 1
        if self._num_under_way:
            return b""
        if not self.wanted.include_usage:
            return DONE
        return usage_chunk(self.head, self.wanted.usage_of_all(self._ends), **self.wanted.phases_of_all(self._ends)) + DONE


class StreamedChoice:
    """Sends its answer as it comes: one event a piece."""

    def __init__(self, teller: Teller, index: int, events: Events) -> None:
        wanted = self._wanted = events.wanted
        self._teller, self._index, self._events, self._send = teller, index, events, events.send
        self._chunks = ChunkWriter(events.head, index, wrap=teller.wrap, with_usage=wanted.include_usage)
        # Pieces have text and nothing else to tell.
        self._plain = teller.plain and not (wanted.logprobs or wanted.token_ids or wanted.continuous_usage)
        self._begun = self._quick = False
        self._num_tokens = 0
        self.prompt: Sequence[int] = ()

    async def write_prompt(self, part: pb.PromptLogprobs) -> None:
        """Writes an event of its own, with the prompt's text in the first."""
        wanted, teller, kept = self._wanted, self._teller, kept_of(self.prompt, part)
        fields: dict[str, Any] = {}
        beside: dict[str, Any] = {}
        if wanted.echoed_logprobs is not None:
            fields["logprobs"] = teller.logprobs.of_prompt(kept, wanted.echoed_logprobs)
        if wanted.prompt_logprobs is not None:
            entries = list(teller.logprobs.prompt_entries(kept, wanted.prompt_logprobs))
            (beside if teller.prompt_ids_beside else fields)["prompt_logprobs"] = entries
            if wanted.include_usage:
                beside["usage"] = None
        said = teller.prompt_words() or [teller.silence]
        await self._send(self._begin() + self._chunks.choice({**said[0], "logprobs": None, "finish_reason": None, **fields}, **beside))

    async def write(self, response: pb.GenerateResponse) -> None:
        piece = response.piece
        if self._quick and not piece.reasoning:
            # Nearly every piece comes this way.
            if text := piece.text:
                await self._send(self._chunks.text(text))
        elif event := self._begin() + self._detailed(piece):
            await self._send(event)

    async def end(self, end: pb.End) -> None:
        begin = self._begin()
        held = self._teller.last_words(end)
        fields = {
            **self._teller.silence,
            "logprobs": None,
            "finish_reason": self._teller.finish_reason(end),
            "stop_reason": stop_reason_of(end, self._wanted.stop_strings),
        }
        rest = begin + b"".join(map(self._event, held)) + self._chunks.choice(fields, **self._events.beside(end))
        await self._send(rest + self._events.after(self._index, end))

    def _begin(self) -> bytes:
        """Returns the first event, if there is one before the first piece."""
        if self._begun:
            return b""
        self._begun, self._quick = True, self._plain
        if self._teller.opening is None:
            return b""
        others: dict[str, Any] = {}
        if self._wanted.token_ids and self._teller.prompt_ids_beside:
            others["prompt_token_ids"] = list(self.prompt)
        if self._wanted.include_usage or self._wanted.continuous_usage:
            others["usage"] = usage_of(len(self.prompt), 0) if self._wanted.continuous_usage else None
        return self._chunks.choice({**self._teller.opening, "logprobs": None, "finish_reason": None}, **others)

    def _detailed(self, piece: pb.Piece) -> bytes:
        said, details = self._teller.pieces(piece), {} if self._plain else self._details(piece)
        self._num_tokens += len(piece.token_ids)
        if not said:
            if not details:
                return b""
            said = [self._teller.silence]
        return self._event(said[0], **details) + b"".join(map(self._event, said[1:]))

    def _details(self, piece: pb.Piece) -> dict[str, Any]:
        """Returns what stands beside a piece's text: log probabilities, token ids."""
        fields: dict[str, Any] = {}
        if self._wanted.logprobs:
            fields["logprobs"] = self._teller.logprobs.of(piece.token_ids, piece.logprobs)
        if self._wanted.token_ids:
            fields["token_ids"] = list(piece.token_ids)
            if self._num_tokens == 0 and not self._teller.prompt_ids_beside:
                fields["prompt_token_ids"] = list(self.prompt)
        return fields

    def _event(self, said: Said, **details: Any) -> bytes:
        beside: dict[str, Any] = {}
        if self._wanted.continuous_usage:
            beside["usage"] = usage_of(len(self.prompt), self._num_tokens)
        return self._chunks.choice({**said, "logprobs": None, "finish_reason": None, **details}, **beside)
