"""`text_offset`: where a completion's tokens begin in its text, for every kind of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import KINDS, save_kind

from router.http.text_places import TextPlaces
from twostep.text.detokenizer import Detokenizer
from twostep.text.tokenizer import TokenBytes, Tokenizer

words = st.sampled_from(["The", "quick", "fox", "größte", "日本語", "naïve", "!=", ".", "it's", "🙂", "42", "<tool>", "\n", ""])
texts = st.lists(words, min_size=1, max_size=12).map(" ".join).filter(str.strip)


@pytest.fixture(scope="module", params=sorted(KINDS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_kind(tmp_path_factory.mktemp("kinds") / request.param, request.param))


def check(tokenizer: Tokenizer, text: str, ids: list[int], places: list[int]) -> None:
    """Each token with a text of its own is found at its place; a space that the decoder may drop is not missed."""
    assert places == sorted(places)
    assert all(0 <= place <= len(text) for place in places)
    token_bytes = TokenBytes(tokenizer)
    for token_id, place in zip(ids, places, strict=True):
        raw, name = token_bytes.of(token_id), token_bytes.text(token_id)
        if token_id in tokenizer.special_ids or "\ufffd" in text[place : place + 1]:
            continue
        if name.encode() == raw:
            # Without a decoder the answer has "##", which no prompt has.
            assert "##" in name or text.startswith((name, name.removeprefix(" ")), place), (name, text[place:])
        else:
            # A part of a character is found in the character at its place, and what follows.
            assert 0 <= text[place:].encode().find(raw) < len(text[place : place + 1].encode()), (name, text[place:])


def test_tokens_are_where_their_text_is(tokenizer: Tokenizer) -> None:
    @settings(max_examples=60)
    @given(prompt=texts, answer=texts, echo=st.booleans(), bos=st.booleans())
    def run(prompt: str, answer: str, echo: bool, bos: bool) -> None:
        before = [1] * bos + tokenizer.encode(prompt, add_special_tokens=False)
        ids = tokenizer.encode(answer, add_special_tokens=False)
        stream = Detokenizer(tokenizer, before)
        text = prompt * echo + stream.push(ids) + stream.finish()
        places = TextPlaces(tokenizer, Detokenizer(tokenizer, before), echo=prompt * echo)
        found = [*map(places.in_echo, before * echo), *map(places.in_answer, ids)]
        check(tokenizer, text, before * echo + ids, found)

    run()


def test_any_tokens_have_places_in_order(tokenizer: Tokenizer) -> None:
    """Characters that are never completed, special tokens, ids outside the vocabulary."""
    any_id = st.integers(0, tokenizer.vocab_size)

    @settings(max_examples=60)
    @given(prompt=st.lists(any_id, max_size=8), ids=st.lists(any_id, max_size=20))
    def run(prompt: list[int], ids: list[int]) -> None:
        echo, stream = tokenizer.decode(prompt), Detokenizer(tokenizer, prompt)
        text = echo + stream.push(ids) + stream.finish()
        places = TextPlaces(tokenizer, Detokenizer(tokenizer, prompt), echo=echo)
        found = [*map(places.in_echo, prompt), *map(places.in_answer, ids)]
        assert found == sorted(found)
        assert all(0 <= place <= len(text) for place in found)
        assert all(place >= len(echo) for place in found[len(prompt) :])
        # Behind what never became a character, a token with a text of its own is found again.
        token_bytes = TokenBytes(tokenizer)
        for token_id, place in zip(ids, found[len(prompt) :], strict=True):
            name = token_bytes.text(token_id)
            if tokenizer.joins_bytes and name.isascii() and not name.startswith("bytes:") and token_id not in tokenizer.special_ids:
                assert text.startswith(name, place)

    run()
