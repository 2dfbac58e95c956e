"""Flags of `twostep lab`. Loads nothing heavy."""

from __future__ import annotations

from pathlib import Path

from twostep.settings.readers import COUNT, POSITIVE, Whole
from twostep.settings.reading import FlagParser
from twostep.settings.service import DTYPES
from twostep.settings.table import readers_of
from twostep.settings.worker import WorkerSettings

EAGLE_DESCRIPTION = """Trains an EAGLE-3 head, which drafts what a model says next, on the model's own answers to passages of texts.

  twostep lab eagle smollm2-135m-instruct --texts docs/*.md --out ./smollm2-eagle3

Ctrl-C interrupts it; the same command goes on. At its end it says how many of the head's proposals were right in answers held back.
docs/speculative.md has what it does, and what came of it."""


def add_eagle_flags(command: FlagParser) -> None:
    worker = readers_of(WorkerSettings)
    command.add_argument("model", metavar="MODEL", help="a model directory, a known name, or ORG/NAME of the Hugging Face hub")
    command.add_argument("--texts", type=Path, nargs="+", required=True, metavar="FILE", help="texts in UTF-8 that prompts are taken from")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the head goes, and what is needed to go on with it")
    command.add_argument(
        "--prompts",
        default="auto",
        choices=["auto", "chat", "text"],
        help="chat: a passage is what a user says; text: it is continued; auto: chat where the model has a template",
    )
    command.add_argument("--num-prompts", type=COUNT, default=512, metavar="N", help="answers to learn from (default: 512)")
    command.add_argument("--prompt-tokens", type=Whole(1, 1 << 20), default=64, metavar="N", help="of each passage (default: 64)")
    command.add_argument("--answer-tokens", type=Whole(3, 1 << 20), default=128, metavar="N", help="of each answer at most (default: 128)")
    command.add_argument(
        "--num-speculative-tokens", type=Whole(1, 7), default=3, metavar="K", help="how far ahead it learns to draft (default: 3)"
    )
    command.add_argument(
        "--draft-vocab-size",
        type=COUNT,
        default=8192,
        metavar="N",
        help="tokens that it may propose, the answers' most frequent ones (default: 8192, or all if there are fewer)",
    )
    command.add_argument("--rounds", type=COUNT, default=8, metavar="N", help="times it learns from each answer (default: 8)")
    command.add_argument("--batch-size", type=COUNT, default=2, metavar="N", help="answers it learns from at once (default: 2)")
    command.add_argument("--learning-rate", type=POSITIVE, default=1e-3, metavar="X", help="the highest (default: 0.001)")
    command.add_argument("--seed", type=int, default=0, help="of answers, weights and order (default: 0)")
    command.flag("--dtype", default="auto", choices=DTYPES, help="of the model; auto: that of the weights. The head learns in float32")
    command.flag("--device", type=worker["device"], default="auto", help="cpu, cuda, cuda:N, or auto: the GPU if there is one")
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")
