"""Decode attention on one GPU against its memory's read rate and, where it is installed, FlashInfer: make bench-gpu

    python benchmarks/gpu_decode_attention.py            the nine shapes, and ragged lengths
    python benchmarks/gpu_decode_attention.py --heads    other numbers and sizes of heads
    python benchmarks/gpu_decode_attention.py --sweep    every layout of a program at each shape, to choose them anew for another GPU
    python benchmarks/gpu_decode_attention.py --kv-cache-dtype fp8 int8     quantized KV beside bf16 (with --sweep: its layouts)
    python benchmarks/gpu_decode_attention.py --kv-cache-dtype fp8 --layers   what a layer of a step does with KV: write, attend

Llama-3.1-8B's heads (32 query, 8 KV, 128 wide), bf16, blocks of 16 in random order. A time is the median of CUDA graph replays of one
call, plan excluded as the peer's is: it is made once a step, not per layer. "pool" is one layer of the engine's pool (blocks of 32
layers lie one after another); "layer pool" is the same kernel on a pool of one layer. "plain read" is a reduction over as many
bytes in one run, timed the same way: what a replay costs by itself (some 7 µs on an H200) and a short read's start are in it too.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence

import torch

from twostep.engine.batch import KvShape
from twostep.model.kernels.triton_decode import decode_attention
from twostep.model.kernels.triton_decode_plan import DecodeLayout, DecodePlan
from twostep.model.kernels.triton_elementwise import rotate_and_write
from twostep.model.kernels.triton_shared_prefix import SharedPrefix
from twostep.model.step.kv_cache import KvCache
from twostep.settings.reading import FlagParser

try:
    import flashinfer
except ImportError:
    flashinfer = None

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 32, 8, 128, 16, 32
SHAPES = [(1, 8192), (1, 131072), (8, 8192), (16, 4096), (64, 2048), (64, 8192), (128, 1024), (256, 1024), (256, 4096)]
TOKEN_BYTES = NUM_KV_HEADS * HEAD_DIM * 2 * 2
POOL_BYTES = 90e9
_CHAINED = 8
# Query heads, KV heads, head size; batch and context.
OTHER_HEADS = [
    ((32, 1, 128), (128, 4096)),
    ((32, 1, 128), (16, 8192)),
    ((8, 1, 128), (64, 8192)),
    ((16, 2, 128), (16, 8192)),
    ((8, 2, 128), (256, 1024)),
    ((32, 32, 128), (64, 1024)),
    ((32, 32, 64), (64, 2048)),
    ((32, 32, 80), (64, 1024)),
    ((32, 32, 96), (64, 1024)),
    ((16, 8, 256), (64, 2048)),
]


def medians_us(calls: Sequence[Callable[[], object]], *, rounds: int = 5, repeats: int = 15) -> list[float]:
    """Median device time of each call, replayed from a CUDA graph so that launches cost nothing. They take turns, each warmed up for
    some milliseconds: a card's clocks fall while it waits, and two calls measured far apart may have met different ones."""
    graphs = []
    for call in calls:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            call()
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds):
        for graph, found in zip(graphs, times, strict=True):
            busy_until = time.perf_counter() + (0.1 if turn == 0 else 0.02)
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


def read_rate() -> float:
    """Bytes per second of a reduction over 4 GiB."""
    words = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    return words.numel() * 4 / medians_us([lambda: torch.amax(words)])[0] * 1e6


