"""The detokenizer: pieces add up to the whole, come early, and cost the same for each token."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from twostep.text.detokenizer import Detokenizer
from twostep.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level(tiny_llama_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_llama_dir)


@pytest.fixture(scope="module")
def straddling() -> Tokenizer:
    """A byte-level vocabulary whose tokens begin and end within characters: each pair of bytes of the euro sign and the letter."""
    alphabet = {bytes([b]): c for b, c in _byte_alphabet().items()}
    single = [alphabet[bytes([b])] for b in b"\xe2\x82\xac\xf0\x9f\x98\x80\xff a"]
    vocab = {token: i for i, token in enumerate(single + [a + b for a in single for b in single])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As SentencePiece vocabularies are: a leading space that is stripped, and bytes for what has no token."""
    pieces = ["<s>", "▁", "▁the", "▁a", "b", "é", "日"] + [f"<0x{b:02X}>" for b in range(256)]
    inner = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    inner.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(inner)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def pieces_of(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """The pieces of a stream cut into `sizes`, then into single tokens, and what finish adds."""
    detokenizer, pieces, i = Detokenizer(tokenizer), [], 0
    for size in sizes:
        pieces.append(detokenizer.push(ids[i : i + size]))
        i += size
    pieces += [detokenizer.push([token]) for token in ids[i:]]
    return [*pieces, detokenizer.finish()]


sizes = st.lists(st.integers(0, 5), max_size=30)


def test_any_ids_in_any_cut(byte_level: Tokenizer) -> None:
    @settings(max_examples=100)
    @given(st.lists(st.one_of(st.integers(0, 511), st.integers(3, 258), st.just(100_000)), max_size=120), sizes)
    def check(ids: list[int], sizes: list[int]) -> None:
        assert "".join(pieces_of(byte_level, ids, sizes)) == byte_level.decode(ids)

    check()


def test_tokens_that_straddle_characters(straddling: Tokenizer) -> None:
    @settings(max_examples=200)
    @given(st.lists(st.integers(0, straddling.vocab_size - 1), max_size=120), sizes)
    def check(ids: list[int], sizes: list[int]) -> None:
        assert "".join(pieces_of(straddling, ids, sizes)) == straddling.decode(ids)

    check()


def test_byte_fallback(byte_fallback: Tokenizer) -> None:
    """Any valid text, written with its tokens or in bytes, in any cut. (A space has a token, and never comes as a byte.)"""

    @settings(max_examples=100)
    @given(
        st.lists(
            st.one_of(
                st.sampled_from(["<s>", "▁", "▁the", "▁a", "b", "é", "日"]), st.characters(codec="utf-8", exclude_characters=" \ufffd")
            ),
            max_size=40,
        ),
        sizes,
    )
    def check(parts: list[str], sizes: list[int]) -> None:
        ids: list[int] = []
        for part in parts:
            known = byte_fallback.token_id(part)
            ids += (
                [byte for b in part.encode() if (byte := byte_fallback.token_id(f"<0x{b:02X}>")) is not None] if known is None else [known]
            )
        assert "".join(pieces_of(byte_fallback, ids, sizes)) == byte_fallback.decode(ids)

    check()


def test_an_invalid_byte_does_not_undo_what_was_sent(byte_fallback: Tokenizer) -> None:
    euro_and_junk = [byte_fallback.token_id(f"<0x{b:02X}>") or 0 for b in "€".encode() + b"\xff"]
    assert pieces_of(byte_fallback, euro_and_junk, []) == ["", "", "€", "", "\ufffd"]


def test_text_comes_as_soon_as_it_is_whole(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a𐍈b")
    assert len(ids) == 6
    assert pieces_of(byte_level, ids, []) == ["a", "", "", "", "𐍈", "b", ""]


def test_special_tokens_that_are_shown(byte_level: Tokenizer) -> None:
    """Some, all or none of them, anywhere, also within a character; the others are skipped."""

    @settings(max_examples=100)
    @given(
        st.sets(st.sampled_from(sorted(byte_level.special_ids))),
        st.lists(
            st.one_of(st.integers(0, 2), st.integers(0, 511), st.sampled_from(byte_level.encode("𐍈é")), st.just(100_000)), max_size=80
        ),
        sizes,
    )
    def check(shown: set[int], ids: list[int], sizes: list[int]) -> None:
        tokenizer = byte_level.showing(shown)
        expected = byte_level.decode([i for i in ids if i in shown or i not in byte_level.special_ids], skip_special_tokens=False)
        assert "".join(pieces_of(tokenizer, ids, sizes)) == tokenizer.decode(ids) == expected

    check()


def test_a_marker_comes_at_once_and_breaks_a_character(byte_level: Tokenizer) -> None:
    letter, marker = byte_level.encode("𐍈"), 1
    text = byte_level.showing({marker}).decode([marker])
    assert text
    ids = [*byte_level.encode("a"), marker, *letter[:2], marker]
    assert pieces_of(byte_level.showing({marker}), ids, []) == ["a", text, "", "", f"\ufffd{text}", ""]
    assert byte_level.decode([marker]) == "", "the view alone shows it"


class Counting(Tokenizer):
    """Counts the tokens it decodes."""

    decoded = 0

    def decode(self, token_ids: object, skip_special_tokens: bool = True) -> str:
        ids = list(token_ids)  # type: ignore[call-overload]
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize(
    "text", ["the answer is in the question. " * 200, "🙂" * 1500, "日本語" * 500, "𐍈" * 500], ids=["words", "straddling", "kanji", "bytes"]
)
def test_constant_work_for_each_token(tiny_llama_dir: Path, text: str) -> None:
    tokenizer = Counting.load(tiny_llama_dir)
    assert isinstance(tokenizer, Counting)
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    for i in ids:
        detokenizer.push([i])
    assert tokenizer.decoded < 40 * len(ids)


def test_junk_neither_waits_for_ever_nor_costs_more(tiny_llama_dir: Path) -> None:
    tokenizer = Counting.load(tiny_llama_dir)
    assert isinstance(tokenizer, Counting)
    junk = tokenizer.token_id("ÿ")  # the byte 0xff
    assert junk is not None
    detokenizer = Detokenizer(tokenizer)
    sent = sum(len(detokenizer.push([junk])) for _ in range(3000))
    assert 3000 - sent <= 3
    assert tokenizer.decoded < 60 * 3000
