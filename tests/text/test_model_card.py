"""ModelCard: limits, defaults, end tokens and chat template, wherever a directory keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import tokenizers.models

from twostep.errors import SetupError
from twostep.text.chat_format import ChatFormat
from twostep.text.chat_template import ChatTemplate
from twostep.text.model_card import GenerationDefaults, ModelCard
from twostep.text.tokenizer import Tokenizer
from twostep.text.tool_formats.json_calls import HERMES


def make(model_dir: Path, **files: Any) -> Path:
    """Writes NAME.json for each keyword, on top of the smallest config.json."""
    contents = {"config": {}} | files
    contents["config"] = {"max_position_embeddings": 128, "vocab_size": 10} | contents["config"]
    for name, content in contents.items():
        (model_dir / f"{name}.json").write_text(json.dumps(content))
    return model_dir


def test_as_transformers_saves_it(tiny_llama_dir: Path) -> None:
    card = ModelCard.load(tiny_llama_dir)
    assert (card.max_model_len, card.vocab_size, card.eos_token_ids) == (2048, 512, {0, 2})
    assert card.generation == GenerationDefaults(temperature=0.7, top_p=0.9)
    assert card.chat_template is not None
    assert "<|im_start|>" in card.chat_template
    assert (card.bos_token, card.eos_token) == ("", "<|im_end|>")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"decoder_start_token_id": 4, "pad_token_id": 2}, {"decoder_start_token_id": 5}, 5),
        ({"decoder_start_token_id": 4, "pad_token_id": 2}, {}, 4),
        ({"pad_token_id": 2}, {"decoder_start_token_id": 5}, 5),
        ({"pad_token_id": 2}, {}, 2),
        ({}, {}, 0),
    ],
)
def test_what_a_decoder_begins_with(config: dict[str, Any], generation: dict[str, Any], expected: int, tmp_path: Path) -> None:
    """Of a model whose encoder reads the prompt; others name one for other uses."""
    card = ModelCard.load(make(tmp_path, config={"model_type": "t5"} | config, generation_config=generation))
    assert card.decoder_start_token_id == expected
    assert ModelCard.load(make(tmp_path, config=config, generation_config=generation)).decoder_start_token_id is None


@pytest.mark.parametrize("start", [10, -1, [0], "0", True])
def test_what_no_decoder_begins_with(start: Any, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="decoder_start_token_id"):
        ModelCard.load(make(tmp_path, config={"model_type": "t5", "decoder_start_token_id": start}))
    named = make(tmp_path, config={"model_type": "t5"}, generation_config={"decoder_start_token_id": start})
    with pytest.raises(SetupError, match=r"generation_config\.json: decoder_start_token_id"):
        ModelCard.load(named)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": [2, 7]}, {2, 7}),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, {1, 2, 3}),
        ({"eos_token_id": None}, {}, set()),
    ],
)
def test_end_tokens(tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], expected: set[int]) -> None:
    assert ModelCard.load(make(tmp_path, config=config, generation_config=generation)).eos_token_ids == expected


def with_tokenizer(model_dir: Path, *special: str, **files: Any) -> Path:
    """`special`: the last ids of a vocabulary of 10."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(10 - len(special))}, unk_token="w0"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(model_dir / "tokenizer.json"))
    return make(model_dir, **files)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_every_source_of_an_end_token_counts(tmp_path: Path, file: str, eos: Any) -> None:
    """A fine-tune often changes the tokenizer's end alone, and keeps the config of its base model."""
    files = {"config": {"eos_token_id": 3}, "generation_config": {"eos_token_id": [3, 4]}, file: {"eos_token": eos}}
    card = ModelCard.load(with_tokenizer(tmp_path, "<pad>", "<|im_end|>", **files))
    assert (card.eos_token_ids, card.eos_token) == ({3, 4, 9}, "<|im_end|>")
    sources = {end.token_id: (end.text, len(end.sources)) for end in card.end_tokens}
    assert sources == {3: ("w3", 2), 4: ("w4", 1), 9: ("<|im_end|>", 1)}
    for word in ("9 <|im_end|>", "config.json", "generation_config.json", "tokenizer"):
        assert word in card.described_ends


def test_an_end_token_that_only_the_config_of_the_tokenizer_adds(tmp_path: Path) -> None:
    card = ModelCard.load(with_tokenizer(tmp_path, config={"vocab_size": 12}, tokenizer_config={"eos_token": "</s>"}))
    assert card.eos_token_ids == {Tokenizer.load(tmp_path).token_id("</s>")} == {10}


