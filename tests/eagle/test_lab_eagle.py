"""`twostep lab eagle` from the texts to the head, interrupted and continued; what cannot be is refused before anything is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from twostep.cli import INTERRUPTED, main
from twostep.lab.eagle import run as lab_run
from twostep.model.eagle.files import load_head
from twostep.model.runner.model_runner import ModelRunner

TEXT = "the quick brown fox jumps over the lazy dog, and the answer to the other question is Paris. " * 12
SIZES = {
    "--num-prompts": "20",
    "--prompt-tokens": "8",
    "--answer-tokens": "10",
    "--rounds": "2",
    "--draft-vocab-size": "200",
    "--learning-rate": "0.01",
}
# Ends with a traceback if PyTorch was loaded.
WITHOUT_TORCH = """
import sys
from twostep.cli import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def words(model: Path, text: Path, out: Path, **changes: str) -> list[str]:
    sizes = SIZES | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    given = [word for pair in sizes.items() for word in pair]
    return ["lab", "eagle", str(model), "--texts", str(text), "--out", str(out), "--device", "cpu", "--dtype", "float32", *given]


def ended(*args: Any, more: tuple[str, ...] = (), **changes: str) -> int:
    with pytest.raises(SystemExit) as end:
        main([*words(*args, **changes), *more])
    return int(end.value.code or 0)


def test_a_head_comes_out_and_is_measured(tiny_llama_dir: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(tiny_llama_dir, text, tmp_path, more=("--json",)) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    assert "round 2 of 2: loss" in told.err
    runner = ModelRunner(tiny_llama_dir, num_blocks=1)
    head = load_head(tmp_path, runner.config, runner.model.embedding, torch.float32)
    assert head.config.draft_vocab_size == 200
    answers = [json.loads(line) for line in (tmp_path / "training" / "answers.jsonl").read_text().splitlines()]
    held_back = [answer for answer in answers if answer["held_back"]]
    assert (len(answers), len(held_back)) == (22, 2)
    assert report["answer_tokens"]["held_back"] == sum(len(answer["token_ids"]) for answer in held_back)
    for kind in ("greedy", "drawn"):
        # One answer of each kind, and one position less for each token ahead.
        (answer,) = [each for each in held_back if (each["sampling"]["temperature"] == 0) == (kind == "greedy")]
        count = len(answer["token_ids"])
        assert report[kind]["proposed"] == [max(0, count - 1 - ahead) for ahead in range(3)]
    # The same again trains nothing, and shows a table.
    assert ended(tiny_llama_dir, text, tmp_path) == 0
    told = capsys.readouterr()
    assert "round" not in told.err
    lines = told.out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["greedy", "drawn"]
    assert f"{report['greedy']['tokens_per_step']:.2f}" in lines[2]


def test_ctrl_c_keeps_what_is_there(
    tiny_llama_dir: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among the answers, and while it learns: the head is the one that comes out without."""
    kept, saved = lab_run.TrainingFolder.keep_answers, lab_run.TrainingFolder.save

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab_run.TrainingFolder, "keep_answers", lambda *args: (kept(*args), interrupted()))
    assert ended(tiny_llama_dir, text, tmp_path / "parts") == INTERRUPTED
    assert len((tmp_path / "parts" / "training" / "answers.jsonl").read_text().splitlines()) == 16
    # Killed while it wrote the next one.
    with (tmp_path / "parts" / "training" / "answers.jsonl").open("a") as file:
        file.write('{"prompt": [1, 2')
    monkeypatch.setattr(lab_run.TrainingFolder, "keep_answers", kept)
    monkeypatch.setattr(lab_run.TrainingFolder, "save", lambda *args: (saved(*args), interrupted()))
    assert ended(tiny_llama_dir, text, tmp_path / "parts") == INTERRUPTED
    monkeypatch.undo()
    assert ended(tiny_llama_dir, text, tmp_path / "parts") == 0
    parts = capsys.readouterr().out
    assert ended(tiny_llama_dir, text, tmp_path / "whole") == 0
    assert capsys.readouterr().out.splitlines()[1:] == parts.splitlines()[1:]
    files = [tmp_path / name / "model.safetensors" for name in ("parts", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_another_plan_is_refused(tiny_llama_dir: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(tiny_llama_dir, text, tmp_path) == 0
    assert ended(tiny_llama_dir, text, tmp_path, rounds="3") == 1
    assert "rounds" in capsys.readouterr().err
    # A model that somebody else put there is not written over.
    assert ended(tiny_llama_dir, text, tiny_llama_dir) == 1
    assert not (tiny_llama_dir / "training").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"prompt_tokens": "4000"}, "--prompt-tokens"), ({"answer_tokens": "3000"}, "2048")],
)
def test_what_cannot_be_is_refused(
    tiny_llama_dir: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], named: str
) -> None:
    assert ended(tiny_llama_dir, text, tmp_path / "head", **changes) == 1
    assert named in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


def test_a_text_that_is_not_there_is_refused_at_once(tiny_llama_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, *words(tiny_llama_dir, tmp_path / "none.txt", tmp_path / "head")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("twostep: --texts")
