"""`twostep generate`: one prompt, the answer streamed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import cast

from twostep.cli._connect import client_of
from twostep.cli._flags import sampling_of, urgency_of
from twostep.client import SamplingOptions
from twostep.errors import InvalidRequest
from twostep.process.printable import harmless


def run(args: argparse.Namespace) -> int:
    prompt = args.prompt if args.prompt != "-" else _read_stdin()
    sampling = cast(SamplingOptions, sampling_of(args))
    if args.json_schema:
        sampling["json_schema"] = _schema(args.json_schema)
    urgency = urgency_of(args)
    with (
        client_of(args) as client,
        client.generate(prompt, model=args.model, migrate=not args.no_migrate, **urgency, **sampling) as answer,
    ):
        if args.json:
            print(json.dumps(dataclasses.asdict(answer.result()), ensure_ascii=False))
            return 0
        shown = sys.stdout.isatty()
        for piece in answer:
            print(harmless(piece.text) if shown else piece.text, end="", flush=True)
        print()
    return 0


def _schema(given: str) -> str:
    if given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--json-schema {given}: {error}; give a file with a JSON Schema, or the schema itself") from error


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise InvalidRequest('there is no prompt; give one, as in: twostep generate "Once upon a time"')
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not UTF-8 text: {error}; convert it first") from error