@pytest.mark.parametrize(
    ("template", "special", "expected"),
    [
        ("<|im_start|>{{ role }}\n{{ content }}<|im_end|>\n", ["<|im_start|>", "<|im_end|>"], {3, 9}),
        ("{{ content }}<|eot_id|>", ["<|eot_id|>", "<|eom_id|>"], {3, 8}),
        ("{{ content }}<end_of_turn>", ["<end_of_turn>"], {3, 9}),
        # The tokenizer has no such token: the model cannot have learned to write it as one.
        ("{{ content }}<|im_end|>", ["<pad>"], {3}),
        ("{{ content }}", ["<|im_end|>"], {3}),
        # A harmony message ends with <|end|>, and its answer goes on.
        ("<|channel|>final<|message|>{{ content }}<|end|>", ["<|end|>", "<|return|>", "<|call|>"], {3, 8, 9}),
    ],
)
def test_what_the_chat_template_ends_turns_with_ends_an_answer(
    tmp_path: Path, template: str, special: list[str], expected: set[int]
) -> None:
    """Base models are published with a chat template whose end of turn no file calls an end."""
    files = {"config": {"eos_token_id": 3}, "tokenizer_config": {"chat_template": template}}
    assert ModelCard.load(with_tokenizer(tmp_path, *special, **files)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, GenerationDefaults()),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05},
            GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05),
        ),
        ({"do_sample": True, "temperature": 0.6}, GenerationDefaults(temperature=0.6)),
        (
            {"do_sample": False, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1},
            GenerationDefaults(temperature=0.0, repetition_penalty=1.1),
        ),
        ({"temperature": None, "top_k": -1}, GenerationDefaults()),
    ],
)
def test_generation_defaults(tmp_path: Path, generation: dict[str, Any], expected: GenerationDefaults) -> None:
    assert ModelCard.load(make(tmp_path, generation_config=generation)).generation == expected


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"generation_config": {"temperature": -1}}, ["generation_config.json", "temperature"]),
        ({"generation_config": {"top_p": 0}}, ["generation_config.json", "top_p"]),
        ({"generation_config": {"top_k": "many"}}, ["generation_config.json", "top_k", "many"]),
        ({"generation_config": {"top_k": 1.5}}, ["top_k"]),
        ({"generation_config": {"eos_token_id": "</s>"}}, ["generation_config.json", "eos_token_id"]),
        ({"config": {"eos_token_id": [1, -1]}}, ["config.json", "eos_token_id"]),
        ({"config": {"vocab_size": None}}, ["config.json", "vocab_size"]),
        ({"config": {"max_position_embeddings": 0}}, ["max_position_embeddings"]),
        (
            {"tokenizer_config": {"chat_template": [{"name": "default", "template": "x"}, {"name": "tool_use", "template": 3}]}},
            ["tokenizer_config.json", "int"],
        ),
        ({"tokenizer_config": {"chat_template": 3}}, ["tokenizer_config.json", "chat_template"]),
        ({"tokenizer_config": {"chat_template": [{"name": "rag", "template": "x"}]}}, ["tokenizer_config.json", "default", "rag"]),
    ],
)
def test_refused_by_name(tmp_path: Path, files: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SetupError) as caught:
        ModelCard.load(make(tmp_path, **files))
    for word in words:
        assert word in caught.value.message


def test_template_places(tmp_path: Path) -> None:
    """Each place is looked at only if none before it has a template."""
    make(tmp_path)
    assert ModelCard.load(tmp_path).chat_template is None
    make(tmp_path, chat_template={"chat_template": "from chat_template.json"})
    assert ModelCard.load(tmp_path).chat_template == "from chat_template.json"
    named = [{"name": "rag", "template": "another"}, {"name": "default", "template": "from the list"}]
    make(tmp_path, tokenizer_config={"chat_template": named})
    assert ModelCard.load(tmp_path).chat_template == "from the list"
    make(tmp_path, tokenizer_config={"chat_template": "from the string"})
    assert ModelCard.load(tmp_path).chat_template == "from the string"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert ModelCard.load(tmp_path).chat_template == "from the file"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(SetupError, match=r"chat_template\.jinja"):
        ModelCard.load(tmp_path)


def test_a_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}, {"name": "rag", "template": "rag"}]
    card = ModelCard.load(make(tmp_path, tokenizer_config={"chat_template": named}))
    assert (card.chat_template, card.tool_use_template) == ("plain", "tools")
    # A file of its own counts instead, with those beside it.
    (tmp_path / "chat_template.jinja").write_text("file")
    card = ModelCard.load(tmp_path)
    assert (card.chat_template, card.tool_use_template) == ("file", None)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools of a file")
    card = ModelCard.load(tmp_path)
    assert (card.chat_template, card.tool_use_template) == ("file", "tools of a file")
    template = ChatTemplate.of(card)
    messages = [{"role": "user", "content": ""}]
    assert template.render(messages) == "file"
    assert template.render(messages, tools=[{}]) == "tools of a file"
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"\xff")
    with pytest.raises(SetupError, match=r"tool_use\.jinja"):
        ModelCard.load(tmp_path)


def test_what_answers_look_like_is_told_by_either_template(tmp_path: Path) -> None:
    card = ModelCard.load(make(tmp_path, tokenizer_config={"chat_template": "{{ x.split('</think>') }}"}))
    assert ChatFormat.of(card).reasoning is not None
    assert ChatFormat.of(card).tool_calls is None
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}<tool_call>"}]
    card = ModelCard.load(make(tmp_path, tokenizer_config={"chat_template": named}))
    assert ChatFormat.of(card) == ChatFormat(None, HERMES, shows_tools=True)
    assert ChatFormat.of(card, reasoning_parser="mistral", tool_call_parser="none").tool_calls is None
