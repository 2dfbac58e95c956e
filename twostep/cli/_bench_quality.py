"""`twostep bench quality`: refuses what cannot be before PyTorch is loaded, which takes seconds."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from twostep.errors import SetupError, WrongSettings
from twostep.local.machine import check_device
from twostep.model.loading.store import default_cache_dir
from twostep.settings.reading import Given, Texts, build, hint
from twostep.settings.table import settings_of
from twostep.worker.config import WorkerConfig

# Settings of a worker that this command has flags for, or that would make it another one.
_NOT_COMPARED = ("device", "runner", "load-format", "tensor-parallel-size")


def run(args: argparse.Namespace) -> int:
    check_device(args.device, os.environ)
    own = {"model": args.model, "dtype": args.dtype, "kv-cache-dtype": args.kv_cache_dtype, "device": args.device}
    reference = _config({name: Given(f"--{name}", text) for name, text in own.items()})
    others = [(words, _config(_settings(words, own))) for words in args.against]
    text = _text(args.text)
    from twostep.cli._bench_quality_run import bench_quality  # noqa: PLC0415

    return bench_quality(args, reference, others, text)


def _settings(words: str, own: dict[str, str]) -> dict[str, Given]:
    """The reference's settings, with those that are given: NAME=VALUE and a model, between commas. Raises WrongSettings."""
    found = {name: Given(f"--{name}", text) for name, text in own.items()}
    known = [each.name for each in settings_of(WorkerConfig) if each.name not in _NOT_COMPARED]
    for word in words.split(","):
        name, equals, value = word.partition("=")
        name, value = (name.strip(), value.strip()) if equals else ("model", word.strip())
        if name not in known or not value:
            why = hint(name, known) if value else "; give NAME=VALUE, or a model"
            raise WrongSettings([f"--against {words}: {word!r} is no setting of a worker to compare{why}"])
        found[name] = Given(f"--against {name}={value}", value)
    return found


def _config(given: dict[str, Given]) -> WorkerConfig:
    texts = Texts()
    texts.update(given)
    return build(WorkerConfig, texts, {"role": "decode", "cache_dir": default_cache_dir(os.environ)})


def _text(path: Path | None) -> str:
    source = Path(__file__).parents[1] / "lab" / "bench" / "quality.txt" if path is None else path
    try:
        return source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--text {source} cannot be read: {error}") from error
