"""An EAGLE-3 head on one GPU: what it costs, and whether answers are those without.

    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_draft_heads.py                      # Llama-3.1-8B's shape, random weights, bfloat16
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_draft_heads.py --head DIR           # and SmolLM2-135M with a trained head
    PYTHONPATH=.:benchmarks python -P benchmarks/gpu_draft_heads.py --device cpu --tiny  # a dry run

The head is random, of its model's shape, with 32000 tokens: it is hardly ever right, so that times are told and no gain. Of a step, from
one output to the next, the median: `plain` without the head; `idle` with it, where nothing is drafted: what steps leave for it; `drafts`
where three tokens of each sequence are drafted and computed in every step. `rounds` is what drafting them takes, the host's wait included,
and `round 1` what one token of each does.

Then, right tokens: of a small model in float32, greedy and drawn answers with the head's drafts in every step, and without. DIR is of
`twostep lab eagle`, with its folder `training`, whose held back prompts are asked one by one; how much is drafted is then the engine's
choice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_drafts import held_back
from gpu_step_loop import BLOCK_SIZE, CONTEXT, SMALL, make

from twostep.engine.batch import SamplingRow
from twostep.engine.engine import Engine, EngineConfig
from twostep.engine.generate import generate
from twostep.engine.types import EngineRequest
from twostep.lab.bench.shapes import LLAMA_8B
from twostep.model.eagle.config import EagleConfig
from twostep.model.eagle.head import EagleHead
from twostep.model.families.config import ModelConfig
from twostep.model.families.decoder import Decoder
from twostep.model.heads.eagle import EagleDrafts
from twostep.model.heads.head import DraftHead
from twostep.model.heads.source import HeadSource
from twostep.model.kernels.ops import Ops
from twostep.model.loading.store import default_cache_dir
from twostep.model.runner.head_proposer import HeadProposer
from twostep.model.runner.head_rounds import DraftRow
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.settings.reading import FlagParser
from twostep.settings.speculative import SpeculativeConfig
from twostep.text.model_card import ModelCard
from twostep.worker.config import WorkerConfig
from twostep.worker.local_engine import LocalEngine
from twostep.worker.model import load_model, resolve_config

DRAFTS = 3
DRAFTING = SpeculativeConfig(method="eagle3", model="random", num_speculative_tokens=DRAFTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomHead(HeadSource):
    """A head of the model's shape, made on its device."""

    num_tokens: int

    def state_size(self, target: ModelConfig) -> int:
        return target.hidden_size

    def load(self, model: Decoder, config: ModelConfig, ops: Ops, device: str) -> DraftHead:
        assert config.rope is not None
        shape = EagleConfig(
            vocab_size=config.vocab_size,
            draft_vocab_size=self.num_tokens,
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            rope=config.rope,
            max_model_len=config.max_model_len,
            layers=(0, 1, 2) if config.num_layers < 6 else (),
        )
        torch.manual_seed(0)
        with torch.device(device):
            head = EagleHead(shape, num_positions=1).to(model.dtype).requires_grad_(False)
        head.use_embedding(model.embedding)
        head.use_tokens(torch.arange(0, config.vocab_size, config.vocab_size // self.num_tokens, device=device)[: self.num_tokens])
        return EagleDrafts(head, model, ops, config.num_layers + 1, 0)


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head", type=Path)
    parser.add_argument("--prompts", type=int, default=16, help="so many of the head's")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    if args.device == "cpu":
        torch.set_num_threads(1)
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if args.tiny:
        args.batch, args.steps, args.prompts = [1, 3], 6, 2
    measure_steps(args.batch, args.steps, args.device, tiny=args.tiny)
    check_tokens(args.device)
    if args.head is not None:
        serve_trained(args.head, args.prompts, args.device)
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


def check_tokens(device: str) -> None:
    options: dict[str, Any] = {"num_blocks": 200, "max_num_seqs": 64, "max_model_len": 512, "device": device}
    bounds: dict[str, Any] = {"max_num_batched_tokens": 256, "max_num_seqs": 64, "hash_unit": BLOCK_SIZE}
    rng = np.random.default_rng(1)
    requests = [
        request(f"{i}", rng.integers(0, 5000, 5 + 9 * i).tolist(), 40, temperature=0.0 if i % 3 else 0.7, seed=i) for i in range(12)
    ]
    plain = generate(Engine(make(SMALL, **options), EngineConfig(**bounds)), requests)
    runner = make(SMALL, **options, head=RandomHead(method="eagle3", head_dir=Path(), most_tokens=DRAFTS, num_tokens=2000))
    engine = Engine(runner, EngineConfig(**bounds, speculative=DRAFTING), proposer=HeadProposer(runner))
    drafted = generate(engine, requests)
    same = sum([token.token_id for token in one] == [token.token_id for token in other] for one, other in zip(plain, drafted, strict=True))
    stats = engine.stats()
    failed = ", THE HEAD FAILED" if stats.drafting_failed else ""
    print(
        f"small model, float32: {same} of {len(requests)} answers are the same; {sum(stats.num_drafted)} tokens drafted{failed}", flush=True
    )


def request(name: str, prompt: Sequence[int], num_tokens: int, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **sampling)
    return EngineRequest(seq_id=name, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=params, prefix_key=b"benchmark")


def measure_steps(batches: Sequence[int], num_steps: int, device: str, *, tiny: bool) -> None:
    shape, context = (SMALL, 40) if tiny else (LLAMA_8B, CONTEXT)
    largest = max(batches)
    # A row of a draft takes a place in a step as a sequence does.
    rows = (1 + DRAFTS) * largest
    length = context + (2 + DRAFTS) * num_steps + 64
    options: dict[str, Any] = {
        "num_blocks": largest * (-(-length // BLOCK_SIZE) + 2) + 64,
        "max_num_seqs": rows,
        "max_model_len": 2048,
        "device": device,
    }
    bounds: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": rows, "max_waiting": largest, "hash_unit": BLOCK_SIZE}
    # Two engines have one pool, one after the other.
    bounds["enable_prefix_caching"] = False
    random = RandomHead(method="eagle3", head_dir=Path(), most_tokens=DRAFTS, num_tokens=2000 if tiny else 32000)
    plain, with_head = make(shape, **options), make(shape, **options, head=random)
    proposer = HeadProposer(with_head)
    engines = {
        "plain": Engine(plain, EngineConfig(**bounds)),
        "idle": Engine(with_head, EngineConfig(**bounds)),
        "drafts": Engine(with_head, EngineConfig(**bounds, speculative=DRAFTING), proposer=proposer),
    }
    print(f"{'batch':>6}{'plain':>9}{'idle':>9}{'drafts':>9}{'rounds':>9}{'round 1':>9}   ms; same greedy answers", flush=True)
    for batch in batches:
        prompts = np.random.default_rng(0).integers(0, 5000, (batch, context)).tolist()
        times, answers = dict[str, float](), dict[str, dict[str, list[int]]]()
        for name, engine in engines.items():
            times[name], answers[name] = step_ms(engine, prompts, num_steps)
        rounds = [rounds_ms(with_head, batch, context, count) for count in (DRAFTS, 1)]
        same = sum(answers["plain"][each][:num_steps] == answers["drafts"][each][:num_steps] for each in answers["plain"])
        shown = "".join(f"{each:9.3f}" for each in (*times.values(), *rounds))
        print(f"{batch:6}{shown}   {same} of {batch}{', THE HEAD FAILED' if proposer.failed else ''}", flush=True)


def step_ms(engine: Engine, prompts: Sequence[Sequence[int]], num_steps: int) -> tuple[float, dict[str, list[int]]]:
    """Returns the median from one output to the next where all sequences decode, and the tokens of each, at least as many as steps."""
    answers: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        engine.submit(request(f"{number}", prompt, (2 + DRAFTS) * num_steps, temperature=0.0))
    times, warm = list[float](), 4
    while len(times) < num_steps + warm:
        output = engine.step()
        assert not output.failures, output.failures
        for token in output.tokens:
            answers.setdefault(token.seq_id, []).append(token.token_id)
        if not output.num_prefill_tokens and len(set(output.tokens.seq_ids)) == len(prompts):
            times.append(time.perf_counter())
    for name in answers:
        engine.cancel(name)
    engine.settle_launched()
    return statistics.median(after - before for before, after in itertools.pairwise(times[warm:])) * 1e3, answers


def rounds_ms(runner: ModelRunner, batch: int, context: int, count: int) -> float:
    """Returns what drafting so many tokens of each sequence takes: greedy, over blocks that are nobody's now."""
    assert runner.head is not None
    num_blocks = -(-context // BLOCK_SIZE)
    sampling = [SamplingRow(SamplingParams(max_tokens=9, temperature=0.0), 0, (), 0, frozenset())] * count
    rows = [DraftRow(5, context - 1, range(r * num_blocks, (r + 1) * num_blocks), sampling) for r in range(batch)]
    times = []
    for _ in range(20):
        began = time.perf_counter()
        runner.head.draft(rows)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def serve_trained(head: Path, num_prompts: int, device: str) -> None:
    drafting = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS})
    cache_dir = default_cache_dir(os.environ)
    asked, found = held_back(head)[:num_prompts], dict[str, list[list[int]]]()
    for name, given in (("plain", ""), ("drafts", drafting)):
        config = resolve_config(
            WorkerConfig(
                role="decode",
                model="smollm2-135m-instruct",
                device=device,
                num_blocks=512,
                max_num_seqs=16,
                cache_dir=cache_dir,
                speculative_config=given,
            )
        )
        served = load_model(config)
        assert served.tokenizer_dir is not None
        eos = ModelCard.load(served.tokenizer_dir).eos_token_ids
        engine = LocalEngine(config, served).engine
        found[name], seconds = [], 0.0
        for number, each in enumerate(asked):
            one = EngineRequest(
                seq_id=f"{number}", token_ids=each.prompt, num_prompt_tokens=len(each.prompt), sampling=each.sampling, eos_token_ids=eos
            )
            began = time.perf_counter()
            found[name].append([token.token_id for token in generate(engine, [one])[0]])
            seconds += time.perf_counter() - began
        tokens, stats = sum(map(len, found[name])), engine.stats()
        accepted = ", ".join(f"{right} of {all_}" for right, all_ in zip(stats.num_accepted, stats.num_drafted, strict=True))
        print(
            f"SmolLM2-135M {name:<7}{tokens / seconds:8.0f} tokens/s, {tokens / engine.steps:.2f} a step"
            f"{'; accepted of drafted, by position: ' + accepted if accepted else ''}",
            flush=True,
        )
    same = sum(one == other for one, other in zip(found["plain"], found["drafts"], strict=True))
    print(f"SmolLM2-135M: {same} of {len(asked)} answers are the same, in the dtype of its weights", flush=True)


if __name__ == "__main__":
    main()
