"""Runs lm-eval over /v1/completions, by loglikelihoods (echo with logprobs) and by generating, and compares every loglikelihood with one
that `transformers` computes from the same files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from outside import MODEL_DIR, check, run

QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome", " a small village"]),
    ("Two and two make", [" four", " five"]),
    ("Water boils at one hundred degrees", [" Celsius", " of separation", " in the shade"]),
    ("Long ago, " * 300 + "there was a", [" king", " dragon"]),
]
CHOICES = """
task: twostep_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
ANSWERS = """
task: twostep_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "x"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, temperature: 0.0}}
metric_list: [{{metric: exact_match}}]
"""
# In float32 on a CPU both sides are within a few millionths of each other for a token.
TOLERANCE = 2e-3


def evaluate(
    url: str, model: str, *flags: str, tokenizer: str = f"tokenizer={MODEL_DIR},tokenizer_backend=huggingface"
) -> dict[str, list[dict[str, Any]]]:
    """Returns the samples of each task."""
    with tempfile.TemporaryDirectory(prefix="ts-") as name:
        folder = Path(name)
        data = folder / "questions.jsonl"
        data.write_text("".join(json.dumps({"question": question, "choices": choices}) + "\n" for question, choices in QUESTIONS))
        for task, text in (("choices", CHOICES), ("answers", ANSWERS)):
            (folder / f"{task}.yaml").write_text(text.format(data=data))
        about = f"model={model},base_url={url}/v1/completions,{tokenizer}"
        words = [
            str(Path(sys.executable).with_name("lm_eval")),
            *(
                "--model",
                "local-completions",
                "--model_args",
                f"{about},num_concurrent=3,max_length=4096",
                "--tasks",
                "twostep_choices,twostep_answers",
            ),
            *("--include_path", name, "--log_samples", "--output_path", str(folder / "out"), *flags),
        ]
        environ = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=900, env=environ)
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
        found = {}
        for task in ("choices", "answers"):
            (path,) = (folder / "out").rglob(f"samples_twostep_{task}_*.jsonl")
            found[task] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


def reference(asked: list[tuple[str, str]]) -> list[float]:
    """Returns each choice's loglikelihood after its question, by `transformers`, which the project's own environment has."""
    script = Path(__file__).with_name("loglikelihoods.py")
    words = [os.environ["REFERENCE_PYTHON"], str(script), MODEL_DIR]
    done = subprocess.run(words, input=json.dumps(asked), check=True, capture_output=True, text=True, timeout=600)
    return list(json.loads(done.stdout))


@check
def loglikelihoods_are_those_of_transformers(url: str, model: str) -> str:
    worst, num = 0.0, 0
    for batch_size in ("1", "3"):
        samples = evaluate(url, model, "--batch_size", batch_size)
        asked, told = [], []
        for sample in samples["choices"]:
            for choice, response in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
                asked.append((sample["doc"]["question"], choice))
                told.append(float(response[0]))
        for (question, choice), mine, theirs in zip(asked, told, reference(asked), strict=True):
            assert abs(mine - theirs) < TOLERANCE, (question[-40:], choice, mine, theirs)
            worst, num = max(worst, abs(mine - theirs)), num + 1
        assert all(sample["resps"][0][0] for sample in samples["answers"]), "an answer is empty"
    return f"{num} loglikelihoods, at most {worst:.1e} apart"


@check
def a_remote_tokenizer_gives_the_same(url: str, model: str) -> str:
    local, remote = (evaluate(url, model), evaluate(url, model, tokenizer="tokenizer_backend=remote"))
    num = 0
    for mine, theirs in zip(local["choices"], remote["choices"], strict=True):
        for (likely, greedy), (also_likely, also_greedy) in zip(mine["filtered_resps"], theirs["filtered_resps"], strict=True):
            assert abs(float(likely) - float(also_likely)) < TOLERANCE, (likely, also_likely)
            assert greedy == also_greedy
            num += 1
    assert [sample["resps"] for sample in local["answers"]] == [sample["resps"] for sample in remote["answers"]]
    return f"{num} loglikelihoods without the model's files"


if __name__ == "__main__":
    run()
