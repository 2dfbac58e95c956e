"""Heads that come with a model or beside it: what they propose is what transformers' modules do, and answers are those without."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_cases import NUM_MEDUSA, PlainMedusa, as_the_model, asked_requests, drafting, head_case, save_model
from heard_proposals import listen
from safetensors.torch import load_file, save_file

from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.errors import SetupError
from twostep.lab.eagle.target import new_head
from twostep.model.eagle.files import save_head
from twostep.model.heads.source import HeadSource
from twostep.model.heads.tap import HeadTap
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.worker.config import WorkerConfig
from twostep.worker.draft import find_draft
from twostep.worker.head import Head
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import load_model, resolve_config

MOST = 4


def answers(engine: Engine) -> list[list[int]]:
    return [[token.token_id for token in answer] for answer in generate(engine, asked_requests())]


@pytest.mark.parametrize("method", ["mtp", "medusa"])
@pytest.mark.parametrize("block_size", [8, 16])
def test_proposals_are_a_plain_reading_s(method: str, block_size: int, tmp_path: Path) -> None:
    case = head_case(method, tmp_path, MOST)
    pool: dict[str, Any] = {"num_blocks": 60, "block_size": block_size, "dtype": "float32"}
    bounds = EngineConfig(max_num_batched_tokens=24, max_num_seqs=24, hash_unit=16)
    want = answers(Engine(ModelRunner(case.model_dir, **pool), bounds))
    engine, proposer = drafting(ModelRunner(case.model_dir, **pool, head=case.source), case.source)
    told = listen(proposer, MOST)
    assert answers(engine) == want
    assert not proposer.failed
    assert {each.sequence.seq_id for each, _, proposed in told if proposed} == {f"r{number}" for number in range(5)}
    assert max(len(proposed) for _, _, proposed in told) == (min(MOST, NUM_MEDUSA) if method == "medusa" else MOST)
    for each, tokens, proposed in told:
        assert list(proposed) == case.plain(tokens, len(proposed), as_the_model(each, tokens))


@pytest.mark.parametrize("method", ["eagle3", "mtp", "medusa"])
def test_rows_that_are_only_read_are_those_without(method: str, tmp_path: Path) -> None:
    """Log probabilities of a prompt's tokens, beside what a step leaves for the head; of chunks in which nothing is sampled, too."""
    case, found = head_case(method, tmp_path), []
    for head in (None, case.source):
        engine = Engine(
            ModelRunner(case.model_dir, num_blocks=20, dtype="float32", head=head),
            EngineConfig(max_num_batched_tokens=7, max_num_seqs=4, hash_unit=16),
        )
        params = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2, ignore_eos=True)
        prompt = list(range(3, 23))
        engine.submit(EngineRequest(seq_id="r", token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params))
        engine.submit(EngineRequest(seq_id="s", token_ids=prompt[5:], num_prompt_tokens=15, sampling=replace(params, prompt_logprobs=None)))
        tokens, scores = [], []
        while engine.stats().num_running or engine.stats().num_waiting:
            output = engine.step()
            tokens += [(token.seq_id, token.token_id) for token in output.tokens]
            scores += [each.values for each in output.scores]
        found.append((tokens, np.concatenate(scores)))
    (want, want_scores), (got, got_scores) = found
    assert got == want
    assert got_scores == pytest.approx(want_scores, abs=1e-4)
    assert len(got_scores) == 19


