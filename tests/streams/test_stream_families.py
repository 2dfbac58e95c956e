"""Right tokens of every family: handed over, its prompts in pieces, they are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from forward_helpers import FAMILIES, save_model
from right_tokens import compare
from t5_models import KINDS, START, save_t5
from tiny_models import save_tokenizer

# Of each kind of memory that a family has of its sequences one: keys and values with a mixture of experts, latents, a state, windows.
SMOKE = ("mixtral", "deepseek-v2-yarn", "qwen3-next", "gemma3")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.smoke if name in SMOKE else pytest.mark.exhaustive) for name in FAMILIES]
)
async def test_every_family_gives_the_single_process_s_tokens(family: str, tmp_path: Path) -> None:
    model_dir = tmp_path / "m"
    model_dir.mkdir()
    save_model(family, model_dir, vocab_size=save_tokenizer(model_dir))
    await compare(model_dir, tmp_path, rounds=False)


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=pytest.mark.smoke if name == "t5" else pytest.mark.exhaustive) for name in KINDS]
)
async def test_an_encoder_gives_the_single_process_s_tokens(kind: str, tmp_path: Path) -> None:
    """Its prompts whole, and answers far longer than most."""
    model_dir = tmp_path / "m"
    model_dir.mkdir()
    save_t5(kind, model_dir, vocab_size=save_tokenizer(model_dir))
    await compare(model_dir, tmp_path, rounds=False, step_tokens=300, max_tokens=200, behind=(START,))
