"""Whole answers: how large they may become, and their way to the client, piece by piece.

What an answer could come to is reckoned before it begins, from what was asked for; what it does come to is counted as it grows
(router/request/memory_budget.py). Its JSON, ten times as much, is made as the client takes it, beside the event loop, and is nowhere whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from types import MappingProxyType
from typing import Any, NamedTuple

from aiohttp import web

from router.http.errors import HttpError, WrongField
from router.json_pieces import in_chunks
from twostep.process.bounded_threads import BoundedThreads
from twostep.sampling_params import MAX_PROMPT_LOGPROBS

# Of JSON, about: up to here an answer is made at once, in a millisecond or two.
INLINE_BYTES = 256 << 10
# As it is kept. Of a token: its share of the text, and numbers.
_CHOICE_BYTES, _TOKEN_BYTES, _ID_BYTES, _LOGPROB_BYTES = 2048, 8, 4, 8
# As JSON. Tokens are named, with their bytes.
JSON_ID_BYTES, JSON_LOGPROB_BYTES = 8, 100
# A line of a batch is on disk in one write.
MAX_LINE_BYTES = 64 << 20
# A prompt that is told again with each answer.
_MAX_REPEATED_BYTES = 16 << 20

EMPTY: Mapping[str, Any] = MappingProxyType({})


def check_size(
    *,
    num_answers: int,
    max_tokens: int,
    num_logprobs: int | None,
    token_ids: bool,
    most: int,
    is_line: bool,
    logprobs_field: str,
    limit_field: str | None = "max_tokens",
) -> None:
    """Checks a whole answer that may have `most` bytes in memory, or a line of a batch, on disk. `limit_field`: the field that says how
    long an answer may be, None if nothing does. Raises HttpError 400."""
    num_names = 0 if num_logprobs is None else num_logprobs + 1
    each = _TOKEN_BYTES
    if is_line:
        each += token_ids * JSON_ID_BYTES + num_names * JSON_LOGPROB_BYTES
        most = MAX_LINE_BYTES
    else:
        each += token_ids * _ID_BYTES + num_names * _LOGPROB_BYTES
    total = num_answers * (_CHOICE_BYTES + max_tokens * each)
    if total <= most:
        return
    asked = f"{num_answers} answers of up to {max_tokens} tokens" + (f" with {num_logprobs} log probabilities each" if num_names else "")
    large = (("n", num_answers > 1), (limit_field, limit_field is not None), (logprobs_field, num_names > 0))
    lower = [name for name, is_large in large if name is not None and is_large]
    ways = [f"lower {' or '.join(lower)}"] if lower else []
    ways += ["give max_tokens"] if limit_field is None else []
    ways += [] if is_line else ["set stream to true"]
    raise HttpError(
        400,
        f"{asked} could come to {total >> 20} MiB, and {'a line of a batch' if is_line else 'an answer that is not streamed'} may come to "
        f"{most >> 20}; {', or '.join(ways)}",
        param=lower[0] if lower else "max_tokens",
    )


def check_repeated(*, num_answers: int, num_chars: int, num_ids: int) -> None:
    """Checks the size of a prompt of so many characters and token ids, told with each of its answers. Raises HttpError 400."""
    total = num_answers * (num_chars + num_ids * JSON_ID_BYTES)
    if total > _MAX_REPEATED_BYTES:
        field = "echo" if num_chars else "return_token_ids"
        raise WrongField(
            400,
            f"{field} tells the prompt with each of {num_answers} answers, which comes to {total >> 20} MiB and may come to "
            f"{_MAX_REPEATED_BYTES >> 20}; lower n, shorten the prompt, or leave {field} out",
            param=field,
        )


def check_prompt_logprobs(*, num_answers: int, num_each: int, num_named: int, is_line: bool) -> None:
    """Checks the size of log probabilities of a prompt that name so many tokens, told with each of `num_each` answers to it; in a line, to
    as many prompts as there are answers for. Raises HttpError 400."""
    if num_each * num_named > MAX_PROMPT_LOGPROBS or (is_line and num_answers * num_named * JSON_LOGPROB_BYTES > MAX_LINE_BYTES):
        most = MAX_LINE_BYTES // JSON_LOGPROB_BYTES if is_line else MAX_PROMPT_LOGPROBS
        raise WrongField(
            400,
            f"the prompt's log probabilities name {num_named} tokens in each of {num_answers if is_line else num_each} answers, "
            f"and may name {most} in all; ask for fewer of the likeliest, lower n, or shorten the prompt",
            param="prompt_logprobs",
        )


class WholeAnswer(NamedTuple):
    """`pieces`: its JSON, of about so many bytes."""

    usage: Mapping[str, Any]
    num_bytes: int
    pieces: Iterator[str]


class AnswerEncoder:
    """Makes JSON beside the event loop: a chunk of one answer at a time, in turns with the others."""

    def __init__(self) -> None:
        # More threads would take the interpreter from the event loop for longer, and encode nothing faster.
        self._threads = BoundedThreads(1, "encode")

    def close(self) -> None:
        self._threads.close()

    async def respond(self, request: web.Request, answer: WholeAnswer, headers: Mapping[str, str] = EMPTY) -> web.StreamResponse:
        """Sends the answer. A client that goes, or is cut, ends it."""
        if answer.num_bytes <= INLINE_BYTES:
            return web.Response(text="".join(answer.pieces), content_type="application/json", headers=headers)
        chunks = in_chunks(answer.pieces)
        response = web.StreamResponse(headers={**headers, "Content-Type": "application/json; charset=utf-8"})
        await response.prepare(request)
        try:
            while chunk := await self._threads.run(next, chunks, b""):
                await response.write(chunk)
            await response.write_eof()
        except ConnectionError:
            pass  # it is gone
        except BaseException:
            # Half an answer must not look like a whole one.
            if request.transport is not None:
                request.transport.abort()
            raise
        return response

    async def made(self, make: Callable[[], bytes]) -> bytes:
        """Returns something else that takes long to write, in its turn."""
        return await self._threads.run(make)

    async def line(self, answer: WholeAnswer) -> bytes:
        """Returns all of it."""
        if answer.num_bytes <= INLINE_BYTES:
            return "".join(answer.pieces).encode("ascii")
        chunks, made = in_chunks(answer.pieces), BytesIO()
        while chunk := await self._threads.run(next, chunks, b""):
            made.write(chunk)
        return made.getvalue()


ENCODER: web.AppKey[AnswerEncoder] = web.AppKey("encoder", AnswerEncoder)
