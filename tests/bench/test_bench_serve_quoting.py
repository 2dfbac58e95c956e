"""Chats that quote: frames found in ids, passages of the text and of their length, the same for the same seed."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from twostep.errors import InvalidRequest
from twostep.lab.bench.serve import lengths
from twostep.lab.bench.serve.quoting import ASKED, BEGUN, Quotations, questions
from twostep.lab.bench.serve.workloads import BenchSession, PromptContent, QuotingPrompts

TEXT = """On quays

Nobody came
to the fair. The bread was eaten by the geese! Was it
dry?

It was. It rained on the third day, and the tents were taken down."""
SENTENCES = ("On quays", "Nobody", "The bread", "Was it dry?", "It was.", "It rained")
CONTEXT = 1024


def read(said: str) -> list[int]:
    """A chat template and a tokenizer of characters."""
    return [*b"<user>", *said.encode(), *b"<end><assistant>"]


def quotations(text: str = TEXT, context: int = CONTEXT) -> Quotations:
    return Quotations.of({said: read(said) for said in questions(text, context)}, context)


def some(count: int, seed: str = "a", *, workload: QuotingPrompts | None = None, of: Quotations | None = None) -> list[BenchSession]:
    workload = workload or QuotingPrompts(passage=lengths.Normal(40, 0.3))
    return list(islice(workload.sessions(PromptContent(seed, range(9), of or quotations()), random.Random("lengths")), count))


def text_of(session: BenchSession) -> str:
    return bytes(list(session.turns[0].prompt)).decode()


def passage_of(session: BenchSession) -> str:
    """Returns what is asked for; the answer has begun with it."""
    chat, _, begun = text_of(session).partition("<end><assistant>")
    passage = chat.partition("\n\n")[2]
    assert begun == passage[:BEGUN]
    return passage


def test_a_question_its_passage_and_the_chat_around_them() -> None:
    found = quotations()
    assert [bytes(frame.before).decode() for frame in found.frames] == [f"<user>{asked}\n\n" for asked in ASKED]
    assert {bytes(frame.after) for frame in found.frames} == {b"<end><assistant>"}
    assert sorted(bytes(p).decode().split("\n\n")[0][:6] for p in found.passages) == sorted(s[:6] for s in SENTENCES)
    assert "geese! Was it dry?\n\nIt was." in bytes(found.passages[0]).decode(), "lines are joined, paragraphs are not"
    last = bytes(found.passages[-1]).decode()
    assert "taken down.\n\nOn quays\n\nNobody came to the fair." in last, "the text goes on at its beginning"


def test_every_second_chat_asks_for_the_passage_as_it_is_and_none_comes_twice_before_all_have() -> None:
    chats = [text_of(session) for session in some(2 * len(SENTENCES))]
    assert all(chat.startswith(f"<user>{ASKED[0]}") == (i % 2 == 0) for i, chat in enumerate(chats))
    for half in (chats[: len(SENTENCES)], chats[len(SENTENCES) :]):
        assert len({chat.partition("\n\n")[2][:6] for chat in half}) == len(SENTENCES)


def test_a_seed_repeats_the_chats_and_another_asks_of_other_passages_of_the_same_lengths() -> None:
    first, again, other = some(40), some(40), some(40, "b")
    assert first == again
    assert first != other
    passages = [[passage_of(session) for session in run] for run in (first, other)]
    assert [len(p) for p in passages[0]] == [len(p) for p in passages[1]]
    assert [len(p) - BEGUN for p in passages[0]] == [session.turns[0].output_tokens for session in first]
    assert 30 < sum(map(len, passages[0])) / 40 < 50


def test_answers_have_a_length_of_their_own_where_one_is_given() -> None:
    sessions = some(9, workload=QuotingPrompts(passage=lengths.Normal(40, 0.0), output=lengths.Fixed(7)))
    assert {session.turns[0].output_tokens for session in sessions} == {7}
    assert {len(passage_of(session)) for session in sessions} == {40}


def test_a_chat_and_its_answer_fit_into_the_context_uncut() -> None:
    found = quotations(TEXT * 9, 700)
    whole = some(20, workload=QuotingPrompts(passage=lengths.Normal(found.longest, 0.0)), of=found)
    assert [session.fitted(700) for session in whole] == whole
    assert max(len(session.turns[0].prompt) for session in whole) <= 350


def test_a_long_text_gives_64_passages() -> None:
    assert len(set(questions("Some words. " * 5000, CONTEXT))) < len(questions("Some words. " * 5000, CONTEXT)) == 2 * len(ASKED) + 64


@pytest.mark.parametrize("text", ["", " \n", "One sentence."])
def test_a_text_without_two_sentences_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        questions(text, CONTEXT)


def test_passages_longer_than_the_text_or_half_of_the_context_are_refused() -> None:
    for found in (quotations(), quotations(TEXT * 9, 700)):
        with pytest.raises(InvalidRequest):
            some(1, workload=QuotingPrompts(passage=lengths.Normal(found.longest, 0.01)), of=found)
