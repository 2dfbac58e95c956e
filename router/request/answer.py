"""Tokens to what the client reads: text without half characters, cut before a stop string, reasoning apart from it.

    token ids -> Detokenizer -> text -> StopStrings -> the answer -> Splitter -> piece.reasoning | piece.text

Stop strings end the reasoning as well as what follows it (as vLLM has it): they are looked for in all that the model writes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from twostep.errors import InvalidRequest
from twostep.rpc.v1 import inference_pb2, prefill_pb2
from twostep.sampling_params import SamplingParams
from twostep.text.detokenizer import Detokenizer
from twostep.text.reasoning import Splitter, SplitText
from twostep.text.stop_strings import StopStrings
from twostep.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Finish:
    """Says how the answer ended. `stop_reason` is the stop string or stop token id that was asked for by name, else empty."""

    reason: inference_pb2.FinishReason.ValueType
    stop_reason: str = ""


class AnswerReader:
    """One answer's text. `finish` is set by the token or the stop string that ends it; tokens after it are dropped."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        splitter: Splitter | None = None,
        *,
        prompt: Sequence[int] = (),
    ) -> None:
        """`splitter`: of a model that marks its reasoning; it must be new, and belongs to this answer. `prompt`: what the answer
        goes on with."""
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(sampling.stop)
        self._splitter = splitter  # None as soon as the reasoning is over
        # What a token adds has to be known by itself.
        self._careful = bool(sampling.stop) or splitter is not None
        self._has_stops = bool(sampling.stop)
        # Of these tokens no text ends the answer.
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._with_logprobs = sampling.logprobs is not None
        self.num_tokens = 0
        # Up to and with the closing marker.
        self.num_reasoning_tokens = 0
        self._counted = False
        self.finish: Finish | None = None
        # The workers know nothing of it: the reader of the answer has to end the request.
        self.stopped_by_text = False

    def resume(self, tokens: Sequence[prefill_pb2.Token]) -> str:
        """Takes tokens whose pieces the client has, from the first on: text and stop strings go on after them. Returns their text."""
        response = self.response(tokens)
        return "" if response is None else response.piece.text

    def response(self, tokens: Sequence[prefill_pb2.Token]) -> inference_pb2.GenerateResponse | None:
        """Returns one piece for all of `tokens`, text held back included if they end the answer. None: nothing to send."""
        endings = [token.finish_reason for token in tokens]
        if self._careful or self.finish is not None or any(endings):
            return self._careful_response(tokens)
        if not tokens:
            return None
        # Nearly every token comes this way.
        token_ids = [token.token_id for token in tokens]
        return self._response("", self._detokenizer.push(token_ids), token_ids, tokens)

    def _careful_response(self, tokens: Sequence[prefill_pb2.Token]) -> inference_pb2.GenerateResponse | None:
        """Does so token by token, wherever one may end the answer or its reasoning."""
        taken: list[prefill_pb2.Token] = []
        parts: list[SplitText] = []
        unread: list[int] = []
        for token in tokens:
            if self.finish is not None:
                break
            taken.append(token)
            ended = token.finish_reason
            # A stop token ends the answer and is no part of its text.
            if ended != inference_pb2.FINISH_REASON_STOP:
                unread.append(token.token_id)
            if self._careful or ended:
                num_read = self.num_tokens + len(taken) - (not unread)
                parts.append(self._read(unread, num_read))
                unread = []
                if ended and self.finish is None:
                    parts.append(self._end(token, num_read))
        if unread:
            parts.append(SplitText("", self._watch(self._detokenizer.push(unread), self.num_tokens + len(taken))))
        reasoning, text = parts[0] if len(parts) == 1 else _joined(parts)
        if not taken and not text and not reasoning:
            return None
        return self._response(reasoning, text, [t.token_id for t in taken], taken)

    def _response(
        self, reasoning: str, text: str, token_ids: list[int], tokens: Sequence[prefill_pb2.Token]
    ) -> inference_pb2.GenerateResponse:
        # Filled in place: a piece made by itself would be copied into the response.
        response = inference_pb2.GenerateResponse()
        piece = response.piece
        piece.text = text
        if reasoning:
            piece.reasoning = reasoning
        piece.token_ids.extend(token_ids)
        piece.position = self.num_tokens
        if self._with_logprobs:
            piece.logprobs.extend([t.logprobs for t in tokens])
        self.num_tokens += len(token_ids)
        return response

    def _read(self, token_ids: list[int], num_read: int) -> SplitText:
        """`num_read`: tokens of the answer that have been read, these included."""
        text = self._watch(self._detokenizer.push(token_ids), num_read)
        return self._split(text, num_read)

    def _split(self, text: str, num_read: int) -> SplitText:
        splitter = self._splitter
        if splitter is None:
            return SplitText("", text)
        part = splitter.push(text)
        if self.finish is not None:
            last = splitter.finish()
            part = SplitText(part.reasoning + last.reasoning, part.text + last.text)
        if splitter.opened and not self._counted:
            self.num_reasoning_tokens = num_read
            self._counted = not splitter.thinking
        if splitter.settled:
            self._splitter, self._careful = None, self._has_stops
        return part

    def _watch(self, text: str, num_read: int) -> str:
        """Looks for stop strings. A stop string ends the answer if it is complete only after `min_tokens`, as vLLM has it; it may begin
        before."""
        text = self._stops.push(text, may_end=num_read > self._min_tokens)
        if self._stops.matched is not None:
            self.finish = Finish(inference_pb2.FINISH_REASON_STOP, self._stops.matched)
            self.stopped_by_text = True
        return text

    def _end(self, token: prefill_pb2.Token, num_read: int) -> SplitText:
        """Returns the text still held back; it may complete a stop string, which then is what ended the answer."""
        text = self._watch(self._detokenizer.finish(), num_read)
        if self.finish is None:
            text += self._stops.finish()
            named = token.finish_reason == inference_pb2.FINISH_REASON_STOP and token.token_id in self._stop_token_ids
            self.finish = Finish(token.finish_reason, str(token.token_id) if named else "")
        return self._split(text, num_read)


