"""Keeps what `twostep lab eagle` has come to, so that it goes on where it was interrupted:

    DIR/config.json, model.safetensors   the head as it was saved last
    DIR/training/plan.json               what it is trained on and how: another plan is refused
    DIR/training/answers.jsonl           the model's answers, as they come
    DIR/training/state.pt                head, optimizer and how many batches it has learned from

Files that are replaced are replaced as a whole: whenever the process ends, what is there can be used.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from twostep.checkpoint.directory import SINGLE
from twostep.errors import SetupError
from twostep.lab.eagle.answers import LearntAnswer
from twostep.lab.eagle.training import Trainer
from twostep.model.eagle.files import save_head
from twostep.sampling_params import SamplingParams

_SAMPLED = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")


class TrainingFolder:
    """One DIR. One process at a time."""

    def __init__(self, head_dir: Path, plan: Mapping[str, Any]) -> None:
        """`plan`: all that the head depends on, as JSON has it. Raises SetupError if something else is there."""
        self._head_dir = head_dir
        self._training = head_dir / "training"
        self._answers = self._training / "answers.jsonl"
        self._state = self._training / "state.pt"
        try:
            self._begin(json.loads(json.dumps(plan)))
        except OSError as error:
            raise SetupError(f"--out {head_dir} cannot be written: {error.strerror or error}; give another folder") from error

    def _begin(self, plan: dict[str, Any]) -> None:
        path = self._training / "plan.json"
        if not path.exists():
            if any((self._head_dir / name).exists() for name in ("config.json", SINGLE)):
                raise SetupError(f"--out {self._head_dir} holds a model that was not trained here; give another folder")
            self._training.mkdir(parents=True, exist_ok=True)
            self._replace(path, (json.dumps(plan, indent=2) + "\n").encode())
            return
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SetupError(f"{path} is damaged ({error}); delete {self._head_dir}, or give another --out") from error
        for key in plan | there:
            if plan.get(key) != there.get(key):
                raise SetupError(
                    f"--out {self._head_dir} holds a head that was begun with {key} {there.get(key)!r}, not {plan.get(key)!r}; give the "
                    "same to go on with it, or another folder"
                )

    def answers(self) -> list[LearntAnswer]:
        """Returns what was kept. Half a line at the end, of a process that was killed, counts for nothing."""
        if not self._answers.exists():
            return []
        raw = self._answers.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            self._replace(self._answers, whole)
        try:
            return [_answer(json.loads(line)) for line in whole.splitlines()]
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{self._answers} is damaged ({error}); delete it, and the answers are made anew") from error

    def keep_answers(self, answers: Sequence[LearntAnswer]) -> None:
        with self._answers.open("ab") as file:
            file.write(b"".join(json.dumps(_line(answer)).encode() + b"\n" for answer in answers))

    def restore(self, trainer: Trainer) -> None:
        """Gives the trainer what was saved last, if anything was. Raises SetupError."""
        if not self._state.exists():
            return
        try:
            state = torch.load(self._state, map_location="cpu", weights_only=True)
            trainer.restore(state)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise SetupError(f"{self._state} is damaged ({error}); delete it, and the head is trained from the beginning") from error

    def save(self, trainer: Trainer) -> None:
        part = self._state.with_suffix(".part")
        torch.save(trainer.state(), part)
        os.replace(part, self._state)
        save_head(trainer.head, self._head_dir)

    def _replace(self, path: Path, content: bytes) -> None:
        part = path.with_suffix(".part")
        part.write_bytes(content)
        os.replace(part, path)


def _line(answer: LearntAnswer) -> dict[str, Any]:
    given = asdict(answer.sampling)
    sampling = {name: given[name] for name in _SAMPLED}
    return {
        "prompt": list(answer.prompt),
        "token_ids": list(answer.token_ids),
        "sampling": sampling,
        "held_back": answer.held_back,
    }


def _answer(raw: dict[str, Any]) -> LearntAnswer:
    return LearntAnswer(raw["prompt"], raw["token_ids"], SamplingParams(**raw["sampling"]), raw["held_back"])
