"""Prefill attention on one GPU: this project's kernels beside torch's cuDNN and FlashAttention-2, and the card's own matmul rate.

    PYTHONPATH=. python benchmarks/gpu_prefill_attention.py                all shapes
    PYTHONPATH=. python benchmarks/gpu_prefill_attention.py --sweep        tiles of the portable kernel at two of them, to choose them anew
    PYTHONPATH=. python benchmarks/gpu_prefill_attention.py --check-only   errors only
    PYTHONPATH=. python benchmarks/gpu_prefill_attention.py --kv-cache-dtype fp8 int8    over quantized KV, beside exact KV

Llama-3.1-8B's heads (32 query, 8 KV, 128 wide), bf16, blocks of 16 in random order in a pool of 32 layers. TFLOP/s count the visible
keys of each query, 4 * 32 * 128 per key. A time is the median of CUDA graph replays in turns. torch's kernels know no blocks: they get
the chunk's own keys and values as they lie in the fused projection, and of a prefix a dense copy that costs nothing here; prefix and
chunk are two calls, whose merging is not counted either.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from twostep.engine.batch import Batch, KvShape
from twostep.model.kernels import triton_prefill
from twostep.model.kernels.hopper_prefill import hopper_attention
from twostep.model.kernels.hopper_prefill_quantized import hopper_quantized_attention
from twostep.model.kernels.torch_attention import AttentionSpec, RopeTables
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.kernels.triton_prefill import HOPPER_ROWS, TileShape, plan_tiles, prefill_attention, tile_shape
from twostep.model.step.kv_cache import KvCache
from twostep.settings.reading import FlagParser

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 32, 8, 128, 16, 32
SHARE = NUM_HEADS // NUM_KV_HEADS
# (tokens in the pool before, tokens of the chunk) of each sequence
SHAPES = {
    "1 x 2048": [(0, 2048)],
    "1 x 8192": [(0, 8192)],
    "1 x 32768": [(0, 32768)],
    "8 x 2048": [(0, 2048)] * 8,
    "2048 after 6144": [(6144, 2048)],
    "512 after 8192": [(8192, 512)],
    "64 after 8192": [(8192, 64)],
    "ragged 8192": [(0, 5000), (0, 17), (1000, 1500), (100, 40), (0, 1635)],
}
Call = Callable[[], object]


def medians_us(calls: Sequence[Call], *, rounds: int = 4, repeats: int = 7) -> list[float]:
    """Device times of calls that take turns, each from a CUDA graph; clocks drift, so that neighbours in time are what compares."""
    graphs = []
    for call in calls:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            call()
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        for graph, found in zip(graphs, times, strict=True):
            busy_until = time.perf_counter() + (0.05 if turn == 0 else 0.02)
            while time.perf_counter() < busy_until:
                graph.replay()
                torch.cuda.synchronize()
            for _ in range(repeats):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                found.append(start.elapsed_time(end) * 1e3)
    return [sorted(found)[len(found) // 2] for found in times]


class Inputs(TypedDict):
    """Tensors that a step uploads for its prefill attention, int32 on the device."""

    tiles: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor


class PrefillCase:
    def __init__(self, chunks: list[tuple[int, int]], num_layers: int = NUM_LAYERS, quantization: str = "none") -> None:
        self.counts = np.array([count for _, count in chunks], np.int64)
        self.lens = np.array([context + count for context, count in chunks], np.int64)
        self.contexts = self.lens - self.counts
        self.starts = np.concatenate(([0], np.cumsum(self.counts)))
        self.flop = 4 * NUM_HEADS * HEAD_DIM * float((self.counts * self.contexts + self.counts * (self.counts + 1) / 2).sum())
        blocks = -(-self.lens // BLOCK_SIZE)
        shape = KvShape(
            num_blocks=int(blocks.sum()),
            block_size=BLOCK_SIZE,
            num_layers=num_layers,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            dtype="bfloat16",
            quantization=quantization,
        )
        self.cache, self.layer = KvCache(shape, "cuda"), num_layers // 2
        if self.cache.quantized is None:
            for part in self.cache.tensor[:, self.layer].split(4096):
                part.normal_()
        else:
            for slots in torch.arange(shape.num_blocks * BLOCK_SIZE, device="cuda").split(8192):
                vectors = torch.randn(len(slots), 2 * NUM_KV_HEADS, HEAD_DIM, device="cuda")
                self.cache.quantized.write(self.layer, slots // BLOCK_SIZE, slots % BLOCK_SIZE, vectors)
        order = np.random.default_rng(0).permutation(shape.num_blocks).astype(np.int32)
        self.tables = np.zeros((len(chunks), int(blocks.max())), np.int32)
        for s, ids in enumerate(np.split(order, np.cumsum(blocks)[:-1])):
            self.tables[s, : len(ids)] = ids
        self.qkv = torch.randn(int(self.starts[-1]), (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.out = self.qkv.new_full((len(self.qkv), NUM_HEADS * HEAD_DIM), torch.nan)

    def inputs(self, tokens_per_tile: int) -> Inputs:
        def on_device(array: npt.NDArray[np.integer]) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.int32)).cuda()

        return Inputs(
            tiles=on_device(plan_tiles(self.counts, self.lens, tokens_per_tile)),
            query_start=on_device(self.starts),
            seq_lens=on_device(self.lens),
            block_tables=on_device(self.tables),
        )

    def hopper(self, num_programs: int) -> Call:
        inputs = self.inputs(HOPPER_ROWS // SHARE)
        if self.cache.quantized is not None:
            return lambda: hopper_quantized_attention(
                self.qkv, self.out, self.cache, self.layer, num_heads=NUM_HEADS, num_programs=num_programs, **inputs
            )
        triton_prefill.clear_tails(self.cache, inputs["seq_lens"], inputs["block_tables"])
        return lambda: hopper_attention(
            self.qkv, self.out, self.cache, self.layer, num_heads=NUM_HEADS, num_programs=num_programs, **inputs
        )

    def portable(self, shape: TileShape | None = None) -> Call:
        chosen = shape or tile_shape(torch.bfloat16, HEAD_DIM, SHARE, int(self.counts.max()), quantized=self.cache.quantized is not None)
        inputs = self.inputs(chosen.num_rows // SHARE)
        return lambda: prefill_attention(self.qkv, self.out, self.cache, self.layer, num_heads=NUM_HEADS, shape=chosen, **inputs)

    def torch_sdpa(self, backend: SDPBackend) -> Call | None:
        """None where chunks are ragged: torch then has a call each, or a plan made anew for each step."""
        if len(set(self.counts)) > 1 or len(set(self.contexts)) > 1:
            return None
        heads = self.qkv.view(len(self.counts), int(self.counts[0]), -1, HEAD_DIM).transpose(1, 2)
        q, k, v = heads[:, :NUM_HEADS], heads[:, NUM_HEADS : NUM_HEADS + NUM_KV_HEADS], heads[:, NUM_HEADS + NUM_KV_HEADS :]
        prefix = torch.randn(2, len(q), NUM_KV_HEADS, int(self.contexts[0]), HEAD_DIM, dtype=q.dtype, device="cuda")

        def call() -> None:
            with sdpa_kernel([backend]):
                scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                if prefix.shape[3]:
                    scaled_dot_product_attention(q, prefix[0], prefix[1], enable_gqa=True)

        return call

    def error(self, call: Call, num_rows: int = 64) -> float:
        """Relative error of some rows, the last of each sequence among them, against float32."""
        self.out.fill_(torch.nan)
        call()
        torch.cuda.synchronize()
        rows = np.unique(np.concatenate((np.random.default_rng(1).integers(0, len(self.qkv), num_rows), self.starts[1:] - 1)))
        wrong = norm = 0.0
        for s in range(len(self.counts)):
            mine = rows[(rows >= self.starts[s]) & (rows < self.starts[s + 1])]
            blocks = torch.from_numpy(self.tables[s, : -(-self.lens[s] // BLOCK_SIZE)].astype(np.int64)).cuda()
            kv = self.cache.numbers(self.layer, blocks).float().permute(1, 2, 0, 3, 4).reshape(2, NUM_KV_HEADS, -1, HEAD_DIM)
            k, v = kv[:, :, : self.lens[s]]
            positions = torch.from_numpy(mine - self.starts[s] + self.contexts[s]).cuda()
            for some, at in zip(torch.from_numpy(mine).cuda().split(16), positions.split(16), strict=True):
                q = self.qkv[some, : NUM_HEADS * HEAD_DIM].float().view(-1, NUM_KV_HEADS, SHARE, HEAD_DIM)
                score = torch.einsum("thgd,hkd->thgk", q, k) / HEAD_DIM**0.5
                hidden = torch.arange(k.shape[1], device="cuda") > at[:, None]
                want = torch.einsum("thgk,hkd->thgd", score.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1), v)
                got = self.out[some].float().view(want.shape)
                wrong += float((got - want).square().sum())
                norm += float(want.square().sum())
        return float((wrong / norm) ** 0.5)


def check() -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for name in ("64 after 8192", "1 x 2048", "ragged 8192", "2048 after 6144"):
        case = PrefillCase(SHAPES[name], num_layers=2)
        print(f"error {name:16} portable {case.error(case.portable()):.1e}", flush=True)
        for programs in (1 << 30, sms):
            print(f"error {name:16} hopper, at most {programs} programs: {case.error(case.hopper(programs)):.1e}", flush=True)
    case = PrefillCase([(32768, 7000)])
    print(f"error in a pool of {case.cache.tensor.numel() / 2**31:.1f} x 2^31 numbers: {case.error(case.hopper(sms)):.1e}", flush=True)


def table(with_hopper: bool) -> None:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print(f"matmul 8192: {2 * 8192**3 / medians_us([lambda: a @ b])[0] / 1e6:.0f} TFLOP/s", flush=True)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{'TFLOP/s (us)':16} {'hopper':>16} {'one item each':>16} {'portable':>16} {'cuDNN':>16} {'flash 2':>16}", flush=True)
    for name, chunks in SHAPES.items():
        case = PrefillCase(chunks)
        calls: list[Call | None] = [case.hopper(sms), case.hopper(1 << 30)] if with_hopper else [None, None]
        calls += [case.portable(), case.torch_sdpa(SDPBackend.CUDNN_ATTENTION), case.torch_sdpa(SDPBackend.FLASH_ATTENTION)]
        times = iter(medians_us([call for call in calls if call is not None]))
        found = [None if call is None else next(times) for call in calls]
        cells = ["-" if us is None else f"{case.flop / us / 1e6:.0f} ({us:.0f})" for us in found]
        print(f"{name:16} " + " ".join(f"{cell:>16}" for cell in cells), flush=True)
        del case, calls


def quantized_table(formats: Sequence[str]) -> None:
    """Errors, then rates of both kernels over each format, beside the Hopper kernel over exact KV."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for quantization in formats:
        for name in ("64 after 8192", "ragged 8192", "2048 after 6144"):
            case = PrefillCase(SHAPES[name], num_layers=2, quantization=quantization)
            errors = [case.error(call) for call in (case.portable(), case.hopper(sms), case.hopper(7))]
            print(f"error {quantization:5} {name:16} portable, hopper: " + " ".join(f"{error:.1e}" for error in errors), flush=True)
    names = ["exact", *(f"{kind} {each}" for each in formats for kind in ("hopper", "portable"))]
    print(f"{'TFLOP/s (us)':16} " + " ".join(f"{name:>16}" for name in names), flush=True)
    for name in ("1 x 2048", "1 x 8192", "8 x 2048", "2048 after 6144", "512 after 8192", "64 after 8192"):
        cases = [PrefillCase(SHAPES[name], 4, quantization) for quantization in ("none", *formats)]
        calls = [cases[0].hopper(sms), *(call for case in cases[1:] for call in (case.hopper(sms), case.portable()))]
        cells = [f"{cases[0].flop / us / 1e6:.0f} ({us:.0f})" for us in medians_us(calls, rounds=2)]
        print(f"{name:16} " + " ".join(f"{cell:>16}" for cell in cells), flush=True)