def _joined(parts: Sequence[SplitText]) -> SplitText:
    return SplitText("".join(part.reasoning for part in parts), "".join(part.text for part in parts))


def resumed_tokens(
    token_ids: Sequence[int], sampling: SamplingParams, *, eos_token_ids: Set[int], vocab_size: int
) -> list[prefill_pb2.Token]:
    """Positions count from 0; the last one has a finish reason if it ends the answer. Raises InvalidRequest for ids that cannot be the
    beginning of an answer to this request."""
    if len(token_ids) > sampling.max_tokens:
        raise InvalidRequest(
            f"resume_token_ids has {len(token_ids)} tokens and max_tokens, which counts them, is {sampling.max_tokens}; "
            "resume with the parameters of the first request"
        )
    # An answer in a grammar ends where nothing can follow, whatever was asked for.
    held = sampling.grammar is not None
    stops = frozenset(sampling.stop_token_ids) | (frozenset[int]() if sampling.ignore_eos and not held else eos_token_ids)
    tokens: list[prefill_pb2.Token] = []
    for position, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"resume_token_ids[{position}] is {token_id}; the vocabulary of this model has ids from 0 to {vocab_size - 1}"
            )
        last = position + 1 == len(token_ids)
        token = prefill_pb2.Token(token_id=token_id, position=position)
        if token_id in stops and (position >= sampling.min_tokens or held):
            if not last:
                raise InvalidRequest(
                    f"resume_token_ids[{position}] is {token_id}, which ends the answer, and others follow; "
                    "resume with the parameters of the first request"
                )
            token.finish_reason = inference_pb2.FINISH_REASON_STOP
        elif position + 1 >= sampling.max_tokens:
            token.finish_reason = inference_pb2.FINISH_REASON_LENGTH
        tokens.append(token)
    return tokens
