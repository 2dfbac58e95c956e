"""What the engine's bfloat16 (or float16) costs beside transformers' own: how far the logits of each are from float32's, and how often the
likeliest token is another.

    python benchmarks/precision.py --dtype bfloat16

Prompts are pieces of this project's pages. The engine computes each but its last tokens in one chunk and those one by one, as it would
decode them; the rows compared are these. Errors are root mean squares over the standard deviation of float32's logits.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from twostep.engine.batch import Batch, SamplingRow
from twostep.model.loading.store import DEFAULT_MODEL, default_cache_dir, resolve
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams

BLOCK_SIZE = 16


def engine_logits(runner: ModelRunner, ids: Sequence[int], num_last: int) -> torch.Tensor:
    """[num_last, vocab_size] of the last tokens, float32."""
    rows = []
    for start, end in [(0, len(ids) - num_last), *((n, n + 1) for n in range(len(ids) - num_last, len(ids)))]:
        if start == end:
            continue
        num_tokens = end - start
        row = SamplingRow(
            params=SamplingParams(max_tokens=1), position=0, history=ids[:end], num_prompt_tokens=len(ids), stop_ids=frozenset()
        )
        batch = Batch(
            token_ids=np.asarray(ids[start:end], dtype=np.int64),
            positions=np.arange(start, end, dtype=np.int64),
            query_start=np.asarray([0, num_tokens], dtype=np.int32),
            seq_lens=np.asarray([end], dtype=np.int32),
            block_tables=np.arange(-(-len(ids) // BLOCK_SIZE), dtype=np.int32)[None],
            slots=np.arange(start, end, dtype=np.int64),
            sample_rows=np.asarray([num_tokens - 1], dtype=np.int64),
            sampling=[row],
        )
        rows.append(runner.forward(batch)[0].float())
    return torch.stack(rows[-num_last:])


def pieces(tokenizer: transformers.PreTrainedTokenizerBase, count: int, num_tokens: int) -> list[list[int]]:
    rng = random.Random(1)
    pages = [page.read_text() for page in sorted(Path(__file__).parents[1].glob("docs/*.md"))]
    result = []
    for _ in range(count):
        text = rng.choice(pages)
        start = rng.randrange(max(1, len(text) - 16 * num_tokens))
        result.append(list(tokenizer(text[start : start + 16 * num_tokens])["input_ids"][:num_tokens]))
    return result


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().mean().sqrt())


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    """Share of rows with the same likeliest token."""
    return float((a.argmax(-1) == b.argmax(-1)).float().mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=160, help="of each prompt")
    parser.add_argument("--last", type=int, default=12, help="tokens of each whose logits are compared")
    args = parser.parse_args()
    if not 0 < args.last < args.tokens:
        parser.error("--last: give at least 1 and fewer than --tokens")
    directory = resolve(args.model, cache_dir=default_cache_dir(os.environ))
    dtype = getattr(torch, args.dtype)
    exact = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    runner = ModelRunner(directory, num_blocks=-(-args.tokens // BLOCK_SIZE) + 1, block_size=BLOCK_SIZE, dtype=args.dtype)
    print(f"{args.model}, {args.dtype}: distance from float32, and share of rows with its likeliest token")
    print(f"{'tokens':>7} {'engine':>16} {'transformers':>16} {'engine - transformers':>22}")
    for ids in pieces(transformers.AutoTokenizer.from_pretrained(directory), args.prompts, args.tokens):
        with torch.inference_mode():
            want = exact(torch.tensor([ids])).logits[0, -args.last :]
            other = theirs(torch.tensor([ids])).logits[0, -args.last :].float()
        got = engine_logits(runner, ids, args.last)

        told = [f"{distance(logits, want) / float(want.std()):9.4f} {agreement(logits, want):6.2f}" for logits in (got, other)]
        print(f"{len(ids):7d} {told[0]} {told[1]} {distance(got, other) / float(want.std()):22.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
