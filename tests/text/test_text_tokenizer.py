"""Tokenizer: what transformers gives, from any thread, and clear errors."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from twostep.errors import InvalidRequest, SetupError
from twostep.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_llama_dir)


def test_least_tokens_never_exceeds_what_a_text_has(tokenizer: Tokenizer) -> None:
    @settings(max_examples=100)
    @given(st.text(max_size=400))
    def check(text: str) -> None:
        assert tokenizer.least_tokens(len(text)) <= len(tokenizer.encode(text, add_special_tokens=False))

    check()
    assert tokenizer.least_tokens(1_000_000) > 10_000


def test_round_trip(tokenizer: Tokenizer) -> None:
    @settings(max_examples=200)
    @given(st.text())
    def check(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text

    check()


def test_special_tokens_in_text_become_ids_and_are_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_lone_surrogates_are_bad_input(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="character 2"):
        tokenizer.encode("ab\ud800")


def test_many_threads(tokenizer: Tokenizer) -> None:
    texts = [f"thread {i} says größer {i * i}" for i in range(200)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
        assert list(pool.map(tokenizer.decode, expected)) == texts


def test_truncation_and_padding_of_the_file_are_ignored(tiny_llama_dir: Path, tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(tiny_llama_dir / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = "a text of more than four tokens"
    assert Tokenizer.load(tmp_path).encode(text) == Tokenizer.load(tiny_llama_dir).encode(text)


@pytest.mark.parametrize("content", [None, "", "[1]", '{"model": {"type": "Magic"}}'])
def test_broken_files(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SetupError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_the_real_vocabulary(smollm2_dir: Path, tmp_path: Path) -> None:
    shutil.copy(smollm2_dir / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == 49152
    # Digits are cut off one by one before spaces are joined to what follows.
    assert tokenizer.encode("   1") == [333, 33]
    for text in ("What is 2+2?", "größer 🙂 日本語\n\tx = 1234567890", "  leading and trailing  "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_texts_are_encoded_while_others_run(tiny_llama_dir: Path) -> None:
    """In a thread beside: counts what this one did meanwhile."""
    tokenizer = Tokenizer.load(tiny_llama_dir)
    begun, over = threading.Event(), threading.Event()
    turns = 0

    def encode() -> None:
        begun.set()
        tokenizer.encode("hello world " * 50_000)
        over.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    while not over.is_set():
        turns += 1
    thread.join()
    # With the interpreter's lock it is a few milliseconds' worth: those before the encoding began.
    assert turns > 300_000


def test_long_and_short_texts_are_read_alike(tiny_llama_dir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_llama_dir)
    for text in ("größer 🙂 <|im_end|> x" * 300, "a" * 9000, " " * 9000, "<|im_start|>" * 600):
        assert tokenizer.encode(text) == tokenizer._inner.encode(text).ids
        assert not tokenizer.is_beyond(text, 100_000)


def test_what_is_certainly_too_long(tiny_llama_dir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_llama_dir)
    for text in ("a" * 100_000, "a word " * 30_000, " " * 300_000):
        num_tokens = len(tokenizer.encode(text))
        assert not tokenizer.is_beyond(text, num_tokens)
        assert tokenizer.is_beyond(text, num_tokens // 100)


def test_the_first_tokens_of_a_text(tiny_llama_dir: Path) -> None:
    """With what the tokenizer puts around a text, of which none is cut off."""
    inner = tokenizers.Tokenizer.from_file(str(tiny_llama_dir / "tokenizer.json"))
    inner.post_processor = TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)])
    tokenizer = Tokenizer(inner)

    @settings(max_examples=100)
    @given(st.text(max_size=60), st.integers(1, 40), st.booleans())
    def check(text: str, count: int, add: bool) -> None:
        whole = tokenizer.encode(text, add)
        found = tokenizer.encode_first(text, count, add)
        if len(whole) <= count:
            assert found == whole
        else:
            first = (whole[1:-1] if add else whole)[: max(0, count - 2 * add)]
            assert found == ([1, *first, 2] if add else first)

    check()


def test_of_a_long_text_only_the_beginning_is_looked_at(tiny_llama_dir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_llama_dir)
    text = "the capital of France " * 40_000
    assert tokenizer.encode_first(text, 100) == tokenizer.encode(text[:10_000])[:100]
    # Few tokens of many characters: as much is looked at as it takes.
    spaces = tokenizer.encode("a" + " " * 200_000 + "b")
    assert tokenizer.encode_first("a" + " " * 200_000 + "b", len(spaces)) == spaces
