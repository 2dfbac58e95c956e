"""`twostep lab eagle`: refuses what cannot be before PyTorch is loaded, which takes seconds."""

from __future__ import annotations

import argparse
import os

from twostep.errors import SetupError
from twostep.local.machine import check_device
from twostep.model.loading.store import default_cache_dir
from twostep.settings.reading import Given, Texts, build
from twostep.worker.config import WorkerConfig


def run(args: argparse.Namespace) -> int:
    check_device(args.device, os.environ)
    own = {"model": args.model, "dtype": args.dtype, "device": args.device}
    given = Texts()
    given.update({name: Given(f"--{name}", text) for name, text in own.items()})
    config = build(WorkerConfig, given, {"role": "decode", "cache_dir": default_cache_dir(os.environ)})
    texts = []
    for path in args.texts:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"--texts {path} cannot be read: {error}") from error
    from twostep.cli._lab_eagle_run import lab_eagle  # noqa: PLC0415

    return lab_eagle(args, config, texts)