@pytest.mark.parametrize(("family", "kv_cache_dtype"), [("mistral-window", "auto"), ("llama", "int8")])
def test_answers_are_those_without_whatever_the_blocks_are_like(family: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    """Those behind every window are given away; those of fewer bits hold the head's keys in them, too."""
    model_dir, head_dir = tmp_path / "model", tmp_path / "head"
    model_dir.mkdir()
    save_model(family, model_dir, head_dim=16)
    pool: dict[str, Any] = {"num_blocks": 40, "dtype": "float32", "kv_cache_dtype": kv_cache_dtype}
    runner = ModelRunner(model_dir, **pool)
    save_head(new_head(runner, torch.arange(runner.vocab_size), 1), head_dir)
    source = HeadSource(method="eagle3", head_dir=head_dir, most_tokens=3)
    prompt = list(range(3, 33))
    sampling = SamplingParams(max_tokens=170, temperature=0.0, ignore_eos=True)
    asked = [EngineRequest(seq_id="r", token_ids=prompt, num_prompt_tokens=len(prompt), sampling=sampling)]
    engine, proposer = drafting(ModelRunner(model_dir, **pool, head=source), source)
    plain = Engine(runner, EngineConfig(hash_unit=16))
    got, want = ([[token.token_id for token in answer] for answer in generate(each, asked)] for each in (engine, plain))
    assert got == want
    assert not proposer.failed
    assert sum(engine.stats().num_drafted) > 50


def test_what_an_mtp_s_layer_leaves_is_in_the_blocks(tmp_path: Path) -> None:
    """They have a layer more than the model; without the head that is not there, and its weights are passed over."""
    case = head_case("mtp", tmp_path)
    plain, with_head = (ModelRunner(case.model_dir, num_blocks=4, head=head) for head in (None, case.source))
    assert with_head.kv_shape.num_layers == plain.kv_shape.num_layers + 1
    assert plain.model.next_token is None


def test_weights_as_the_authors_of_medusa_write_them_are_read(tmp_path: Path) -> None:
    case = head_case("medusa", tmp_path)
    path = case.source.head_dir / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        for n in range(NUM_MEDUSA):
            name = name.replace(f"lm_heads.{n}.", f"{n}.2.")
            for j in range(2):
                name = name.replace(f"blocks.{n}.layers.{j}.", f"{n}.{j}.linear.")
        tensors[name] = tensor
    assert "0.1.linear.bias" in tensors
    save_file(tensors, path)
    config = json.loads((case.source.head_dir / "config.json").read_text())
    for key, other in (("num_heads", "medusa_num_heads"), ("num_hidden_layers", "medusa_num_layers")):
        config[other] = config.pop(key)
    for key in ("architectures", "model_type", "hidden_size", "vocab_size"):
        del config[key]
    (case.source.head_dir / "config.json").write_text(json.dumps(config))
    engine, proposer = drafting(ModelRunner(case.model_dir, num_blocks=60, dtype="float32", head=case.source), case.source)
    told = listen(proposer, 3)
    answers(engine)
    assert told
    for each, tokens, proposed in told:
        assert list(proposed) == case.plain(tokens, len(proposed), as_the_model(each, tokens))


def worker_config(model: Path, method: dict[str, Any], **changes: Any) -> WorkerConfig:
    usual: dict[str, Any] = {"role": "decode", "device": "cpu", "dtype": "float32", "num_blocks": 60, "calibrate": False}
    return WorkerConfig(model=str(model), speculative_config=json.dumps(method), **(usual | changes))


@pytest.mark.parametrize("method", ["eagle3", "mtp", "medusa"])
def test_what_a_head_takes_is_reckoned(method: str, tmp_path: Path) -> None:
    """States by slot, scratch blocks, weights; before anything is loaded."""
    case = head_case(method, tmp_path)
    given = {"method": method, "num_speculative_tokens": 3} | ({} if method == "mtp" else {"model": str(case.source.head_dir)})
    config = resolve_config(worker_config(case.model_dir, given, max_num_seqs=5))
    head = find_draft(config, case.model_dir)
    assert isinstance(head, Head)
    pool: dict[str, Any] = {"num_blocks": 10, "block_size": config.block_size, "dtype": "float32", "max_num_seqs": 5}
    runner = ModelRunner(case.model_dir, **pool, head=head.source)
    assert runner.kv_shape.num_layers == runner.config.num_layers + head.num_layers
    tap, cache = runner.model.tap, runner.kv_cache
    assert isinstance(tap, HeadTap)
    assert tap.by_slot.nbytes == 10 * head.block_bytes + tap.by_slot[0].nbytes
    assert cache.with_scratch().tensor.nbytes - cache.tensor.nbytes == head.later_bytes
    files = sum(path.stat().st_size for path in case.source.head_dir.glob("*.safetensors"))
    # Of EAGLE-3 and Medusa, maps of the vocabulary are in the files in other types, and the files have headers.
    assert head.fixed_bytes - head.later_bytes == pytest.approx(files, rel=0.1)


@pytest.mark.parametrize("method", ["mtp", "medusa"])
def test_a_worker_drafts_with_the_head_that_it_is_asked_for(method: str, tmp_path: Path, tiny_llama_dir: Path) -> None:
    case = head_case(method, tmp_path)
    shutil.copy(tiny_llama_dir / "tokenizer.json", case.model_dir)
    asked: dict[str, Any] = {"method": method} if method == "mtp" else {"method": method, "model": str(case.source.head_dir)}
    config = resolve_config(worker_config(case.model_dir, asked))
    engine = LocalEngine(config, load_model(config)).engine
    assert answers(engine) == answers(Engine(ModelRunner(case.model_dir, num_blocks=60, dtype="float32"), EngineConfig(hash_unit=16)))
    assert sum(engine.stats().num_drafted) > 5


def test_what_cannot_draft_for_the_model_is_refused_by_name(tmp_path: Path) -> None:
    case = head_case("medusa", tmp_path)
    medusa = {"method": "medusa", "model": str(case.source.head_dir)}
    with pytest.raises(SetupError, match="num_nextn_predict_layers"):
        load_model(worker_config(case.model_dir, {"method": "mtp"}))
    with pytest.raises(SetupError, match="is not there"):
        load_model(worker_config(case.model_dir, medusa | {"model": str(tmp_path / "nowhere")}))
    with pytest.raises(SetupError, match="tensor-parallel-size"):
        load_model(worker_config(case.model_dir, medusa, tensor_parallel_size=2))
    for changes, named in (({"vocab_size": 7}, "vocab_size"), ({"hidden_size": 7}, "hidden_size"), ({"some_key": 1}, "some_key")):
        PlainMedusa(_model_of(case.plain), case.source.head_dir, **changes)
        with pytest.raises(SetupError, match=named):
            load_model(worker_config(case.model_dir, medusa))
    others: list[tuple[dict[str, Any], str]] = [
        ({"num_heads": 4}, "blocks.3"),
        ({"num_heads": 2}, "blocks.2"),
        ({"truncated_vocab_size": None}, "token_map"),
    ]
    for changes, named in others:
        PlainMedusa(_model_of(case.plain), case.source.head_dir, **changes)
        with pytest.raises(SetupError, match=named):
            load_model(worker_config(case.model_dir, medusa))


def _model_of(propose: Any) -> Any:
    return propose.__self__._model


def test_a_model_that_keeps_states_has_no_head(tmp_path: Path) -> None:
    save_model("qwen3-next", tmp_path)
    with pytest.raises(SetupError, match="states"):
        load_model(worker_config(tmp_path, {"method": "mtp"}))