def plan_cost() -> None:
    """Measures the first call of each length in cuDNN."""
    for length in (1000, 1001, 1016, 2500):
        q, k, v = (torch.randn(1, heads, length, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for heads in (32, 8, 8))
        times = []
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        print(f"cuDNN, {length} tokens: first call {times[0]:.1f} ms, second {times[1]:.2f} ms", flush=True)


def mixed() -> None:
    """One step of 16 decodes of 4096 tokens and a chunk of 2048, attention of one layer, all through TritonOps."""
    case = PrefillCase([(4095, 1)] * 16 + [(0, 2048)])
    positions = np.concatenate([np.arange(c, n) for c, n in zip(case.contexts, case.lens, strict=True)])
    seq = np.repeat(np.arange(len(case.counts)), case.counts)
    slots = case.tables[seq, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    batch = Batch(
        token_ids=positions,
        positions=positions,
        query_start=case.starts.astype(np.int32),
        seq_lens=case.lens.astype(np.int32),
        block_tables=case.tables[None],
        slots=slots[None],
        sample_rows=case.starts[1:] - 1,
        sampling=(),
    )
    rope = torch.ones(8192, HEAD_DIM // 2, device="cuda")
    plan = TritonOps("cuda").plan_attention(
        batch, case.cache, AttentionSpec(num_heads=NUM_HEADS, rope=[RopeTables(cos=rope, sin=rope)] * NUM_LAYERS, windows=[0] * NUM_LAYERS)
    )
    plan.rotate_and_write(0, case.qkv.clone())
    both, before = medians_us([lambda: plan.attend(case.layer, case.qkv), case.portable()])
    print(f"mixed, 16 decodes of 4096 and a chunk of 2048: {both:.0f} us; all rows through the prefill kernel {before:.0f} us", flush=True)


def sweep() -> None:
    cases = {name: PrefillCase(SHAPES[name]) for name in ("1 x 8192", "8 x 2048")}
    for rows, keys, warps, stages in [
        *itertools.product((128,), (64, 128), (8,), (2, 3)),
        (128, 64, 4, 3),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
    ]:
        shape = replace(TileShape(16, 16, 4, 2), num_rows=rows, num_keys=keys, num_warps=warps, num_stages=stages)
        try:
            rates = [case.flop / medians_us([case.portable(shape)], rounds=2)[0] / 1e6 for case in cases.values()]
        except Exception as error:  # noqa: BLE001 (a tile too large for the card is an answer)
            print(f"rows {rows} keys {keys} warps {warps} stages {stages}: {type(error).__name__}", flush=True)
            continue
        print(f"rows {rows} keys {keys} warps {warps} stages {stages}: " + ", ".join(f"{rate:.0f}" for rate in rates), flush=True)


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--without-hopper", action="store_true")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=[], choices=["fp8", "int8"])
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.sweep:
        sweep()
        return
    if args.kv_cache_dtype:
        quantized_table(args.kv_cache_dtype)
        return
    if not args.without_hopper:
        check()
    if args.check_only:
        return
    table(not args.without_hopper)
    plan_cost()
    mixed()


if __name__ == "__main__":
    main()
