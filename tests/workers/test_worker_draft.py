"""The draft model of --speculative-config, from the flag to an engine that drafts by it: what of the memory is its, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_tiny_model

from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.errors import SetupError
from twostep.model.families.config import EncoderConfig, GatedDeltaConfig
from twostep.model.families.registry import parse_config as parse_config_of_model
from twostep.process.free_memory import Free
from twostep.sampling_params import SamplingParams
from twostep.worker.config import WorkerConfig, parse_config
from twostep.worker.draft import check_fit, find_draft
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import load_model, resolve_config


def config_of(model_dir: Path, draft: Path | str, *flags: str, **options: Any) -> WorkerConfig:
    speculative = json.dumps({"model": str(draft)} | options)
    common = ("--model", str(model_dir), "--max-model-len", "256", "--no-calibrate", "--device", "cpu")
    return resolve_config(parse_config("decode", [*common, "--speculative-config", speculative, *flags]))


def altered(model_dir: Path, into: Path, **fields: Any) -> Path:
    """A copy of a model whose config.json says something else."""
    directory = shutil.copytree(model_dir, into)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | fields))
    return directory


def test_a_worker_drafts_by_it(tiny_llama_dir: Path) -> None:
    config = config_of(tiny_llama_dir, tiny_llama_dir, "--kv-cache-memory-bytes", str(1 << 20), num_speculative_tokens=3)
    model = load_model(config)
    assert model.draft is not None
    local = LocalEngine(config, model)
    params = SamplingParams(max_tokens=41, temperature=1.0, seed=1, ignore_eos=True)
    generate(local.engine, [EngineRequest(seq_id="a", token_ids=[5, 6, 7], num_prompt_tokens=3, sampling=params)])
    assert local.engine.steps <= 1 + 10 + 1


def test_its_pool_is_a_part_of_the_memory_that_is_given(tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = ("--kv-cache-memory-bytes", str(1 << 20))
    with_draft = config_of(tiny_llama_dir, tiny_llama_dir, *memory)
    with caplog.at_level("INFO"):
        model = load_model(with_draft)
    alone = load_model(replace(with_draft, speculative_config=""))
    assert alone.draft is None
    assert model.draft is not None
    # As many tokens in the one as in the other.
    assert model.runner.kv_shape.num_blocks == model.draft.kv_shape.num_blocks == alone.runner.kv_shape.num_blocks // 2
    assert any("draft model" in record.message and "KV blocks" in record.message for record in caplog.records)
    counted = load_model(config_of(tiny_llama_dir, tiny_llama_dir, "--num-blocks", "30"))
    assert counted.draft is not None
    assert counted.draft.kv_shape.num_blocks == 30


def test_memory_that_only_the_draft_model_lacks_is_said_before(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.process.free_memory.free_memory", lambda: Free(3 << 19, "this machine"))
    config = config_of(tiny_llama_dir, tiny_llama_dir, "--num-blocks", "30")
    with pytest.raises(SetupError, match="draft model"):
        load_model(config)


def test_what_cannot_draft_is_refused_by_name(tiny_llama_dir: Path, tmp_path: Path) -> None:
    def refused(draft: Path | str, *flags: str) -> str:
        with pytest.raises(SetupError) as found:
            load_model(config_of(tiny_llama_dir, draft, "--num-blocks", "30", *flags))
        return found.value.message

    nowhere = tmp_path / "nowhere"
    assert str(nowhere) in refused(nowhere)
    larger = save_tiny_model(tmp_path / "larger", vocab_size=1024)
    assert "1024 tokens" in refused(larger)
    others = altered(tiny_llama_dir, tmp_path / "others")
    tokenizer = json.loads((others / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    (first, second), *_ = zip(list(vocab)[10:], list(vocab)[11:], strict=False)
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (others / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "same tokenizer" in refused(others)
    unknown = altered(tiny_llama_dir, tmp_path / "unknown", architectures=["BertModel"], model_type="bert")
    assert "bert" in refused(unknown).lower()
    assert "--tensor-parallel-size" in refused(tiny_llama_dir, "--tensor-parallel-size", "2")
    assert "--runner fake" in refused(tiny_llama_dir, "--runner", "fake")


def test_a_model_that_cannot_go_on_from_any_token_is_refused(tiny_llama_dir: Path) -> None:
    served = parse_config_of_model(tiny_llama_dir)
    states = GatedDeltaConfig(num_key_heads=1, num_value_heads=1, key_dim=8, value_dim=8, kernel=4, layers=(True, True, False))
    encoder = EncoderConfig(num_layers=1, num_buckets=8, max_distance=16, scaled_output=True)
    cases = (({"generates": False}, "no output layer"), ({"gated_delta": states}, "keep states"), ({"encoder": encoder}, "an encoder"))
    for fields, message in cases:
        with pytest.raises(SetupError, match=message):
            check_fit(replace(served, **fields), tiny_llama_dir, served, tiny_llama_dir)  # type: ignore[arg-type]


def test_no_model_drafts_for_one_with_an_encoder(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = EncoderConfig(num_layers=1, num_buckets=8, max_distance=16, scaled_output=True)
    served = replace(parse_config_of_model(tiny_llama_dir), encoder=encoder)
    monkeypatch.setattr("twostep.model.families.registry.parse_config", lambda directory, architecture: served)
    with pytest.raises(SetupError, match="method ngram drafts for a model with an encoder"):
        find_draft(config_of(tiny_llama_dir, tiny_llama_dir, "--num-blocks", "30"), tiny_llama_dir)


def test_a_model_without_tokenizer_is_taken_at_its_word(tiny_llama_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draft = altered(tiny_llama_dir, tmp_path / "draft")
    (draft / "tokenizer.json").unlink()
    assert load_model(config_of(tiny_llama_dir, draft, "--num-blocks", "30")).draft is not None
    assert any("tokenizer.json" in record.message for record in caplog.records)