class DecodeCase:
    """One batch over a pool of `num_layers` layers, of which one holds random numbers."""

    def __init__(
        self,
        lengths: list[int],
        num_layers: int,
        quantization: str = "none",
        *,
        heads: tuple[int, int, int] = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM),
        num_shared: int = 0,
    ) -> None:
        """`heads`: query heads, KV heads, head size. All sequences have their first `num_shared` keys in common."""
        blocks = [-(-n // BLOCK_SIZE) for n in lengths]
        self.num_heads, num_kv_heads, head_dim = heads
        self.shape = KvShape(
            num_blocks=sum(blocks),
            block_size=BLOCK_SIZE,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype="bfloat16",
            quantization=quantization,
        )
        self.cache = KvCache(self.shape, "cuda")
        self.layer = num_layers // 2
        for part in self.cache.tensor[:, self.layer].split(4096):
            if self.cache.quantized is None:
                part.normal_()
            else:
                part.random_(0, 0x7F)  # a byte each, of which none is a NaN
        if self.cache.quantized is not None:
            self.cache.quantized.scales[:, self.layer].uniform_(0.001, 0.01)
        order = torch.randperm(sum(blocks), dtype=torch.int32)
        # A multiple of 16 columns, for which kernels are compiled once.
        self.tables = torch.zeros(len(lengths), -(-max(blocks) // 16) * 16, dtype=torch.int32)
        for s, ids in enumerate(order.split(blocks)):
            self.tables[s, : len(ids)] = ids
        self.tables[:, : num_shared // BLOCK_SIZE] = self.tables[0, : num_shared // BLOCK_SIZE].clone()
        self.tables = self.tables.cuda()
        self.lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.q = torch.randn(len(lengths), self.num_heads, head_dim, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty_like(self.q)

    def call(self, layout: DecodeLayout | None = None, shared: SharedPrefix | None = None) -> Callable[[], object]:
        plan = DecodePlan(self.shape, num_heads=self.num_heads, num_seqs=len(self.q), device="cuda", layout=layout, shared=shared)
        plan.refresh(self.lens)
        return lambda: decode_attention(self.q, self.cache, self.layer, self.tables, self.lens, plan=plan, out=self.out)

    def layers(self) -> list[Callable[[], object]]:
        """For all layers: new vectors are written; attention; both in turns."""
        plan = DecodePlan(self.shape, num_heads=self.num_heads, num_seqs=len(self.q), device="cuda")
        plan.refresh(self.lens)
        count, angle = len(self.q), torch.ones(1024, self.shape.head_dim // 2, device="cuda")
        qkv = torch.randn(count, (self.num_heads + 2 * self.shape.num_kv_heads) * self.shape.head_dim, dtype=torch.bfloat16, device="cuda")
        last = self.lens - 1
        slots = self.tables[torch.arange(count, device="cuda"), last.long() // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE

        def write(layer: int) -> None:
            rotate_and_write(qkv, last, slots, angle, angle, self.cache, layer, self.num_heads)

        def attend(layer: int) -> None:
            decode_attention(self.q, self.cache, layer, self.tables, self.lens, plan=plan, out=self.out)

        def each(*steps: Callable[[int], None]) -> Callable[[], object]:
            return lambda: [step(layer) for layer in range(self.shape.num_layers) for step in steps]

        return [each(write), each(attend), each(write, attend)]


def plain_read(num_bytes: int) -> Callable[[], object]:
    words = torch.empty(num_bytes // 4, dtype=torch.int32, device="cuda").random_()
    return lambda: torch.amax(words)


def other_heads(rate: float) -> list[dict[str, object]]:
    """Pools of 4 layers, beside a plain read of as many bytes."""
    print("query heads over KV heads x size, batch x context |      us  of read rate | plain read us | share of its rate")
    rows: list[dict[str, object]] = []
    for heads, (batch, length) in OTHER_HEADS:
        num_bytes = batch * length * heads[1] * heads[2] * 4
        calls = [DecodeCase([length] * batch, 4, heads=heads).call(), plain_read(num_bytes)]
        ours, plain = medians_us(calls)
        del calls
        name = f"{heads[0]} over {heads[1]} x {heads[2]}, {batch} x {length}"
        rows.append({"shape": name, "us": ours, "share": num_bytes / ours * 1e6 / rate, "plain_read_us": plain})
        print(f"{name:<50}| {ours:7.1f}  {num_bytes / ours * 1e6 / rate:12.3f} | {plain:13.1f} | {plain / ours:.3f}", flush=True)
    return rows


def layers_that_fit(num_tokens: int) -> int:
    return max(1, min(NUM_LAYERS, int(POOL_BYTES / (num_tokens * TOKEN_BYTES))))


def flashinfer_call(lengths: list[int]) -> Callable[[], object]:
    blocks = [-(-n // BLOCK_SIZE) for n in lengths]
    kv = torch.randn(sum(blocks), 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(len(lengths), NUM_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    ends = torch.tensor([0, *blocks]).cumsum(0).int().cuda()
    last = torch.tensor([n - (-(-n // BLOCK_SIZE) - 1) * BLOCK_SIZE for n in lengths], dtype=torch.int32, device="cuda")
    order = torch.randperm(sum(blocks), device="cuda", dtype=torch.int32)
    wrapper.plan(ends, order, last, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    return lambda: wrapper.run(q, kv)


def candidates() -> list[DecodeLayout]:
    found = []
    for lanes, stages, per_sm in [(8, 3, 1), (4, 3, 2), (4, 4, 2)]:
        for heads in (8, 4, 2, 1):
            if heads <= lanes:
                found.append(
                    DecodeLayout(
                        num_heads=heads, num_lanes=lanes // heads, num_keys=16, num_warps=lanes, num_stages=stages, programs_per_sm=per_sm
                    )
                )
    return found


def quantized_candidates() -> list[DecodeLayout]:
    kinds = [(4, 2, 4), (4, 3, 2), (4, 3, 3), (4, 3, 4), (4, 3, 5), (4, 4, 2), (4, 4, 3), (8, 3, 1), (8, 3, 2), (8, 4, 1), (2, 3, 6)]
    return [
        DecodeLayout(num_heads=1, num_lanes=lanes, num_keys=16, num_warps=lanes, num_stages=stages, programs_per_sm=per_sm)
        for lanes, stages, per_sm in kinds
    ]


def sweep_quantized(quantization: str, shapes: Sequence[tuple[int, int]] = SHAPES) -> None:
    layouts = quantized_candidates()
    print(f"{quantization}: " + "; ".join(f"{x.num_lanes} lanes, {x.num_stages} stages, {x.programs_per_sm} programs" for x in layouts))
    for batch, length in shapes:
        case = DecodeCase([length] * batch, layers_that_fit(batch * length), quantization)
        times = medians_us([case.call(layout) for layout in layouts], rounds=3)
        print(f"{batch:>4} x {length:>6} " + " ".join(f"{us:6.1f}" for us in times), flush=True)
        del case


def compare(quantizations: Sequence[str], rate: float) -> list[dict[str, object]]:
    """Quantized pools beside bf16's, in turns: times, shares of the read rate (scales counted), how many times bf16's rate."""
    print("batch x context      |   bf16 us  of read rate | " + " | ".join(f"{q:>7} us  of read rate  x bf16" for q in quantizations))
    rows: list[dict[str, object]] = []
    for batch, length in SHAPES:
        tokens = batch * length
        layers = layers_that_fit(3 * tokens)
        calls = [DecodeCase([length] * batch, layers, q).call() for q in ("none", *quantizations)]
        exact, *others = medians_us(calls)
        del calls
        row: dict[str, object] = {"shape": f"{batch} x {length}", "bfloat16_us": exact, "layers": layers}
        line = f"{row['shape']:<21}| {exact:9.1f}  {tokens * TOKEN_BYTES / exact * 1e6 / rate:12.3f}"
        for name, us in zip(quantizations, others, strict=True):
            num_bytes = tokens * NUM_KV_HEADS * 2 * (HEAD_DIM + 2)
            row |= {f"{name}_us": us, f"{name}_share": num_bytes / us * 1e6 / rate}
            line += f" | {us:10.1f}  {row[f'{name}_share']:12.3f} {exact / us:7.3f}"
        print(line, flush=True)
        rows.append(row)
    return rows


def layers_of_a_step(quantizations: Sequence[str]) -> None:
    """Contexts of 1024: eight layers write new vectors and attend, in one graph, so that kernels overlap as in a step; both alone, too."""
    print("us a layer           | " + " | ".join(f"{q:>5} write  attend    both" for q in ("none", *quantizations)))
    for batch in (1, 16, 64, 256):
        calls: list[Callable[[], object]] = []
        for quantization in ("none", *quantizations):
            calls += DecodeCase([1024] * batch, _CHAINED, quantization).layers()
        times = [us / _CHAINED for us in medians_us(calls, rounds=3)]
        triples = [times[i : i + 3] for i in range(0, len(times), 3)]
        print(f"{batch:>4} x 1024          | " + " | ".join(f"{a:11.1f} {b:7.1f} {c:7.1f}" for a, b, c in triples), flush=True)
        del calls


def sweep() -> None:
    layouts = candidates()
    for i, layout in enumerate(layouts):
        print(i, layout)
    print(f"{'shape':>13} " + " ".join(f"{i:>6}" for i in range(len(layouts))) + (" FlashInfer" if flashinfer is not None else ""))
    for batch, length in SHAPES:
        case = DecodeCase([length] * batch, layers_that_fit(batch * length))
        peers = [flashinfer_call([length] * batch)] if flashinfer is not None else []
        times = medians_us([case.call(layout) for layout in layouts] + peers, rounds=3)
        print(f"{batch:>4} x {length:>6} " + " ".join(f"{us:6.1f}" for us in times), flush=True)
        del case, peers


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="time every layout at each shape")
    parser.add_argument("--kv-cache-dtype", nargs="+", choices=["fp8", "int8", "int4"], default=[], help="quantized KV beside bf16")
    parser.add_argument("--layers", action="store_true", help="writing and attention of some layers, one after the other")
    parser.add_argument("--heads", action="store_true", help="other numbers and sizes of heads")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    rate = read_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read rate {rate / 1e12:.2f} TB/s")
    if args.layers:
        layers_of_a_step(args.kv_cache_dtype)
        return
    if args.kv_cache_dtype and args.sweep:
        for quantization in args.kv_cache_dtype:
            sweep_quantized(quantization)
        return
    if args.kv_cache_dtype:
        write(args.json, rate, compare(args.kv_cache_dtype, rate))
        return
    if args.sweep:
        sweep()
        return
    if args.heads:
        write(args.json, rate, other_heads(rate))
        return
    print(
        "batch x context      | pool us  of read rate | plain read us | layer pool us | FlashInfer us | pool / FlashInfer  "
        "pool / layer pool | layers"
    )
    rows: list[dict[str, object]] = []
    figures: list[dict[str, float]] = []
    ragged = [("ragged 100k + 63 x 1k", [100_000] + [1024] * 63), ("ragged 64, 16 to 8k", [16 + 8176 * i // 63 for i in range(64)])]
    for name, lengths in [(f"{batch} x {length}", [length] * batch) for batch, length in SHAPES] + ragged:
        tokens = sum(lengths)
        layers = layers_that_fit(tokens)
        calls = [DecodeCase(lengths, layers).call(), DecodeCase(lengths, 1).call(), plain_read(tokens * TOKEN_BYTES)]
        if flashinfer is not None:
            calls.append(flashinfer_call(lengths))
        ours, flat, plain, *peers = medians_us(calls)
        del calls
        peer = peers[0] if peers else math.nan
        share = tokens * TOKEN_BYTES / ours * 1e6 / rate
        figures.append({"us": ours, "share": share, "plain_read_us": plain, "layer_pool_us": flat, "flashinfer_us": peer})
        rows.append({"shape": name, **figures[-1], "layers": layers})
        ratios = f"{ours / peer:17.3f}  {ours / flat:17.3f}"
        print(f"{name:<22}| {ours:7.1f}  {share:12.3f} | {plain:13.1f} | {flat:13.1f} | {peer:13.1f} | {ratios} | {layers:6d}", flush=True)
    nine = figures[: len(SHAPES)]
    for what, key in [("pool / FlashInfer", "flashinfer_us"), ("pool / layer pool", "layer_pool_us")]:
        print(f"{what}, geometric mean of the nine: {math.prod(r['us'] / r[key] for r in nine) ** (1 / len(nine)):.3f}")
    write(args.json, rate, rows)


def write(path: str | None, rate: float, rows: list[dict[str, object]]) -> None:
    if path:
        with open(path, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "read_bytes_per_s": rate, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
