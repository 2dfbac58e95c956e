"""What both kinds of generation know of their answer: pieces in, a completion out."""

from __future__ import annotations

from twostep.client import _wire
from twostep.client._types import Completion, FinishReason, Phases, Piece, TokenLogprobs, Transfer, Usage
from twostep.errors import InvalidRequest, StreamBroken, TwostepError, Unavailable
from twostep.rpc.v1 import inference_pb2 as pb


class Answer:
    """The answer so far. Base of Generation and AsyncGeneration; what the end brings is not known before it."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._end: pb.End | None = None

    @property
    def text(self) -> str:
        """Text received so far; the whole answer after the end."""
        return "".join(self._texts)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    @property
    def request_id(self) -> str:
        """Name of the request in the servers' logs; empty until the first piece if the router chose it."""
        return self._request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self._end is None else _wire.finish_reason(self._end)

    @property
    def usage(self) -> Usage:
        """Known after the end; InvalidRequest before."""
        return _wire.usage(self._ended().usage)

    @property
    def phases(self) -> Phases:
        """Known after the end; InvalidRequest before."""
        return _wire.phases(self._ended().phases)

    @property
    def transfer(self) -> Transfer:
        """Known after the end; InvalidRequest before."""
        return _wire.transfer(self._ended().transfer)

    def _ended(self) -> pb.End:
        if self._end is None:
            raise InvalidRequest("the answer has not ended yet; iterate to its end, or call result(), first")
        return self._end

    def __repr__(self) -> str:
        state = self.finish_reason or "open"
        return f"{type(self).__name__}(request_id={self._request_id!r}, num_tokens={len(self._token_ids)}, {state}, text={self.text!r:.60})"

    def _begun(self) -> bool:
        """From here on the request must not be repeated: something of the answer was handed out."""
        return bool(self._token_ids or self._texts)

    def _take(self, response: pb.GenerateResponse) -> Piece | None:
        """Adds one message of the stream. None: it was the end."""
        if response.HasField("end"):
            self._end = response.end
            return None
        piece = _wire.piece(response.piece)
        if piece.token_ids and piece.position != len(self._token_ids):
            raise self._broken(f"tokens from position {piece.position} arrived where {len(self._token_ids)} was next")
        self._texts.append(piece.text)
        self._token_ids.extend(piece.token_ids)
        self._logprobs.extend(piece.logprobs)
        return piece

    def _failed(self, error: TwostepError) -> TwostepError:
        """The error to raise for a stream that ended with `error`: half-way, it carries what had arrived."""
        return self._broken(error.message) if isinstance(error, Unavailable) and self._begun() else error

    def _broken(self, why: str) -> StreamBroken:
        return StreamBroken(
            f"the answer broke off after {len(self._token_ids)} tokens: {why}; ask again, or go on from what was received",
            text=self.text,
            token_ids=self.token_ids,
        )

    def _completion(self) -> Completion:
        """The whole answer; only after the end."""
        end = self._ended()
        return Completion(
            text=self.text,
            token_ids=self.token_ids,
            logprobs=tuple(self._logprobs),
            finish_reason=_wire.finish_reason(end),
            stop_reason=end.stop_reason,
            usage=_wire.usage(end.usage),
            phases=_wire.phases(end.phases),
            transfer=_wire.transfer(end.transfer),
            attempts=end.attempts,
            request_id=self._request_id,
        )
