"""Tool calls, taken out of an answer's pieces as they go to the client.

It stands behind everything else that looks at the text: stop strings, reasoning, the operator's hold-back hook. A piece stays one piece,
with its tokens: what was held back in it comes with a later one, at the latest with that of the last token, so that a client that goes on
elsewhere after any piece misses nothing and gets nothing twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from router.request.answer import AnswerReader, Finish
from twostep.rpc.v1 import inference_pb2 as pb
from twostep.text.tool_calls import ToolCallParser
from twostep.text.tool_formats.events import CallArguments, CallBegun, ContentDelta, Event

Write = Callable[[pb.GenerateResponse], Awaitable[None]]


class CallTaker:
    """Takes the calls out of one answer. Awaited with a response, it writes that on."""

    def __init__(self, parser: ToolCallParser, answer: AnswerReader, write: Write) -> None:
        self._parser, self._answer, self._write = parser, answer, write

    def resume(self, text: str) -> None:
        """Takes the text of tokens whose pieces the client has."""
        self._parser.push(text)
        if self._answer.finish is not None:
            self._parser.finish(cut=_was_cut(self._answer.finish))

    async def __call__(self, response: pb.GenerateResponse) -> None:
        piece = response.piece
        events = self._parser.push(piece.text)
        finish = self._answer.finish
        if finish is not None and piece.position + len(piece.token_ids) >= self._answer.num_tokens:
            events += self._parser.finish(cut=_was_cut(finish))
        piece.text = ""
        _add_events(piece, events)
        await self._write(response)

    async def end(self, finish: Finish) -> Finish:
        """Writes, after the last piece, what may still be held back, of an answer that was cut off. Returns how the answer ended."""
        if events := self._parser.finish(cut=_was_cut(finish)):
            response = pb.GenerateResponse(piece=pb.Piece(position=self._answer.num_tokens))
            _add_events(response.piece, events)
            await self._write(response)
        # A client makes the calls of an answer that ends so: half a call must not pass for one.
        calls = finish.reason == pb.FINISH_REASON_STOP and self._parser.num_calls and not self._parser.unfinished
        return Finish(pb.FINISH_REASON_TOOL_CALLS, finish.stop_reason) if calls else finish


def _was_cut(finish: Finish) -> bool:
    """Returns whether the model did not end the answer itself: it was too long, was held back, or hit something that the client asked to
    stop at."""
    return finish.reason != pb.FINISH_REASON_STOP or bool(finish.stop_reason)


def _add_events(piece: pb.Piece, events: list[Event]) -> None:
    for event in events:
        match event:
            case ContentDelta(text):
                piece.text += text
            case CallBegun(index, call_id, name):
                piece.tool_calls.add(index=index, id=call_id, name=name, text_before=len(piece.text))
            case CallArguments(index, text):
                piece.tool_calls.add(index=index, arguments=text, text_before=len(piece.text))
