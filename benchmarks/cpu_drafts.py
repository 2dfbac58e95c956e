"""Measures what drafts save on a CPU: one user's answers with and without them, in turns.

    python benchmarks/cpu_drafts.py                 objects of a JSON schema, drafted by their grammar and by looking up
    python benchmarks/cpu_drafts.py --head DIR      an EAGLE-3 head, over the prompts that its training held back

DIR is of `twostep lab eagle`, with its folder `training`. Processor time is told beside the clock's: other work on the machine hardly
changes it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from twostep.engine.engine import Engine
from twostep.engine.generate import generate
from twostep.engine.grammar import GrammarCompiler, GrammarState
from twostep.engine.types import EngineRequest
from twostep.model.loading.store import default_cache_dir
from twostep.sampling_params import Grammar, GrammarKind, SamplingParams
from twostep.settings.reading import FlagParser
from twostep.step_curve import StepCurve, StepWorkload
from twostep.text.chat_template import ChatTemplate
from twostep.text.model_card import ModelCard
from twostep.worker.config import WorkerConfig
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import load_model, resolve_config

SUBJECTS = ("the city of Paris", "a bicycle", "the planet Mars", "a cup of coffee")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "category": {"enum": ["place", "thing", "food", "animal"]},
        "description": {"type": "string", "maxLength": 120},
        "number_of_visitors": {"type": "integer", "minimum": 0, "maximum": 1000000},
        "is_available_today": {"type": "boolean"},
    },
    "required": ["name", "category", "description", "number_of_visitors", "is_available_today"],
    "additionalProperties": False,
}


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--head", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=0, help="so many of the head's; 0: all")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = WorkerConfig(
        role="decode",
        model=args.model,
        dtype=args.dtype,
        device="cpu",
        num_blocks=512,
        cpu_threads=args.threads,
        cache_dir=default_cache_dir(os.environ),
    )
    method = {"method": "eagle3", "model": str(args.head)} if args.head else {"method": "ngram"}
    drafting = json.dumps(method | {"num_speculative_tokens": args.tokens})
    engines = {name: _engine(replace(config, speculative_config=given)) for name, given in (("plain", ""), ("drafts", drafting))}
    asked = held_back(args.head)[: args.prompts or None] if args.head else _objects(engines["plain"][1])
    eos = ModelCard.load(engines["plain"][1]).eos_token_ids
    if (curve := engines["drafts"][2]) is not None:
        works = [StepWorkload(prompt_tokens=0, pairs=0, decodes=1 + drafts, context=150 * (1 + drafts)) for drafts in range(4)]
        shown = ", ".join(f"{curve.step_s(work) * 1e3:.1f}" for work in works)
        print(f"by the worker's own curve, ms of a step with 0 to 3 drafts at 150 tokens: {shown}")
    found: dict[tuple[str, str], list[tuple[float, float, int, int]]] = defaultdict(list)
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    same = 0
    for turn in range(args.rounds):
        for number, each in enumerate(asked):
            kind = "greedy" if each.sampling.temperature == 0 else "drawn"
            answers, seconds = {}, {}
            for name in sorted(engines, reverse=bool((turn + number) % 2)):
                engine = engines[name][0]
                request = EngineRequest(
                    seq_id=f"{turn}-{number}",
                    token_ids=each.prompt,
                    num_prompt_tokens=len(each.prompt),
                    sampling=each.sampling,
                    eos_token_ids=eos,
                    grammar=each.grammar,
                )
                steps, cpu, clock = engine.steps, time.process_time(), time.perf_counter()
                answers[name] = [token.token_id for token in generate(engine, [request])[0]]
                seconds[name] = time.perf_counter() - clock, time.process_time() - cpu
                found[kind, name].append((*seconds[name], len(answers[name]), engine.steps - steps))
            same += answers["plain"] == answers["drafts"]
            if len(answers["plain"]) == len(answers["drafts"]):
                for place, what in enumerate(("clock", "CPU")):
                    ratios[kind, what].append(seconds["plain"][place] / seconds["drafts"][place])
    print(f"torch {torch.__version__}, {args.threads} threads, {len(asked)} prompts, {args.rounds} rounds; same answers: {same}")
    for (kind, name), rows in found.items():
        clock, cpu, tokens, steps = map(sum, zip(*rows, strict=True))
        print(f"{kind:<7} {name:<6} {tokens / clock:6.1f} tokens/s, {tokens / cpu:6.1f} per CPU second, {tokens / steps:.2f} tokens a step")
    for (kind, what), values in ratios.items():
        print(f"{kind:<7} times as fast by the {what}, of an answer: median {statistics.median(values):.2f}")
    stats = engines["drafts"][0].stats()
    pairs = zip(stats.num_accepted, stats.num_drafted, strict=True)
    print("accepted of drafted, by position: " + ", ".join(f"{right} of {drafted}" for right, drafted in pairs))


@dataclass(frozen=True)
class AskedRequest:
    prompt: Sequence[int]
    sampling: SamplingParams
    grammar: GrammarState | None = None


def held_back(head: Path) -> list[AskedRequest]:
    lines = (head / "training" / "answers.jsonl").read_text().splitlines()
    return [AskedRequest(each["prompt"], SamplingParams(**each["sampling"])) for each in map(json.loads, lines) if each["held_back"]]


def _objects(model_dir: Path) -> list[AskedRequest]:
    """Each subject twice: greedy, and drawn at temperature 0.7."""
    card, tokenizer = ModelCard.load(model_dir), Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    compiler = GrammarCompiler(model_dir, vocab_size=card.vocab_size, eos_token_ids=card.eos_token_ids)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    template = ChatTemplate(card.chat_template, card.special_tokens)
    asked = []
    for subject in SUBJECTS:
        text = template.render([{"role": "user", "content": f"Describe {subject} as a JSON object."}])
        for temperature in (0.0, 0.7):
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=160, grammar=grammar)
            asked.append(AskedRequest(tokenizer.encode(text, add_special_tokens=False).ids, params, compiler.compile(grammar)))
    return asked


def _engine(config: WorkerConfig) -> tuple[Engine, Path, StepCurve | None]:
    """With the directory of the model's tokenizer."""
    config = resolve_config(config)
    model = load_model(config)
    assert model.tokenizer_dir is not None
    return LocalEngine(config, model).engine, model.tokenizer_dir, model.curve


if __name__ == "__main__":
    main()
