"""Fits a preset's step curves to measured steps, so that `twostep plan` reckons with what was measured.

    python benchmarks/fit_preset.py twostep/lab/plan/presets/h200-llama-3.1-8b-graphs.json
    python benchmarks/fit_preset.py FILE --steps steps.jsonl --source "benchmarks/RESULTS.md at 4cb3be0b, GPU: steps as graphs"

`steps.jsonl` has a measured step a line, {"prompt_tokens": 192, "pairs": 18432, "decodes": 128, "context": 150272, "ms": 13.5}, of which
`pairs` (else those of a fresh prompt) and what is 0 may be left out. They replace the preset's steps of the same work. Steps of decodes
alone make the curve `decode`; all together make `mixed`, and `prefill` is the same. Prints each step beside its curve; ends with 1 if
one is off by more than 8 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from twostep.settings.reading import FlagParser
from twostep.step_curve import StepCurve, StepWorkload, chunk_pairs
from twostep.worker.curve_fit import StepSample, fit_curve

_TOLERANCE = 0.08


def main() -> int:
    parser = FlagParser(prog="python benchmarks/fit_preset.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", type=Path)
    parser.add_argument("--steps", type=Path, help="measured steps, one a line")
    parser.add_argument("--source", default="", help="where these were measured")
    args = parser.parse_args()
    raw = json.loads(args.preset.read_text())
    if args.steps:
        new = [_measured(json.loads(line), args.source) for line in args.steps.read_text().splitlines() if line]
        known = {_work(step) for step in new}
        raw["measured"] = [step for step in raw["measured"] if _work(step) not in known] + new
    alone = [step for step in raw["measured"] if not step["prompt_tokens"]]
    # What decodes add to a step with prompts is as well known from steps without.
    mixed, decode = _fit(raw["measured"]), _fit(alone)
    raw["curves"] = {"prefill": _json(mixed), "decode": _json(decode), "mixed": _json(mixed)}
    args.preset.write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n")
    errors = []
    for step in raw["measured"]:
        seconds = (mixed if step["prompt_tokens"] else decode).step_s(_work(step))
        errors.append(seconds * 1e3 / step["ms"] - 1)
        print(f"{step['prompt_tokens']:6} + {step['decodes']:3}  {step['ms']:7.2f} ms  {seconds * 1e3:7.2f} ms  {errors[-1]:+.1%}")
    return int(max(map(abs, errors)) > _TOLERANCE)


def _measured(raw: dict[str, Any], source: str) -> dict[str, Any]:
    tokens = raw.get("prompt_tokens", 0)
    return {
        "role": "prefill" if tokens else "decode",
        "prompt_tokens": tokens,
        "pairs": raw.get("pairs", chunk_pairs(tokens, 0)),
        "decodes": raw.get("decodes", 0),
        "context": raw.get("context", 0),
        "ms": raw["ms"],
        "source": raw.get("source", source),
    }


def _work(step: dict[str, Any]) -> StepWorkload:
    return StepWorkload(**{name: step[name] for name in ("prompt_tokens", "pairs", "decodes", "context")})


def _fit(steps: list[dict[str, Any]]) -> StepCurve:
    return fit_curve([StepSample(_work(step), step["ms"] / 1e3) for step in steps])


def _json(curve: StepCurve) -> dict[str, float]:
    """Terms of four digits, without those that are nothing."""
    return {name: float(f"{value:.4g}") for name, value in dataclasses.asdict(curve).items() if value or name == "per_row_s"}


if __name__ == "__main__":
    sys.exit(main())
