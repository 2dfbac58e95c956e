"""Measures a draft model on a CPU, one thread, one user: processor time of an engine with drafts by the first layers of the
served model, by all of it, and without.

    python benchmarks/cpu_draft_model.py [--layers 2 8 20 30] [--tokens 48] [--rounds 3]

No smaller model has this one's vocabulary: its first layers alone are no model that anybody would train, and it is not smaller than itself.
What is shown is the mechanism, and that what does not pay is left alone. `always`: drafts without a step curve, as many as may be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from twostep.engine.draft_model import DraftModel
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.proposer import WantedDrafts
from twostep.engine.types import EngineRequest
from twostep.model.loading.store import DEFAULT_MODEL, default_cache_dir, resolve
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser
from twostep.settings.speculative import SpeculativeConfig
from twostep.worker.calibration import calibrate

QUESTIONS = ("What is the capital of France?", "Tell me how bread is baked.", "Why is the sky blue?")
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class Timed(DraftModel):
    """Counts the processor's time that it takes."""

    seconds = 0.0

    def prepare(self, wanted: Sequence[WantedDrafts], most_rows: int) -> None:
        began = time.process_time()
        super().prepare(wanted, most_rows)
        self.seconds += time.process_time() - began


def first_layers(model_dir: Path, num_layers: int, into: Path) -> Path:
    into.mkdir()
    config = json.loads((model_dir / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    shutil.copy(model_dir / "tokenizer.json", into)
    weights = load_file(model_dir / "model.safetensors")
    kept = {
        name: value
        for name, value in weights.items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < num_layers
    }
    save_file(kept, into / "model.safetensors")
    return into


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 8, 20, 30])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model_dir = resolve(DEFAULT_MODEL, cache_dir=default_cache_dir(os.environ))
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(CHAT.format(question)).ids for question in QUESTIONS]
    served = ModelRunner(model_dir, num_blocks=64, dtype="bfloat16")
    curve = calibrate(served, step_tokens=256, max_num_seqs=16)
    print(
        "a step:",
        "not measured"
        if curve is None
        else f"{1e3 * curve.decode_step_s(1, 60):.1f} ms, {1e3 * curve.decode_step_s(5, 300):.1f} of 5 rows",
    )
    config = SpeculativeConfig(method="draft_model", model="first layers")
    with tempfile.TemporaryDirectory() as scratch:
        drafts = {}
        for count in args.layers:
            runner = ModelRunner(first_layers(model_dir, count, Path(scratch) / str(count)), num_blocks=64, dtype="bfloat16")
            drafts[count] = runner
            fixed_s, per_row_s = DraftModel(runner, max_num_seqs=16).time
            print(f"{count} layers: a token drafted takes {1e3 * (fixed_s + per_row_s):.1f} ms, a row more {1e3 * per_row_s:.2f}")
        for temperature in (0.0, 1.0):
            seconds: dict[tuple[int, str], list[float]] = {}
            shares: dict[tuple[int, str], list[float]] = {}
            counts: dict[tuple[int, str], tuple[int, int, int]] = {}
            for attempt in range(args.rounds):
                for case in [(0, "none"), *((count, kind) for count in drafts for kind in ("always", "chosen"))]:
                    count, kind = case
                    bounds = EngineConfig(max_num_batched_tokens=256, max_num_seqs=16, speculative=config if count else None)
                    draft = Timed(drafts[count], max_num_seqs=16) if count else None
                    engine = Engine(served, bounds, proposer=draft)
                    engine.set_curve(curve if kind == "chosen" else None)
                    began = time.process_time()
                    for i, prompt in enumerate(prompts):
                        params = SamplingParams(max_tokens=args.tokens, temperature=temperature, seed=i, ignore_eos=True)
                        generate(
                            engine,
                            [EngineRequest(seq_id=f"{attempt}-{i}", token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params)],
                        )
                    seconds.setdefault(case, []).append(time.process_time() - began)
                    stats = engine.stats()
                    shares.setdefault(case, []).append(0.0 if draft is None else draft.seconds / seconds[case][-1])
                    counts[case] = engine.steps, sum(stats.num_drafted), sum(stats.num_accepted)
            for (count, kind), taken in seconds.items():
                ratios = sorted(one / other for one, other in zip(taken, seconds[0, "none"], strict=True))
                steps, num_drafted, num_accepted = counts[count, kind]
                print(
                    f"temperature {temperature:g}  {count:2} layers {kind:7} processor s {statistics.median(taken):6.2f}"
                    f"  of that without {statistics.median(ratios):5.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                    f"  in the draft {statistics.median(shares[count, kind]):6.1%}"
                    f"  steps {steps:4}  drafted {num_drafted:4}  right {num_accepted:4}"
                )


if __name__ == "__main__":
    main()
