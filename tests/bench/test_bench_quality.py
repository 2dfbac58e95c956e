"""`twostep bench quality` on tiny models: its figures are those that transformers' logits give."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantized_tensors import KINDS, quantize_directory
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM

from twostep.cli import main
from twostep.errors import SetupError
from twostep.lab.bench.quality import cut, measure_difference, measure_reference
from twostep.model.runner.model_runner import ModelRunner
from twostep.process.startup import NoProgress
from twostep.text.tokenizer import Tokenizer

WINDOW = 48
TEXT = "the quick brown fox jumps over the lazy dog, and the answer to the other question is Paris. " * 8
# Ends with a traceback if PyTorch was loaded.
WITHOUT_TORCH = """
import sys
from twostep.cli import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""


class Journal(NoProgress):
    def __init__(self) -> None:
        self.told: list[str | tuple[int, int]] = []

    def phase(self, name: str) -> None:
        self.told.append(name)

    def advance(self, done: int, total: int, unit: str = "") -> None:
        self.told.append((done, total))


def quality(model: Path, *words: str) -> None:
    sizes = ("--window", str(WINDOW), "--num-prompts", "3", "--prompt-tokens", "20", "--answer-tokens", "12")
    main(["bench", "quality", "--device", "cpu", "--dtype", "float32", "--model", str(model), *sizes, *words])


