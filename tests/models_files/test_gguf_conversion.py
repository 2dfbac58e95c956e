"""GGUF to a Hugging Face directory: the same weights, ids and answers; what has no place there is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from twostep.errors import SetupError
from twostep.model.families.registry import parse_config
from twostep.model.families.rope import Rope
from twostep.model.loading import store
from twostep.model.loading.gguf_import import convert, main
from twostep.text.chat_template import ChatTemplate
from twostep.text.model_card import ModelCard
from twostep.text.tokenizer import Tokenizer

TEXTS = ["größer 🙂 日本語", "   1 and 1234", "<|im_start|>user\nhi<|im_end|>\n", " a\n\n  b\t"]


def converted(path: Path, out_dir: Path) -> Path:
    out_dir.mkdir()
    convert(path, out_dir, progress=lambda line: None)
    return out_dir


def test_a_small_llama_comes_back(tiny_llama_dir: Path, tmp_path: Path) -> None:
    out = converted(write_gguf(tmp_path / "m.gguf", tiny_llama_dir), tmp_path / "out")
    ours, original = parse_config(out), parse_config(tiny_llama_dir)
    assert ours.dtype == "bfloat16"
    same = set(ours.__slots__) - {"dtype"}
    assert {key: getattr(ours, key) for key in same} == {key: getattr(original, key) for key in same}
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(tiny_llama_dir / "model.safetensors").items()}
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    before, after = Tokenizer.load(tiny_llama_dir), Tokenizer.load(out)
    assert [after.encode(text) for text in TEXTS] == [before.encode(text) for text in TEXTS]
    assert after.special_ids == before.special_ids
    card = ModelCard.load(out)
    assert (card.chat_template, card.eos_token_ids, card.eos_token) == (tiny_models.CHATML, {0, 2}, "<|im_end|>")


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantized_weights_are_near_the_original(tiny_llama_dir: Path, tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    out = converted(write_gguf(tmp_path / "m.gguf", tiny_llama_dir, quantization=kind), tmp_path / "out")
    tolerance = {"Q8_0": 0.01, "Q4_1": 0.1}[kind.name]
    found = load_file(out / "model.safetensors")
    for name, tensor in load_file(tiny_llama_dir / "model.safetensors").items():
        error = (found[name].float() - tensor).abs().max() / tensor.abs().max()
        assert error < tolerance, name


def test_tied_embeddings_and_bos(tmp_path: Path) -> None:
    model_dir = tiny_models.save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    overrides = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}
    out = converted(write_gguf(tmp_path / "m.gguf", model_dir, overrides=overrides), tmp_path / "out")
    assert parse_config(out).tie_word_embeddings
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    tokenizer = Tokenizer.load(out)
    assert tokenizer.encode("hi") == [1, *tokenizer.encode("hi", add_special_tokens=False)]


def test_user_defined_tokens_are_whole_but_not_special(tiny_llama_dir: Path, tmp_path: Path) -> None:
    plain = converted(write_gguf(tmp_path / "p.gguf", tiny_llama_dir), tmp_path / "plain")
    types = [1] * 512
    types[511] = int(gguf.TokenType.USER_DEFINED)
    out = converted(write_gguf(tmp_path / "m.gguf", tiny_llama_dir, overrides={"tokenizer.ggml.token_type": types}), tmp_path / "out")
    tokenizer = Tokenizer.load(out)
    token = tokenizer.token_text(511)
    assert tokenizer.encode(f"x{token}y")[1:-1] == [511]
    assert Tokenizer.load(plain).encode(f"x{token}y")[1:-1] != [511]
    assert tokenizer.special_ids == {tiny_models.IM_END}, "the end alone, which tokenizer_config.json names"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"tokenizer.ggml.model": "llama"}, ["tokenizer.ggml.model", "llama", "gpt2"]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, ["tokenizer.ggml.pre", "llama-bpe", "smollm"]),
        ({"llama.rope.scaling.type": "yarn"}, ["llama.rope.scaling.type", "yarn"]),
        ({"llama.expert_count": 8}, ["llama.expert_count", "8"]),
        ({"llama.rope.dimension_count": 8}, ["rotary"]),
        ({"llama.block_count": None}, ["llama.block_count"]),
        ({"llama.attention.head_count": None}, ["llama.attention.head_count"]),
        ({"llama.attention.head_count_kv": 7}, ["contradicts itself"]),
        ({"tokenizer.ggml.tokens": None}, ["tokenizer.ggml.tokens"]),
    ],
)
def test_refused_by_name(tiny_llama_dir: Path, tmp_path: Path, overrides: dict[str, Any], words: list[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_dir, overrides=overrides)
    with pytest.raises(SetupError) as caught:
        converted(path, tmp_path / "out")
    for word in [str(path), *words]:
        assert word in caught.value.message
    assert not any((tmp_path / "out").iterdir())


def test_other_architectures_and_tensors_are_refused(tiny_llama_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="gemma"):
        converted(write_gguf(tmp_path / "g.gguf", tiny_llama_dir, architecture="gemma"), tmp_path / "g")
    frequencies = {"rope_freqs.weight": np.ones(8, np.float32)}
    with pytest.raises(SetupError, match=r"rope_freqs\.weight"):
        converted(write_gguf(tmp_path / "f.gguf", tiny_llama_dir, extra_tensors=frequencies), tmp_path / "f")


@pytest.mark.parametrize("size", [0, 3, 30, 3000, 200_000])
def test_truncated_files(tiny_llama_dir: Path, tmp_path: Path, size: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_dir)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(SetupError, match=path.name):
        converted(path, tmp_path / "out")


def test_as_a_program(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_dir)
    (tmp_path / "out").mkdir()
    assert main([str(path), str(tmp_path / "out")]) == 0
    assert "converting tensor 1 of 30" in capsys.readouterr().out
    assert main([str(tmp_path / "none.gguf"), str(tmp_path / "out")]) == 1
    assert "none.gguf cannot be read as GGUF" in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.system
def test_the_default_model_answers(smollm2_dir: Path) -> None:
    assert store.KNOWN_MODELS[store.DEFAULT_MODEL].directory == smollm2_dir.name
    config = parse_config(smollm2_dir)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.tie_word_embeddings, config.dtype, config.norm_eps, config.rope) == (True, "bfloat16", 1e-5, Rope(theta=100000.0))
    tokenizer = Tokenizer.load(smollm2_dir)
    theirs = AutoTokenizer.from_pretrained(smollm2_dir)
    assert [theirs(text)["input_ids"] for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    prompt = ChatTemplate.of(ModelCard.load(smollm2_dir)).render([{"role": "user", "content": "What is the capital of France?"}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    output = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=16, do_sample=False)[0, len(ids) :]
    assert "Paris" in tokenizer.decode(output.tolist())
    assert int(output[-1]) in ModelCard.load(smollm2_dir).eos_token_ids
    assert json.loads((smollm2_dir / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
