"""A model directory says how its embeddings are made: that is honoured, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twostep.checkpoint.embedding_format import MODULES, EmbeddingFormat, is_made_for_embeddings
from twostep.errors import InvalidRequest, SetupError
from twostep.model.families.registry import parse_config
from twostep.pooling import Pooling

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}
KINDS = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}


def directory(
    path: Path,
    *,
    modules: list[str] | None = None,
    pooling: dict[str, Any] | None = None,
    bert: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    (path / "config.json").write_text(json.dumps(QWEN3 | config))
    if modules is not None:
        told = [
            {"idx": i, "name": str(i), "path": KINDS[kind], "type": f"sentence_transformers.models.{kind}"}
            for i, kind in enumerate(modules)
        ]
        (path / "modules.json").write_text(json.dumps(told))
    if bert is not None:
        (path / "sentence_bert_config.json").write_text(json.dumps(bert))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


OLD = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_max_tokens": False, "include_prompt": True}


@pytest.mark.parametrize(
    ("modules", "pooling", "want"),
    [
        (None, None, (Pooling.LAST, True)),
        (["Transformer", "Pooling", "Normalize"], OLD | {"pooling_mode_lasttoken": True}, (Pooling.LAST, True)),
        (["Transformer", "Pooling"], OLD | {"pooling_mode_mean_tokens": True}, (Pooling.MEAN, False)),
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode": "mean"}, (Pooling.MEAN, True)),
        (None, {"pooling_mode": "lasttoken"}, (Pooling.LAST, True)),
        (["Transformer", "Pooling"], OLD, (Pooling.LAST, False)),
    ],
)
def test_what_is_honoured(modules: list[str] | None, pooling: dict[str, Any] | None, want: tuple[Pooling, bool], tmp_path: Path) -> None:
    found = EmbeddingFormat.load(directory(tmp_path, modules=modules, pooling=pooling))
    assert (found.pooling, found.normalize, found.width) == (*want, 64)
    assert is_made_for_embeddings(tmp_path) is (modules is not None)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"modules": ["Transformer", "Pooling", "Dense"]}, "modules.json.*Dense"),
        ({"pooling": OLD | {"pooling_mode_cls_token": True}}, "pooling_mode_cls_token"),
        ({"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}}, "pooling_mode_lasttoken"),
        ({"pooling": {"pooling_mode": "weightedmean"}}, "pooling_mode.*weightedmean"),
        # Whatever it says, the last token's state is not what it means.
        ({"modules": ["Transformer", "Pooling"]}, "1_Pooling/config.json"),
        ({"bert": {"max_seq_length": 0}}, "sentence_bert_config.json.*max_seq_length"),
        ({"bert": {"max_seq_length": "512"}}, "max_seq_length"),
        ({"bert": {"do_lower_case": 1}}, "do_lower_case"),
        ({"is_matryoshka": "yes"}, "is_matryoshka"),
        ({"matryoshka_dimensions": [0]}, "matryoshka_dimensions"),
    ],
)
def test_what_is_refused(given: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=named):
        EmbeddingFormat.load(directory(tmp_path, **given))


@pytest.mark.parametrize(
    ("bert", "want"),
    [
        (None, (None, False)),
        ({"max_seq_length": None, "do_lower_case": False}, (None, False)),
        ({"max_seq_length": 512, "do_lower_case": True}, (512, True)),
    ],
)
def test_how_inputs_are_read(bert: dict[str, Any] | None, want: tuple[int | None, bool], tmp_path: Path) -> None:
    found = EmbeddingFormat.load(directory(tmp_path, bert=bert))
    assert (found.max_tokens, found.lowercase) == want


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"path": ""}]', '{"a": 1}', "null"])
def test_a_list_of_modules_that_is_none(text: str, tmp_path: Path) -> None:
    directory(tmp_path)
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(SetupError, match=MODULES):
        EmbeddingFormat.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "allowed", "refused"),
    [
        ({}, [64], [1, 63, 65]),
        ({"is_matryoshka": True}, [1, 63, 64], [0, 65]),
        ({"matryoshka_dimensions": [16, 32]}, [16, 32, 64], [8, 33]),
        ({"is_matryoshka": False}, [64], [32]),
    ],
)
def test_lengths_that_vectors_may_be_cut_to(config: dict[str, Any], allowed: list[int], refused: list[int], tmp_path: Path) -> None:
    found = EmbeddingFormat.load(directory(tmp_path, **config))
    for dimensions in allowed:
        found.check_dimensions(dimensions)
    for dimensions in refused:
        with pytest.raises(InvalidRequest):
            found.check_dimensions(dimensions)


def test_the_decoder_s_own_name_and_a_mask_that_is_not_causal(tmp_path: Path) -> None:
    config = parse_config(directory(tmp_path, architectures=["Qwen3Model"], is_matryoshka=True, matryoshka_dimensions=[8], is_causal=True))
    assert config.architecture == "qwen3"
    assert is_made_for_embeddings(tmp_path)
    with pytest.raises(SetupError, match="is_causal"):
        parse_config(directory(tmp_path, is_causal=False))
