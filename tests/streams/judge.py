"""The single process, without drafts and without anybody else, says what the right answer to a request is: tokens, text, log probabilities
and why it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from random_requests import RandomRequest

from router.prompting.prompt import Prompt
from router.serving.answers import choice_seed
from twostep import Choice
from twostep.engine.batch import Batch, InFlight
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.grammar import GrammarCompiler
from twostep.engine.types import EngineRequest, FinishReason, TokenOutput
from twostep.model.runner.model_runner import ModelRunner
from twostep.model.runner.sampler import sampling_margin
from twostep.rpc.v1 import inference_pb2, prefill_pb2
from twostep.sampling_params import Grammar, GrammarKind, SamplingParams
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import Tokenizer

NEAR_TIE = 1e-4
_LOGPROB_TOLERANCE = 1e-3
_FINISH = {FinishReason.STOP: inference_pb2.FINISH_REASON_STOP, FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH}
_NOT_OF_THE_ENGINE = ("n", "request_class", "json_schema", "regex", "lark")


@dataclass(frozen=True)
class RightAnswer:
    """`tokens`: up to and with the one that ends it, or completes a stop string."""

    tokens: Sequence[TokenOutput]
    text: str
    finish_reason: str
    stop_reason: str


class Judge:
    """Has a runner of its own, and answers one request at a time."""

    def __init__(self, model_dir: Path, runner: ModelRunner) -> None:
        self._runner = runner
        self._engine = Engine(runner, EngineConfig(max_num_batched_tokens=512, enable_prefix_caching=False))
        card = ModelCard.load(model_dir)
        self._eos = frozenset(card.eos_token_ids)
        self._grammars = GrammarCompiler(model_dir, vocab_size=runner.vocab_size, eos_token_ids=self._eos)
        self.tokenizer = Tokenizer.load(model_dir)
        self._num_asked = 0

    def judge(self, request: RandomRequest, choice: Choice, had: Sequence[int]) -> bool:
        """Fails for a wrong answer. True: it is equal up to a token that hangs on less than NEAR_TIE, or else in all. `had`: tokens that
        the client came back with, after which the choice goes on."""
        right = self._right(request, choice.index)
        got, want = [*had, *choice.token_ids], [token.token_id for token in right.tokens]
        if got != want:
            at = next((i for i, (one, other) in enumerate(zip(got, want, strict=False)) if one != other), min(len(got), len(want)))
            margin = self._margin(request, choice.index, want[:at]) if at < min(len(got), len(want)) else 1.0
            what = f"answer {choice.index} of {request}, {choice.attempts} attempts, came back with {had}, {choice.transfer}"
            assert margin < NEAR_TIE, f"token {at} of {got} is not that of {want} (margin {margin}): {what}"
            return True
        assert (choice.finish_reason, choice.stop_reason) == (right.finish_reason, right.stop_reason), request
        assert right.text.endswith(choice.text) if had else choice.text == right.text, request
        self._judge_logprobs(request, choice, right.tokens[len(had) :])
        return False

    def _judge_logprobs(self, request: RandomRequest, choice: Choice, tokens: Sequence[TokenOutput]) -> None:
        if "logprobs" not in request.options:
            assert not choice.logprobs, request
            return
        for told, token in zip(choice.logprobs, tokens, strict=True):
            got = [told.logprob, *(top.logprob for top in told.top)]
            want = [token.logprob, *(top.logprob for top in token.top_logprobs)]
            assert len(got) == len(want) == 1 + request.options["logprobs"]
            assert all(w is not None and abs(g - w) < _LOGPROB_TOLERANCE for g, w in zip(got, want, strict=True)), request

    def _right(self, request: RandomRequest, index: int) -> RightAnswer:
        params = self._params(request, index)
        (tokens,) = generate(self._engine, [self._engine_request(request, params, ())])
        reader = Prompt(request.token_ids, self.tokenizer).answer(params)
        text, num_read = "", 0
        for token in tokens:
            reason = inference_pb2.FINISH_REASON_UNSPECIFIED if token.finish_reason is None else _FINISH[token.finish_reason]
            response = reader.response([prefill_pb2.Token(token_id=token.token_id, position=token.position, finish_reason=reason)])
            text += "" if response is None else response.piece.text
            num_read += 1
            if reader.finish is not None:
                break
        assert reader.finish is not None
        ended = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}[reader.finish.reason]
        return RightAnswer(tokens[:num_read], text, ended, reader.finish.stop_reason)

    def _margin(self, request: RandomRequest, index: int, before: Sequence[int]) -> float:
        """Returns how far the token after these is from being another one."""
        found, launch = list[float](), self._runner.launch

        def measured(batch: Batch) -> InFlight:
            if not found:
                found.append(sampling_margin(self._runner.forward(batch)[0], batch.sampling[0], batch.masks))
            return launch(batch)

        runner: object = self._runner
        runner.launch = measured  # type: ignore[attr-defined]
        try:
            generate(self._engine, [self._engine_request(request, self._params(request, index), before)])
        finally:
            del runner.launch  # type: ignore[attr-defined]
        return found[0]

    def _engine_request(self, request: RandomRequest, params: SamplingParams, before: Sequence[int]) -> EngineRequest:
        self._num_asked += 1
        grammar = None
        if params.grammar is not None:
            grammar = self._grammars.compile(params.grammar).after(before)
        return EngineRequest(
            seq_id=f"right-{self._num_asked}",
            token_ids=[*request.token_ids, *before],
            num_prompt_tokens=len(request.token_ids),
            sampling=params,
            eos_token_ids=self._eos,
            grammar=grammar,
        )

    def _params(self, request: RandomRequest, index: int) -> SamplingParams:
        options = dict(request.options)
        grammars = [
            Grammar(kind, str(options[kind.value]))
            for kind in (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK)
            if kind.value in options
        ]
        for name in _NOT_OF_THE_ENGINE:
            options.pop(name, None)
        options |= {"seed": choice_seed(request.options["seed"], index), "speculate": False}
        options |= {"logit_bias": tuple(sorted(request.options.get("logit_bias", {}).items()))}
        options |= {name: tuple(options.get(name, ())) for name in ("stop", "stop_token_ids")}  # type: ignore[arg-type]
        return SamplingParams(**options, grammar=grammars[0] if grammars else None)  # type: ignore[arg-type]
