"""What quantized KV costs a real model, on the CPU: logits against those of exact KV, and the text's likelihood.

    PYTHONPATH=. python benchmarks/quantized_kv.py ~/.cache/twostep/models/smollm2-135m-instruct-r2 docs/architecture.md

float32, one prompt of the text's first tokens, so that all attention but each token's own goes over quantized KV.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from twostep.engine.batch import Batch, SamplingRow
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams

BLOCK_SIZE = 16


def whole_prompt(token_ids: list[int]) -> Batch:
    """All rows are sampled: logits of every position."""
    count = len(token_ids)
    row = SamplingRow(
        params=SamplingParams(max_tokens=1, temperature=0.0), position=0, history=(), num_prompt_tokens=0, stop_ids=frozenset()
    )
    return Batch(
        token_ids=np.asarray(token_ids, np.int64),
        positions=np.arange(count),
        query_start=np.asarray([0, count], np.int32),
        seq_lens=np.asarray([count], np.int32),
        block_tables=np.arange(-(-count // BLOCK_SIZE), dtype=np.int32)[None],
        slots=np.arange(count),
        sample_rows=np.arange(count),
        sampling=[row] * count,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("text", type=Path, help="a file to read")
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    ids = Tokenizer.from_file(str(args.model / "tokenizer.json")).encode(args.text.read_text()).ids[: args.tokens]
    following = torch.tensor(ids[1:])[:, None]
    exact = None
    print(f"{args.model.name}, {len(ids)} tokens of {args.text}")
    print("KV    | logits' error  median row | same best token | nats a token")
    for kv in ("auto", "int8", "fp8"):
        runner = ModelRunner(args.model, num_blocks=-(-len(ids) // BLOCK_SIZE), block_size=BLOCK_SIZE, dtype="float32", kv_cache_dtype=kv)
        logits = runner.forward(whole_prompt(ids)).float()
        exact = logits if exact is None else exact
        difference = logits - exact
        error = float(difference.norm() / exact.norm())
        median = float((difference.norm(dim=1) / exact.norm(dim=1)).median())
        same = float((logits.argmax(1) == exact.argmax(1)).float().mean())
        nats = float(-torch.log_softmax(logits[:-1], 1).gather(1, following).mean())
        print(f"{kv:<5} | {error:13.4f}  {median:10.4f} | {same:15.3f} | {nats:12.4f}", flush=True)


if __name__ == "__main__":
    main()
