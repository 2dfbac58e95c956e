"""What a plan reckons from config.json alone is what a model takes, for one of each kind of configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from forward_helpers import FAMILIES, save_model

from twostep.checkpoint.description import describe
from twostep.lab.bench.roofline import ModelShape
from twostep.lab.plan.model import read_model
from twostep.model.families.registry import parse_config
from twostep.model.runner.model_runner import kv_shape

KINDS = {config_class: family for family, (config_class, _) in FAMILIES.items()}


@pytest.mark.parametrize("family", KINDS.values())
def test_sizes(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bare")
    whole, bare = read_model(tmp_path / "whole"), read_model(tmp_path / "bare")
    config = parse_config(tmp_path / "whole")
    shape = kv_shape(config, "float32", 1, 16)
    assert whole.kv_token_bytes == bare.kv_token_bytes == config.num_kv_layers * shape.layer_bytes // 16
    assert whole.num_state_blocks(16) == bare.num_state_blocks(16) == shape.num_state_blocks
    assert whole.num_heads == config.num_heads
    assert whole.intermediate_size in (0, config.intermediate_size)  # 0: all layers have experts
    assert whole.weight_bytes == describe(tmp_path / "whole").loaded_bytes
    # Without biases, norms and positions, which these small models have many of.
    positions = config.num_positions * config.hidden_size * 4
    assert bare.weight_bytes == pytest.approx(whole.weight_bytes - positions, rel=0.04)
    products = ModelShape.of(config, shape, "float32").num_params * 4
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * 4
    assert bare.weight_bytes == pytest.approx(products + looked_up, rel=0.001)