def figures(capsys: pytest.CaptureFixture[str], model: Path, *words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        quality(model, "--json", *words)
    assert ended.value.code == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def other_dir(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other numbers in its head."""
    path = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(tiny_llama_dir, path)
    weights = load_file(path / "model.safetensors")
    torch.manual_seed(7)
    weights["lm_head.weight"] += 0.02 * torch.randn(weights["lm_head.weight"].shape)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_figures_are_those_of_the_logits(tiny_llama_dir: Path, other_dir: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = figures(capsys, tiny_llama_dir, "--text", str(text), "--against", str(other_dir), "dtype=float32")
    reference, other, same = report["results"]
    token_ids = Tokenizer.load(tiny_llama_dir).encode(TEXT)
    windows = [token_ids[start : start + WINDOW] for start in range(0, len(token_ids), WINDOW)]
    lost, divergence, equal, count = [0.0, 0.0], 0.0, 0, 0
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (tiny_llama_dir, other_dir)]
    with torch.inference_mode():
        for window in windows:
            both = [model(torch.tensor([window])).logits[0, :-1].double().log_softmax(-1) for model in models]
            for i, log_probs in enumerate(both):
                lost[i] -= float(log_probs.gather(1, torch.tensor(window[1:])[:, None]).sum())
            divergence += float((both[0].exp() * (both[0] - both[1])).sum())
            equal += int((both[0].argmax(-1) == both[1].argmax(-1)).sum())
            count += len(window) - 1
    assert report["tokens"] == count
    for result, nats in zip((reference, other), lost, strict=True):
        assert result["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert other["divergence"] == pytest.approx(divergence / count, rel=1e-3)
    assert other["same_best"] == pytest.approx(equal / count, abs=1.5 / count)
    assert 0.5 < other["same_best"] < 1
    assert same["perplexity"] == reference["perplexity"]
    assert (same["divergence"], same["same_best"], same["same_tokens"], same["same_answers"]) == (0, 1, 12, 3)


def test_answers_are_the_same_up_to_the_first_token_that_differs(
    tiny_llama_dir: Path, other_dir: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (_, other) = figures(capsys, tiny_llama_dir, "--text", str(text), "--against", f"{other_dir},block-size=32")["results"]
    token_ids = Tokenizer.load(tiny_llama_dir).encode(TEXT)
    same = []
    for start in (i * (len(token_ids) - 20) // 3 for i in range(3)):
        answers = []
        for path in (tiny_llama_dir, other_dir):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            prompt = torch.tensor([token_ids[start : start + 20]])
            answers.append(
                model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, temperature=None, top_p=None)[0, 20:]
            )
        different = (answers[0] != answers[1]).nonzero()
        same.append(int(different[0]) if len(different) else 12)
    assert other["same_tokens"] == pytest.approx(sum(same) / 3)
    assert other["same_answers"] == same.count(12)


def test_kv_in_a_byte_is_told_from_exact_kv(tiny_llama_dir: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    against = ("kv-cache-dtype=fp8", "kv-cache-dtype=int8")
    _, fp8, int8 = figures(capsys, tiny_llama_dir, "--text", str(text), "--against", *against)["results"]
    assert 0 < int8["divergence"] < fp8["divergence"] < 1


def test_a_table_names_what_was_compared(tiny_llama_dir: Path, other_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quality(tiny_llama_dir, "--max-tokens", "100", "--against", str(other_dir), "kv-cache-dtype=int8")
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[2:]] == ["reference", "other", "kv-cache-dtype=int8"]


def test_checkpoints_that_make_other_tokens_are_refused(tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = save_tiny_model(tmp_path / "longer", vocab_size=600)
    other = save_tiny_model(tmp_path / "other")
    rules = json.loads((other / "tokenizer.json").read_text())
    rules["model"]["merges"] = rules["model"]["merges"][:5]
    (other / "tokenizer.json").write_text(json.dumps(rules))
    for path in (longer, other):
        with pytest.raises(SystemExit) as ended:
            quality(tiny_llama_dir, "--against", str(path))
        assert ended.value.code == 1
        assert str(path) in capsys.readouterr().err


def test_what_is_wrong_with_the_last_is_said_before_the_first_is_measured(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized = tmp_path / "quantized"
    quantize_directory(tiny_llama_dir, quantized, KINDS["int8"])
    odd = shutil.copytree(tiny_llama_dir, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"hidden_act": "swish7"}))
    short = shutil.copytree(tiny_llama_dir, tmp_path / "short")
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 30}))
    for wrong, named in ((f"{quantized},quantization=int8", "--quantization int8"), (str(odd), "hidden_act"), (str(short), "--window")):
        with pytest.raises(SystemExit) as ended:
            quality(tiny_llama_dir, "--against", "kv-cache-dtype=int8", wrong)
        assert ended.value.code == 1
        shown = capsys.readouterr()
        assert f"--against {wrong}" in shown.err
        assert named in shown.err
        assert not shown.out


def test_how_far_it_is_is_told(tiny_llama_dir: Path, text: Path) -> None:
    """By the bench itself: a terminal or a log has it from there."""
    journal = Journal()
    task = cut(list(range(3, 100)), [], window=30, num_prompts=2, prompt_tokens=10, answer_tokens=3)

    def load() -> ModelRunner:
        return ModelRunner(tiny_llama_dir, dtype="float32", num_blocks=task.num_blocks(16))

    reference = measure_reference(load, task, journal)
    assert journal.told == ["windows", (0, 4), (1, 4), (2, 4), (3, 4), "answers"]
    measure_difference(load, task, reference, journal)
    assert journal.told[6:] == journal.told[:6]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--against", "kv-cache-dtype=fp9"], "kv-cache-dtype=fp9"),
        (["--against", "kv-cach-dtype=fp8"], "kv-cache-dtype"),
        (["--against", "kv-cache-dtype=fp8,block-size=2"], "block-size=2"),
        (["--against", "device=cpu"], "device=cpu"),
        (["--against", "dtype="], "dtype="),
        (["--against", "dtype=float32", "--text", "/nowhere.txt"], "/nowhere.txt"),
        ([], "--against"),
    ],
)
def test_what_cannot_be_is_said_before_pytorch_is_loaded(words: list[str], said: str) -> None:
    command = [sys.executable, "-P", "-c", WITHOUT_TORCH, "bench", "quality", "--device", "cpu", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@given(
    num_tokens=st.integers(2, 400),
    begin=st.lists(st.just(-1), max_size=2),
    window=st.integers(3, 100),
    num_prompts=st.integers(1, 9),
    prompt_tokens=st.integers(1, 50),
)
def test_a_text_is_cut_without_a_gap(num_tokens: int, begin: list[int], window: int, num_prompts: int, prompt_tokens: int) -> None:
    token_ids = list(range(num_tokens))
    if num_tokens <= prompt_tokens:
        with pytest.raises(SetupError):
            cut(token_ids, begin, window=window, num_prompts=num_prompts, prompt_tokens=prompt_tokens, answer_tokens=5)
        return
    task = cut(token_ids, begin, window=window, num_prompts=num_prompts, prompt_tokens=prompt_tokens, answer_tokens=5)
    assert all(ids[: len(begin)] == begin and 2 <= len(ids) <= window for ids in task.windows)
    joined = [token for ids in task.windows for token in ids[len(begin) :]]
    # A last token that nothing is told from cannot be scored.
    assert token_ids[: len(joined)] == joined
    assert num_tokens - len(joined) <= 1
    assert len(task.prompts) == num_prompts
    assert all(ids[: len(begin)] == begin and len(ids) == len(begin) + prompt_tokens for ids in task.prompts)
    assert task.num_scored == sum(len(ids) - 1 for ids in task.windows)
    assert task.longest >= max(*(len(ids) for ids in task.windows), len(begin) + prompt_tokens + 5)
