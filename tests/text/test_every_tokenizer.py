"""With every kind of tokenizer, a stream's text is what transformers makes of prompt and answer together."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import KINDS, save_kind
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from twostep.engine.batch import WORD
from twostep.engine.grammar import LiveGrammar, Vocabulary
from twostep.errors import InvalidRequest, SetupError
from twostep.sampling_params import Grammar, GrammarKind
from twostep.text.detokenizer import Detokenizer
from twostep.text.grammar import grammar_tokenizer
from twostep.text.tokenizer import TokenBytes, Tokenizer

BOS, EOS = 1, 2
NUM_TEXTS = 250
GRAMMARS = ("sentencepiece_bpe", "unigram", "byte_level", "fused")


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kind(tmp_path_factory.mktemp("kinds") / request.param, request.param)


def load_theirs(model_dir: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(model_dir)


def random_text(draw: random.Random) -> str:
    words = ["", "\n", "The", "quick", "brown", "fox", "größte", "日本語", "naïve", "!=", ".", "it's", "🙂", "42", "и", "<tool>", "</s>"]
    return " ".join(draw.choice(words) for _ in range(draw.randrange(1, 30)))


def streamed(tokenizer: Tokenizer, prompt: list[int], answer: list[int], draw: random.Random) -> str:
    detokenizer, text, start = Detokenizer(tokenizer, prompt), "", 0
    while start < len(answer):
        size = draw.randrange(1, 5)
        text += detokenizer.push(answer[start : start + size])
        start += size
    return text + detokenizer.finish()


def check_streams(model_dir: Path, seed: int) -> None:
    ours, theirs, draw = Tokenizer.load(model_dir), load_theirs(model_dir), random.Random(seed)
    compared = 0
    for _ in range(NUM_TEXTS):
        text = random_text(draw)
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        cut = draw.randrange(len(ids) + 1)
        prompt, answer = [BOS] * draw.randrange(3) + ids[:cut], ids[cut:]
        before, whole = (theirs.decode(part, skip_special_tokens=True) for part in (prompt, prompt + answer))
        if not whole.startswith(before):
            # Cut within a character: nobody can say which part of it is the answer's.
            assert before.endswith("\ufffd")
            continue
        assert streamed(ours, prompt, answer, draw) == whole[len(before) :], (prompt, answer)
        compared += 1
    assert compared > NUM_TEXTS / 2


def test_streams_are_what_transformers_decodes(kind_dir: Path) -> None:
    check_streams(kind_dir, seed=1)


def test_streams_of_the_real_vocabulary(smollm2_dir: Path) -> None:
    check_streams(smollm2_dir, seed=2)


def test_a_space_that_begins_an_answer_stays(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_kind(tmp_path, "sentencepiece_bpe"))
    prompt, answer = tokenizer.encode("The quick"), tokenizer.encode("brown fox")
    assert tokenizer.decode(answer) == "brown fox"
    assert Detokenizer(tokenizer, [BOS, *prompt]).push(answer) == " brown fox"
    assert Detokenizer(tokenizer, [BOS]).push(answer) == "brown fox", "as transformers has it where nothing comes before"


def test_what_tokens_are_called_adds_up_to_the_text(kind_dir: Path) -> None:
    tokenizer, draw = Tokenizer.load(kind_dir), random.Random(3)
    if tokenizer.anchor is None:
        pytest.skip("what its tokens add depends on their neighbours")
    names = TokenBytes(tokenizer)
    for _ in range(100):
        prompt, answer = tokenizer.encode("the fox"), tokenizer.encode(random_text(draw))
        text = Detokenizer(tokenizer, prompt).push(answer)
        assert b"".join(names.of(i) for i in answer if i not in tokenizer.special_ids).decode() == text


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(GRAMMARS)))
def test_tokenizers_that_know_no_grammars_say_so(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        grammar_tokenizer(save_kind(tmp_path, kind))


@pytest.mark.parametrize("kind", GRAMMARS)
def test_answers_match_their_grammar(kind: str, tmp_path: Path) -> None:
    model_dir = save_kind(tmp_path, kind)
    tokenizer = Tokenizer.load(model_dir)
    vocabulary = Vocabulary(model_dir, vocab_size=tokenizer.vocab_size + 40, eos_token_ids=frozenset({EOS}))
    draw = random.Random(4)
    prompt = tokenizer.encode("The quick brown")
    for regex in (" fox", "fox", "[a-c ]{1,12}", r" ?(one|two|three)( (one|two|three)){0,4}\.", r'\{"age": [0-9]{1,3}\}'):
        state = vocabulary.state(Grammar(GrammarKind.REGEX, regex))
        for _ in range(20):
            live, step, tokens = LiveGrammar(state), state.allowed, list[int]()
            while True:
                allowed = [i for i in range(tokenizer.vocab_size + 40) if step.bits[i // WORD] >> (i % WORD) & 1]
                if step.complete and (not allowed or draw.random() < 0.3):
                    break
                assert allowed, (regex, tokens)
                tokens.append(draw.choice(allowed))
                step = live.advance([tokens[-1]])
            detokenizer = Detokenizer(tokenizer, prompt)
            text = detokenizer.push(tokens) + detokenizer.finish()
            assert re.fullmatch(regex, text), (regex, text, tokens)


# ---- what tokenizer_config.json says ------------------------------------------------------------------------------------

flags = st.fixed_dictionaries({}, optional={name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized", "special")})
contents = ["<s>", "<tool>", "<new>", "[INST]", "the", "</s>"]
added = st.dictionaries(st.sampled_from(contents), st.tuples(flags, st.integers(0, 700)), max_size=4).map(
    lambda chosen: {str(number): {"content": content, **flags} for content, (flags, number) in chosen.items()}
)
roles = st.fixed_dictionaries(
    {},
    optional={
        "bos_token": st.sampled_from(["<s>", "<new>", {"__type": "AddedToken", "content": "<s>", "lstrip": True}]),
        "eos_token": st.sampled_from(["</s>", "<other>"]),
        "pad_token": st.sampled_from(["<pad>", "</s>"]),
        "additional_special_tokens": st.lists(st.sampled_from(["<tool>", "<x>", "[INST]"]), max_size=2, unique=True),
        "added_tokens_decoder": added,
    },
)


@pytest.mark.parametrize("kind", ["sentencepiece_bpe", "byte_level"])
def test_the_configuration_beside_it_counts_as_for_transformers(kind: str, tmp_path: Path) -> None:
    model_dir = save_kind(tmp_path, kind)

    @settings(max_examples=60)
    @given(roles, st.integers(0, 2**32))
    def check(config: dict[str, Any], seed: int) -> None:
        (model_dir / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
        theirs, ours, draw = AutoTokenizer.from_pretrained(model_dir), Tokenizer.load(model_dir), random.Random(seed)
        assert ours.vocab_size == len(theirs)
        for _ in range(5):
            text = random_text(draw) + draw.choice(["", "<new> x", "a <x>[INST]the<pad>", "<s> y</s>"])
            ids = ours.encode(text)
            assert ids == theirs.encode(text)
            assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)

    check()


@pytest.mark.parametrize("says_itself", [False, True])
def test_beginning_and_end_that_only_the_configuration_asks_for(says_itself: bool, tmp_path: Path) -> None:
    """transformers 5 leaves them out wherever there is a tokenizer.json, transformers 4 does not; models were trained with them."""
    model_dir = save_kind(tmp_path, "sentencepiece_bpe")
    if says_itself:
        inner = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
        inner.save(str(model_dir / "tokenizer.json"))
    for config in itertools.product([None, True, False], repeat=2):
        given = {key: value for key, value in zip(("add_bos_token", "add_eos_token"), config, strict=True) if value is not None}
        (model_dir / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", **given}))
        theirs = load_theirs(model_dir)
        if not says_itself:
            theirs.add_bos_token, theirs.add_eos_token = bool(config[0]), bool(config[1])
        for text in ("The quick brown fox", "a</s> b"):
            assert Tokenizer.load(model_dir).encode(text) == theirs.encode(text), given


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": ["a"]},
        {"added_tokens_decoder": {"7": {"content": 5}}},
        {"added_tokens_decoder": {"7": {"content": "a", "special": "yes"}}},
        {"bos_token": 5},
        {"add_bos_token": "yes"},
        {"extra_special_tokens": "a"},
    ],
)
def test_a_configuration_that_cannot_be_is_named(config: dict[str, Any], tmp_path: Path) -> None:
    model_dir = save_kind(tmp_path, "byte_level")
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match=r"tokenizer_config\.json: "):
        Tokenizer.load(model_dir)
