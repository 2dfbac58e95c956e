"""Whether compressing KV on the wire pays: real KV of a real text; zstd by level, with bytes as they lie in the pool and with bytes of
equal significance side by side; and the lossy encodings' cost.

    PYTHONPATH=. python benchmarks/kv_compression.py ~/.cache/twostep/models/smollm2-135m-instruct-r2 docs/architecture.md

Rates are of plain bytes, by the CPU time of one thread, so that others on the machine count little. A link gains where it is slower than

    stream   the slower of both rates: chunks follow each other, and each stage works while the others do
    alone    (1 - size) / (1 / encode + 1 / decode): nothing overlaps, what was saved on the link is spent at its ends
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from tokenizers import Tokenizer

from kv_transfer import wire_encoding
from kv_transfer.checksum import checksum
from twostep.cluster.records import LayoutRecord
from twostep.engine.batch import Batch, SamplingRow
from twostep.model.runner.model_runner import ModelRunner
from twostep.sampling_params import SamplingParams
from twostep.worker.model import layout_of

BLOCK_SIZE = 16
CHUNK_BYTES = 8 << 20
Encode = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.uint8]]
Decode = Callable[[npt.NDArray[np.uint8], int], npt.NDArray[np.uint8]]


def prompt(token_ids: list[int]) -> Batch:
    """One prompt, of which the last token's logits are wanted."""
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
        sample_rows=np.asarray([count - 1]),
        sampling=[row],
    )


def seconds(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.thread_time()
        function()
        times.append(time.thread_time() - started)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("text", type=Path, help="a file to read")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ids = Tokenizer.from_file(str(args.model / "tokenizer.json")).encode(args.text.read_text()).ids[: args.tokens]
    count = len(ids) // BLOCK_SIZE
    print(f"{args.model.name}, {count * BLOCK_SIZE} tokens of {args.text}; chunks of {CHUNK_BYTES >> 20} MiB")
    print("KV       | bytes    | level | of its size | encode MB/s | decode MB/s | gains below, stream | alone")
    for dtype in ("float32", "bfloat16"):
        runner = ModelRunner(args.model, num_blocks=count + 1, block_size=BLOCK_SIZE, dtype=dtype)
        runner.forward(prompt(ids))
        blocks = np.empty((count, runner.kv_shape.block_bytes), np.uint8)
        runner.read_blocks(list(range(count)), blocks)
        layout = layout_of(runner.kv_shape, "measured")
        chunks = np.array_split(blocks, -(-blocks.size // CHUNK_BYTES))
        for level in (1, 3):
            _plain(dtype, level, chunks, args.repeats)
            _report(f"{dtype:<8} | shuffled | {level:>5}", chunks, *_on_the_wire("zstd", layout, level), args.repeats)
        for encoding in wire_encoding.LOSSY:
            _report(f"{dtype:<8} | {encoding:<8} |     -", chunks, *_on_the_wire(encoding, layout), 1, lossy=True)
        each = seconds(partial(_sums, chunks), args.repeats)
        print(f"{dtype:<8} | xxh3_64 checksum alone: {blocks.size / each / 1e6:.0f} MB/s")


def _sums(chunks: list[npt.NDArray[np.uint8]]) -> list[int]:
    return [checksum(c.reshape(-1)) for c in chunks]


def _on_the_wire(encoding: str, layout: LayoutRecord, level: int = 1) -> tuple[Encode, Decode]:
    return (
        lambda blocks: wire_encoding.encode(encoding, blocks, layout, level=level),
        lambda data, n: wire_encoding.decode(encoding, data, n, layout),
    )


def _plain(dtype: str, level: int, chunks: list[npt.NDArray[np.uint8]], repeats: int) -> None:
    _report(
        f"{dtype:<8} | plain    | {level:>5}",
        chunks,
        lambda x: np.frombuffer(zstandard.ZstdCompressor(level=level).compress(x.data), np.uint8),
        lambda data, n: np.frombuffer(zstandard.ZstdDecompressor().decompress(data.data), np.uint8).reshape(n, -1),
        repeats,
    )


def _report(
    title: str,
    chunks: list[npt.NDArray[np.uint8]],
    encode: Encode,
    decode: Decode,
    repeats: int,
    *,
    lossy: bool = False,
) -> None:
    num_bytes = sum(chunk.size for chunk in chunks)
    encoded = [encode(chunk) for chunk in chunks]
    assert lossy or all(np.array_equal(decode(data, len(chunk)), chunk) for data, chunk in zip(encoded, chunks, strict=True))
    rates = [
        num_bytes / seconds(lambda: [encode(chunk) for chunk in chunks], repeats),
        num_bytes / seconds(lambda: [decode(data, len(chunk)) for data, chunk in zip(encoded, chunks, strict=True)], repeats),
    ]
    size = sum(data.size for data in encoded) / num_bytes
    alone = max(0.0, 1 - size) / (1 / rates[0] + 1 / rates[1])
    gains = f"{min(rates) * 8 / 1e9:12.1f} Gbit/s | {alone * 8 / 1e9:.2f} Gbit/s"
    print(f"{title} | {size:11.3f} | {rates[0] / 1e6:11.0f} | {rates[1] / 1e6:11.0f} | {gains}", flush=True)


if __name__ == "__main__":
    main()
