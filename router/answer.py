"""Tokens to what the client reads: text without half characters, cut before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostep.rpc.v1 import inference_pb2, prefill_pb2
from twostep.sampling_params import SamplingParams
from twostep.text.detokenizer import Detokenizer
from twostep.text.stop_strings import StopStrings
from twostep.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Finish:
    """How the answer ended. `stop_reason` is the stop string or stop token id that was asked for by name, else empty."""

    reason: inference_pb2.FinishReason.ValueType
    stop_reason: str = ""


class Answer:
    """One answer's text. `finish` is set by the token or the stop string that ends it; tokens after it are dropped."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(sampling.stop)
        self._has_stops = bool(sampling.stop)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._with_logprobs = sampling.logprobs is not None
        self.num_tokens = 0
        self.finish: Finish | None = None
        # The workers know nothing of it: whoever reads the answer ends the request.
        self.stopped_by_text = False

    def resume(self, tokens: Sequence[prefill_pb2.Token]) -> None:
        """Takes tokens whose pieces the client has, from the first on: text and stop strings go on after them."""
        self.response(tokens)

    def response(self, tokens: Sequence[prefill_pb2.Token]) -> inference_pb2.GenerateResponse | None:
        """One piece for all of `tokens`, text held back included if they end the answer. None: nothing to send."""
        endings = [token.finish_reason for token in tokens]
        if self._has_stops or self.finish is not None or any(endings):
            return self._careful_response(tokens)
        if not tokens:
            return None
        # Nearly every token comes this way.
        token_ids = [token.token_id for token in tokens]
        return self._response(self._detokenizer.push(token_ids), token_ids, tokens)

    def _careful_response(self, tokens: Sequence[prefill_pb2.Token]) -> inference_pb2.GenerateResponse | None:
        """Token by token, wherever one may end the answer."""
        taken: list[prefill_pb2.Token] = []
        text = ""
        unread: list[int] = []
        for token in tokens:
            if self.finish is not None:
                break
            taken.append(token)
            ended = token.finish_reason
            # A stop token ends the answer and is no part of its text.
            if ended != inference_pb2.FINISH_REASON_STOP:
                unread.append(token.token_id)
            if self._has_stops or ended:
                text += self._read(unread)
                unread = []
            if ended and self.finish is None:
                text += self._end(token)
        if unread:
            text += self._read(unread)
        if not taken and not text:
            return None
        return self._response(text, [t.token_id for t in taken], taken)

    def _response(self, text: str, token_ids: list[int], tokens: Sequence[prefill_pb2.Token]) -> inference_pb2.GenerateResponse:
        # Filled in place: a piece made by itself would be copied into the response.
        response = inference_pb2.GenerateResponse()
        piece = response.piece
        piece.text = text
        piece.token_ids.extend(token_ids)
        piece.position = self.num_tokens
        if self._with_logprobs:
            piece.logprobs.extend([t.logprobs for t in tokens])
        self.num_tokens += len(token_ids)
        return response

    def _read(self, token_ids: list[int]) -> str:
        return self._watch(self._detokenizer.push(token_ids))

    def _watch(self, text: str) -> str:
        result = self._stops.push(text)
        if result.matched is not None:
            self.finish = Finish(inference_pb2.FINISH_REASON_STOP, result.matched)
            self.stopped_by_text = True
        return result.text

    def _end(self, token: prefill_pb2.Token) -> str:
        """Text still held back; it may complete a stop string, which then is what ended the answer."""
        text = self._watch(self._detokenizer.finish())
        if self.finish is None:
            text += self._stops.finish().text
            named = token.finish_reason == inference_pb2.FINISH_REASON_STOP and token.token_id in self._stop_token_ids
            self.finish = Finish(token.finish_reason, str(token.token_id) if named else "")
        return text
