"""Tokens to text: however they are cut into batches, the answer is the same."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_fakes import ANSWER_TEXT

from router.request.answer import AnswerReader
from twostep.rpc.v1 import inference_pb2, prefill_pb2
from twostep.sampling_params import SamplingParams
from twostep.text.chat_format import REASONING_FORMATS
from twostep.text.reasoning import ReasoningSplitter
from twostep.text.tokenizer import Tokenizer


def read(answer: AnswerReader, tokens: list[prefill_pb2.Token], sizes: list[int]) -> tuple[str, str]:
    """Reasoning and text of tokens that come in batches of these sizes, and then all at once."""
    reasoning, text, at = "", "", 0
    for size in [*sizes, len(tokens)]:
        response = answer.response(tokens[at : at + size])
        at += size
        if response is not None:
            assert not (text and response.piece.reasoning)
            assert response.piece.position + len(response.piece.token_ids) == answer.num_tokens
            reasoning += response.piece.reasoning
            text += response.piece.text
    return reasoning, text


def end(answer: AnswerReader) -> tuple[object, ...]:
    return answer.num_tokens, answer.num_reasoning_tokens, answer.finish, answer.stopped_by_text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_stop_strings_wait_for_min_tokens(bare_model_dir: Path, data: st.DataObject) -> None:
    """The text of the first `min_tokens` tokens is not searched, though what ends the answer may begin in it: whole, and in any batches."""
    tokenizer = Tokenizer.load(bare_model_dir)
    ids = tokenizer.encode("one, two, three, four, five, six")
    tokens = [prefill_pb2.Token(token_id=i, position=n) for n, i in enumerate(ids)]
    tokens[-1].finish_reason = inference_pb2.FINISH_REASON_LENGTH
    min_tokens = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.sampled_from([",", ", t", "e", "o", "x"]))
    text, searched_from = tokenizer.decode(ids), len(tokenizer.decode(ids[:min_tokens]))
    at = next((at for at in range(searched_from + 1, len(text) + 1) if text[:at].endswith(stop)), None)
    expected = text if at is None else text[: at - len(stop)]
    sampling = SamplingParams(max_tokens=500, stop=(stop,), min_tokens=min_tokens)

    sizes = data.draw(st.lists(st.integers(0, 9), max_size=len(tokens)))
    for way in ([], [1] * len(tokens), sizes):
        answer = AnswerReader(tokenizer, sampling)
        assert read(answer, tokens, way)[1] == expected
        assert answer.stopped_by_text == (at is not None)
        assert answer.num_tokens >= min_tokens


def test_a_stop_string_completed_by_text_held_back_still_stops(bare_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(bare_model_dir)
    # Half a character at the very end becomes U+FFFD only when the answer is over.
    ids = tokenizer.encode("ab🙂")[:-1]
    tokens = [prefill_pb2.Token(token_id=i, position=n) for n, i in enumerate(ids)]
    tokens[-1].finish_reason = inference_pb2.FINISH_REASON_LENGTH
    answer = AnswerReader(tokenizer, SamplingParams(max_tokens=50, stop=("b\ufffd",)))
    response = answer.response(tokens)
    assert response is not None
    assert response.piece.text == "a"
    assert answer.finish is not None
    assert (answer.finish.reason, answer.finish.stop_reason) == (inference_pb2.FINISH_REASON_STOP, "b\ufffd")


def test_nothing_is_sent_for_nothing(bare_model_dir: Path) -> None:
    answer = AnswerReader(Tokenizer.load(bare_model_dir), SamplingParams(max_tokens=5))
    assert answer.response([]) is None
    assert answer.finish is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_reasoning_does_not_depend_on_batches_nor_on_a_break(bare_model_dir: Path, data: st.DataObject) -> None:
    """Text, reasoning and what is counted of it: in one batch, token by token, in any batches, and resumed after any token."""
    tokenizer = Tokenizer.load(bare_model_dir)
    thought, said = " is it größer 🙂? ", "Paris </think> it is 🙂."
    begun = data.draw(st.sampled_from([True, False, None]))
    if begun is None:  # a model that marks no reasoning
        thought, text = "", ANSWER_TEXT * 2
        said = text
    else:
        text = ("" if begun else data.draw(st.sampled_from(["<think>", "\n<think>\n"]))) + thought
        text += data.draw(st.sampled_from(["</think>\n\n" + said, "\n</think>" + said, "</think>", ""]))
    finish = data.draw(st.sampled_from([inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH]))
    start = data.draw(st.integers(0, len(text) - 2))
    stops = data.draw(st.sampled_from([(), (text[start : start + 4],), ("nothing like it",)]))
    tokens = [prefill_pb2.Token(token_id=i, position=n) for n, i in enumerate(tokenizer.encode(text))]
    if finish == inference_pb2.FINISH_REASON_STOP:
        tokens.append(prefill_pb2.Token(token_id=2, position=len(tokens)))
    tokens[-1].finish_reason = finish

    def new() -> AnswerReader:
        splitter = None if begun is None else ReasoningSplitter(REASONING_FORMATS["qwen3"], begun=begun)
        return AnswerReader(tokenizer, SamplingParams(max_tokens=500, stop=stops), splitter)

    whole = new()
    expected = read(whole, tokens, [])
    for sizes in ([1] * len(tokens), data.draw(st.lists(st.integers(0, 9), max_size=len(tokens)))):
        other = new()
        assert (read(other, tokens, sizes), end(other)) == (expected, end(whole))
    cut = data.draw(st.integers(0, whole.num_tokens))
    first, second = new(), new()
    before = read(first, tokens[:cut], [1] * cut)
    second.resume(tokens[:cut])
    after = read(second, tokens[cut:], [1] * len(tokens))
    assert ((before[0] + after[0], before[1] + after[1]), end(second)) == (expected, end(whole))
    if not whole.stopped_by_text:
        assert expected[0] == thought
        if "</think>" in text:
            closed = next(n for n in range(len(tokens) + 1) if "</think>" in tokenizer.decode([t.token_id for t in tokens[:n]]))
            assert whole.num_reasoning_tokens == closed
        assert expected[1] in (said, "")
    elif begun is None:
        assert expected[1] == said[: said.index(stops[0])]
