"""A head's directory comes back as it was written; what contradicts itself, or was made for another model, is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_cases import VOCAB, propose, random_head, random_sequence
from safetensors.torch import load_file, save_file

from twostep.errors import SetupError
from twostep.model.eagle.config import EagleConfig, parse_eagle_config, usual_layers
from twostep.model.eagle.files import load_head, save_head
from twostep.model.eagle.head import EagleHead
from twostep.model.families.config import ModelConfig
from twostep.model.families.rope import Rope

Tensors = dict[str, torch.Tensor]


def target(**changes: Any) -> ModelConfig:
    usual: dict[str, Any] = {
        "architecture": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_layers": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "norm_eps": 1e-5,
        "rope": Rope(theta=10000.0),
        "num_positions": 0,
        "windows": (0,) * 8,
        "max_model_len": 128,
        "tie_word_embeddings": True,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
    }
    return ModelConfig(**(usual | changes))


EMBEDDING = torch.randn(VOCAB, 24, generator=torch.Generator().manual_seed(1))


def load(directory: Path, model: ModelConfig | None = None) -> EagleHead:
    return load_head(directory, model or target(), EMBEDDING, torch.float32)


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({key: value for key, value in (json.loads(path.read_text()) | changes).items() if value is not ...}))


def change_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_head(random_head(), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_vocab_size": VOCAB},
        {"norm_before_residual": True, "layers": (0, 3, 7)},
        {"attention_bias": True, "mlp_bias": True},
        {"has_embedding": True, "hidden_size": 32, "head_dim": 4},
    ],
)
def test_what_is_written_comes_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    head = random_head(**changes)
    if head.embed_tokens is None:
        head.use_embedding(EMBEDDING)
    save_head(head, tmp_path)
    again = load(tmp_path)
    assert again.config == head.config == parse_eagle_config(tmp_path)
    states, token_ids = random_sequence(head, 7)
    assert propose(again, states, token_ids, 4) == propose(head, states, token_ids, 4)
    modes = {(tmp_path / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1
    # The embedding is the model's own memory, not a copy of it.
    if again.embed_tokens is None:
        assert again._embedding[0] is EMBEDDING


def test_a_published_head_is_read(saved: Path) -> None:
    """What vLLM does without, and what it takes under other names."""
    want = load(saved)
    change_config(
        saved, target_hidden_size=..., norm_before_residual=..., attention_bias=..., mlp_bias=..., model_type="llama", use_cache=True
    )
    change_config(saved, eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, bos_token_id=1)
    change_tensors(saved, lambda tensors: tensors.pop("t2d"))

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    change_tensors(saved, rename)
    head = load(saved)
    assert head.config.layers == (1, 2, 3)
    assert want.config.layers == ()
    assert want.config.layers_of(target()) == usual_layers(8) == (2, 4, 5)
    states, token_ids = random_sequence(head, 7)
    assert propose(head, states, token_ids, 4) == propose(want, states, token_ids, 4)


def test_a_head_of_all_tokens_needs_no_map(tmp_path: Path) -> None:
    save_head(random_head(draft_vocab_size=VOCAB), tmp_path)
    change_config(tmp_path, draft_vocab_size=...)
    change_tensors(tmp_path, lambda tensors: (tensors.pop("d2t"), tensors.pop("t2d")))
    assert torch.equal(load(tmp_path).target_ids, torch.arange(VOCAB))


def test_positions_go_as_far_as_the_model_s_context(saved: Path) -> None:
    """Published heads name a context of 2048 for models of 128 thousand."""
    head = load(saved, target(max_model_len=300))
    states, token_ids = random_sequence(head, 290)
    # 64 is what the head's config has: behind it positions differ still.
    one, other = (propose(head, states[start:], token_ids[start:], 6) for start in (0, 200))
    assert one != other


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
    ({"num_hidden_layers": 2}, "num_hidden_layers"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"num_key_value_heads": 4}, "num_key_value_heads"),
    ({"head_dim": 7}, "head_dim"),
    ({"head_dim": ..., "num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads"),
    ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "eagle_aux_hidden_state_layer_ids"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, True]}, "eagle_aux_hidden_state_layer_ids"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "contradicts"),
    ({"logit_scale": 0.5}, "logit_scale"),
    ({"torch_dtype": "int8"}, "dtype"),
    ({"hidden_size": ...}, "hidden_size"),
    # Of another model.
    ({"vocab_size": VOCAB + 1}, "vocab_size"),
    ({"target_hidden_size": 32}, "target_hidden_size"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, "8 layers"),
    # Against the tensors.
    ({"draft_vocab_size": 22}, "lm_head.weight|d2t"),
    ({"intermediate_size": 44}, "midlayer.mlp"),
    ({"attention_bias": True}, "midlayer.self_attn.k_proj.bias"),
]


@pytest.mark.parametrize(("changes", "named"), CONFIGS)
def test_a_config_that_cannot_be_is_refused_by_name(saved: Path, changes: dict[str, Any], named: str) -> None:
    change_config(saved, **changes)
    with pytest.raises(SetupError, match=named):
        load(saved)


TENSORS: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop("fc.weight"), "fc.weight"),
    (lambda t: t.pop("d2t"), "d2t"),
    (lambda t: t.update(extra=torch.zeros(1)), "extra"),
    (lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(10)}), "q_norm"),
    (lambda t: t.update({"fc.weight": t["fc.weight"][:, :48]}), "fc.weight"),
    (lambda t: t.update({"norm.weight": t["norm.weight"].long()}), "norm.weight"),
    (lambda t: t.update(d2t=t["d2t"].float()), "d2t"),
    (lambda t: t.update(d2t=t["d2t"] - 100), "d2t"),
    (lambda t: t["d2t"].__setitem__(3, t["d2t"][2] - 1), "d2t"),
    (lambda t: t.update(t2d=~t["t2d"]), "t2d"),
    (lambda t: t.update(t2d=t["t2d"][1:]), "t2d"),
    (lambda t: t.update({"embed_tokens.weight": torch.zeros(VOCAB + 1, 24)}), "embed_tokens"),
]


@pytest.mark.parametrize(("change", "named"), TENSORS)
def test_tensors_that_cannot_be_are_refused_by_name(saved: Path, change: Callable[[Tensors], object], named: str) -> None:
    change_tensors(saved, change)
    if named == "d2t":
        # As it would be without the other map.
        change_tensors(saved, lambda tensors: tensors.pop("t2d"))
    with pytest.raises(SetupError, match=named):
        load(saved)


def test_another_width_needs_an_embedding(tmp_path: Path) -> None:
    save_head(random_head(target_hidden_size=17), tmp_path)
    with pytest.raises(SetupError, match="embed_tokens"):
        load(tmp_path, target(hidden_size=17))


def test_too_small_a_model_has_no_usual_layers() -> None:
    with pytest.raises(SetupError, match="2 layers"):
        usual_layers(2)
    assert usual_layers(30) == (2, 15, 27)


def test_damaged_config_is_refused(saved: Path) -> None:
    (saved / "config.json").write_text("{")
    with pytest.raises(SetupError, match=r"config\.json"):
        load(saved)
    assert isinstance(random_head().config, EagleConfig)
