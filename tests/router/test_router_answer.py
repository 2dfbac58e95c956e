"""Tokens to text: however they are cut into batches, the answer is the same."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_fakes import ANSWER_TEXT

from router.answer import Answer
from twostep.rpc.v1 import inference_pb2, prefill_pb2
from twostep.sampling_params import SamplingParams
from twostep.text.tokenizer import Tokenizer


def tokens_of(tokenizer: Tokenizer, finish: inference_pb2.FinishReason.ValueType) -> list[prefill_pb2.Token]:
    tokens = [prefill_pb2.Token(token_id=i, position=n) for n, i in enumerate(tokenizer.encode(ANSWER_TEXT * 2))]
    tokens[-1].finish_reason = finish
    return tokens


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_answer_does_not_depend_on_how_tokens_are_batched(bare_model_dir: Path, data: st.DataObject) -> None:
    tokenizer = Tokenizer.load(bare_model_dir)
    finish = data.draw(st.sampled_from([inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH]))
    text = ANSWER_TEXT * 2
    start = data.draw(st.integers(0, len(text) - 2))
    stops = data.draw(st.sampled_from([(), (text[start : start + 6],), ("nothing like it", "😀")]))
    tokens = tokens_of(tokenizer, finish)
    sampling = SamplingParams(max_tokens=500, stop=stops)

    def run(sizes: list[int]) -> tuple[str, list[int], object, bool]:
        answer = Answer(tokenizer, sampling)
        said, ids, at = "", [], 0
        for size in sizes:
            response = answer.response(tokens[at : at + size])
            at += size
            if response is not None:
                piece = response.piece
                assert piece.position == len(ids)
                said += piece.text
                ids += piece.token_ids
            if answer.finish is not None:
                break
        assert answer.num_tokens == len(ids)
        return said, ids, answer.finish, answer.stopped_by_text

    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(tokens), max_size=len(tokens)).map(lambda s: [*s, len(tokens)]))
    whole = run([len(tokens)])
    assert run(sizes) == run([1] * len(tokens)) == whole
    said, ids, _, by_text = whole
    complete = tokenizer.decode([t.token_id for t in tokens][: len(tokens) - (finish == inference_pb2.FINISH_REASON_STOP)])
    if by_text:
        assert said == complete[: min(complete.index(s) for s in stops if s in complete)]
    else:
        assert (said, len(ids)) == (complete, len(tokens))


def test_a_stop_string_completed_by_text_held_back_still_stops(bare_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(bare_model_dir)
    # Half a character at the very end becomes U+FFFD only when the answer is over.
    ids = tokenizer.encode("ab🙂")[:-1]
    tokens = [prefill_pb2.Token(token_id=i, position=n) for n, i in enumerate(ids)]
    tokens[-1].finish_reason = inference_pb2.FINISH_REASON_LENGTH
    answer = Answer(tokenizer, SamplingParams(max_tokens=50, stop=("b\ufffd",)))
    response = answer.response(tokens)
    assert response is not None
    assert response.piece.text == "a"
    assert answer.finish is not None
    assert (answer.finish.reason, answer.finish.stop_reason) == (inference_pb2.FINISH_REASON_STOP, "b\ufffd")


def test_nothing_is_sent_for_nothing(bare_model_dir: Path) -> None:
    answer = Answer(Tokenizer.load(bare_model_dir), SamplingParams(max_tokens=5))
    assert answer.response([]) is None
    assert answer.finish is None
