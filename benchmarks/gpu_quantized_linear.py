"""Matrix products with quantized weights on one GPU, beside cuBLAS in bfloat16 and in float8, against the weights' bytes.

    PYTHONPATH=. python benchmarks/gpu_quantized_linear.py                         Llama-3.1-8B's products, as choose_tile chooses
    PYTHONPATH=. python benchmarks/gpu_quantized_linear.py --tune --formats fp8    layouts of a program, to choose them anew

A time is that of a CUDA graph of all layers' products and (up to 256 rows) the head's, for the largest numbers of rows of some of the
layers, times as many; the median of replays. It holds what rounds the input. Layers take turns with four weights each, so that they come
from memory. Every product is compared with float32 sums of the same rounded input and the dequantized weight first; an error is the
largest difference over the largest result.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from twostep.checkpoint.linear_format import Activations
from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.quantized_weight import QuantizedWeight
from twostep.model.kernels.triton_elementwise import silu_mul
from twostep.model.kernels.triton_launch import shared_bytes_of
from twostep.model.kernels.triton_quantized_linear import PreparedWeight, bytes_on_their_way, prepare, quantized_linear
from twostep.model.kernels.triton_quantized_linear_rows import QuantizedRowTile
from twostep.model.kernels.triton_quantized_linear_tiles import Packed, QuantizedTile
from twostep.settings.reading import FlagParser

ROW_COUNTS = [1, 16, 64, 128, 256, 2048, 8192]
LAYERS = 32
COPIES = 4
MOST_HEAD_ROWS = 256
SHOWN = 3
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class QuantizedProduct:
    name: str
    num_out: int
    width: int
    gated: bool = False
    in_parts: bool = False  # what comes after adds parts up


LAYER = [
    QuantizedProduct("qkv", 6144, 4096),
    QuantizedProduct("o", 4096, 4096, in_parts=True),
    QuantizedProduct("gate_up", 28672, 4096, gated=True),
    QuantizedProduct("down", 4096, 14336, in_parts=True),
]
HEAD = QuantizedProduct("head", 128256, 4096)


@dataclass(frozen=True)
class Format:
    kind: str  # fp8 | int8 | int4
    group: int = 0
    block_rows: int = 1
    zeros: bool = False
    activations: Activations | None = None

    def weight(self, product: QuantizedProduct, copies: int) -> list[QuantizedWeight]:
        """Random weights of the size of 1 / sqrt(width)."""
        rows, columns, group = product.num_out, product.width, self.group or product.width
        shape = (-(-rows // self.block_rows), -(-columns // group))
        scales = torch.rand(shape, device=DEVICE) + 0.5
        zeros = None
        if self.kind == "int4":
            values = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=DEVICE)
            scales /= 4.6 * columns**0.5
            zeros = torch.randint(0, 16, shape, dtype=torch.uint8, device=DEVICE) if self.zeros else None
        elif self.kind == "int8":
            values = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=DEVICE)
            scales /= 74 * columns**0.5
        else:
            values = torch.randn(rows, columns, dtype=DTYPE, device=DEVICE).mul_(60).clamp_(-448, 448).to(torch.float8_e4m3fn)
            scales /= 60 * columns**0.5
        how = None if self.activations is None else InputQuantizer(self.activations, DEVICE)
        first = QuantizedWeight(values=values, scales=scales, group=group, block_rows=self.block_rows, zeros=zeros, activations=how)
        return [first, *(replace(first, values=values.clone()) for _ in range(copies - 1))]


FP8_TOKEN = Activations(is_float=True, dynamic=True)
FORMATS = {
    "fp8": Format("fp8", activations=FP8_TOKEN),
    "fp8-blocks": Format("fp8", group=128, block_rows=128, activations=Activations(is_float=True, dynamic=True, group=128)),
    "int4": Format("int4", group=128),
    "int4-zeros": Format("int4", group=128, zeros=True),
    "w8a8": Format("int8", activations=Activations(is_float=False, dynamic=True)),
    "int8": Format("int8"),
}
Run = Callable[[torch.Tensor], object]


def inputs(tokens: int) -> dict[int, torch.Tensor]:
    return {width: torch.randn(tokens, width, dtype=DTYPE, device=DEVICE) for width in (4096, 14336)}


def layers_of(tokens: int) -> int:
    return LAYERS if tokens <= MOST_HEAD_ROWS else 16 if tokens <= 4096 else 4


def steps_ms(tokens: int, layer: list[tuple[QuantizedProduct, list[Run]]], head: list[Run]) -> float:
    """Returns the time of LAYERS layers and, for a few tokens, the head."""
    xs, count = inputs(tokens), layers_of(tokens)

    def work() -> None:
        for i in range(count):
            for product, runs in layer:
                runs[i % len(runs)](xs[product.width])
        if tokens <= MOST_HEAD_ROWS:
            head[0](xs[HEAD.width])

    return graph_ms(work) * LAYERS / count


def graph_ms(work: Callable[[], object], *, repeats: int = 3) -> float:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def wanted(weight: QuantizedWeight, x: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """float32, of the input as it is rounded, unless it stays in 16 bits."""
    rounded = x.float() if weight.activations is None else weight.activations(x.float())
    y = F.linear(rounded, weight.dequantize(torch.float32))
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return F.silu(gate).mul_(up)


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    got = (got.sum(0) if got.dim() == 3 else got)[-len(want) :].float()
    return float((got - want).abs().max() / want.abs().max())


def run_of(weight: PreparedWeight, product: QuantizedProduct, tile: QuantizedTile | QuantizedRowTile | None = None) -> Run:
    return lambda x: quantized_linear(weight, x, gated=product.gated, in_parts=product.in_parts, tile=tile)


def run_all(runs: list[Run], x: torch.Tensor) -> None:
    for run in runs:
        run(x)


def print_row(name: str, tokens: int, ms: float, num_bytes: float, rest: str = "") -> None:
    sizes = [p.num_out * p.width * LAYERS for p in LAYER] + [HEAD.num_out * HEAD.width] * (tokens <= MOST_HEAD_ROWS)
    rate = f"{num_bytes / ms / 1e9:5.2f} TB/s" if tokens <= 64 else f"{2 * tokens * sum(sizes) / ms / 1e9:5.0f} TFLOP/s"
    print(f"{name:12} {tokens:5} {ms:8.3f} ms {rate} {rest}", flush=True)


def peers(counts: list[int]) -> dict[tuple[str, int], float]:
    """cuBLAS in bfloat16 and, with scales of rows and tokens and an input rounded before, in float8."""
    dense = {p.name: [torch.randn(p.num_out, p.width, dtype=DTYPE, device=DEVICE) for _ in range(2)] for p in [*LAYER, HEAD]}
    ones = torch.ones(max(*counts, *(p.num_out for p in [*LAYER, HEAD])), dtype=torch.float32, device=DEVICE)
    times: dict[tuple[str, int], float] = {}

    def bfloat16(weight: torch.Tensor, product: QuantizedProduct) -> Run:
        return (lambda x: silu_mul(F.linear(x, weight))) if product.gated else (lambda x: F.linear(x, weight))

    def float8(weight: torch.Tensor, product: QuantizedProduct, fast: bool) -> Run:
        w = weight.to(torch.float8_e4m3fn).t()
        scales = ones[None, : product.num_out]

        def run(x: torch.Tensor) -> object:
            values = eights[x.shape[1]]
            y = torch._scaled_mm(values, w, ones[: len(x), None], scales, out_dtype=DTYPE, use_fast_accum=fast)
            return silu_mul(y) if product.gated else y

        return run

    def blocks(weight: torch.Tensor, product: QuantizedProduct) -> Run:
        w = weight.to(torch.float8_e4m3fn).t()
        scales = torch.ones(product.num_out // 128, product.width // 128, device=DEVICE).t()

        def run(x: torch.Tensor) -> object:
            x_scales = torch.ones(x.shape[1] // 128, len(x), device=DEVICE).t()
            y = torch._scaled_mm(eights[x.shape[1]], w, x_scales, scales, out_dtype=DTYPE)
            return silu_mul(y) if product.gated else y

        return run

    makers: dict[str, Callable[[torch.Tensor, QuantizedProduct], Run]] = {
        "bf16": bfloat16,
        "cuBLAS-fp8": functools.partial(float8, fast=True),
        "-exact": functools.partial(float8, fast=False),
        "-blocks": blocks,
    }
    for name, make in makers.items():
        layer = [(p, [make(w, p) for w in dense[p.name]]) for p in LAYER]
        head = [make(dense["head"][0], HEAD)]
        for tokens in counts:
            eights = {width: x.to(torch.float8_e4m3fn) for width, x in inputs(tokens).items()}
            try:
                times[name, tokens] = steps_ms(tokens, layer, head)
            except (RuntimeError, ValueError) as error:
                print(f"{name} {tokens}: {str(error)[:300]}")
    return times


def compile_all(name: str, jobs: list[tuple[QuantizedProduct, int, QuantizedTile | QuantizedRowTile | None]]) -> None:
    """Compiles in a process of its own, into Triton's cache on disk."""
    prepared: dict[QuantizedProduct, PreparedWeight] = {}
    for product, tokens, tile in jobs:
        if product not in prepared:
            prepared = {product: prepare(FORMATS[name].weight(product, 1)[0], DEVICE)}
        x = torch.zeros(tokens, product.width, dtype=DTYPE, device=DEVICE)
        try:
            run_of(prepared[product], product, tile)(x)
        except Exception as error:  # noqa: BLE001 - a layout that does not fit this card is no reason to stop
            print(f"{name} {product.name} {tokens} {describe(tile)}: {type(error).__name__} {str(error)[-200:]}", flush=True)


def compile_beside(work: Iterable[tuple[str, list[tuple[QuantizedProduct, int, QuantizedTile | QuantizedRowTile | None]]]]) -> None:
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_all, args=args) for args in work]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)


def table(formats: list[str], counts: list[int]) -> None:
    compile_beside(
        (name, [(p, t, None) for p in products for t in counts if t <= MOST_HEAD_ROWS or p != HEAD])
        for name in formats
        for products in ([HEAD, *LAYER[:2]], LAYER[2:])
    )
    times = peers(counts)
    for (name, tokens), ms in times.items():
        sizes = 2 * (sum(p.num_out * p.width for p in LAYER) * LAYERS + HEAD.num_out * HEAD.width) / (1 if name == "bf16" else 2)
        print_row(name, tokens, ms, sizes)
    for name in formats:
        weights = {p: FORMATS[name].weight(p, COPIES if p != HEAD else 1) for p in [*LAYER, HEAD]}
        ready = {p: [prepare(weight, DEVICE) for weight in some] for p, some in weights.items()}
        num_bytes = sum(some[0].num_bytes * (LAYERS if p != HEAD else 1) for p, some in ready.items())
        layer = [(p, [run_of(weight, p) for weight in ready[p]]) for p in LAYER]
        head = [run_of(ready[HEAD][0], HEAD)]
        for tokens in counts:
            errors = []
            for product in [*LAYER, *([HEAD] if tokens <= MOST_HEAD_ROWS else [])]:
                x = torch.randn(tokens, product.width, dtype=DTYPE, device=DEVICE)
                got = run_of(ready[product][0], product)(x)
                assert isinstance(got, torch.Tensor)
                errors.append(error_of(got, wanted(weights[product][0], x[-256:], gated=product.gated)))
            ms = steps_ms(tokens, layer, head)
            peer = times.get(("bf16", tokens))
            print_row(name, tokens, ms, num_bytes, f"bf16 x{peer / ms:.2f}  error {max(errors):.1e}" if peer else "")


def layouts(product: QuantizedProduct, tokens: int) -> list[QuantizedTile | QuantizedRowTile]:
    """Worth a try."""
    found: list[QuantizedTile] = []
    rows = [QuantizedRowTile(rows=count, num_warps=warps) for count, warps in [(2, 4), (4, 4), (8, 4), (4, 8), (2, 8), (1, 4)]]
    if tokens <= 64:
        padded = max(16, 1 << (tokens - 1).bit_length())
        # cols, warps, parts, stages, ahead
        shapes = [
            (128, 4, 1, 4, 0),
            (128, 4, 1, 8, 0),
            (128, 4, 1, 6, 2),
            (128, 4, 2, 6, 2),
            (128, 4, 4, 4, 2),
            (128, 4, 4, 8, 2),
            (128, 4, 8, 8, 2),
            (64, 4, 1, 8, 2),
            (64, 4, 2, 8, 2),
            (64, 4, 4, 8, 2),
            (64, 2, 1, 4, 0),
            (64, 2, 1, 8, 2),
            (64, 2, 2, 6, 2),
            (64, 2, 4, 6, 2),
            (64, 2, 8, 4, 2),
            (32, 1, 1, 6, 2),
            (32, 1, 4, 6, 2),
            (32, 2, 2, 6, 2),
            (256, 4, 1, 4, 2),
            (256, 8, 1, 4, 2),
        ]
        found += [
            QuantizedTile(tokens=padded, cols=cols, num_warps=warps, num_stages=stages, parts=parts, ahead=ahead, bulk=bulk)
            for cols, warps, parts, stages, ahead in shapes
            for bulk in (True, False)
        ]
        if tokens == 1:
            found += [replace(tile, tokens=8) for tile in found if tile.num_warps <= 2]
    else:
        # tokens, cols, warps, stages, parts, turned, exact
        large = [
            (128, 128, 8, 4, 1, True, True),
            (128, 128, 8, 4, 2, True, True),
            (128, 128, 8, 4, 4, True, True),
            (128, 128, 4, 4, 1, True, True),
            (64, 128, 4, 5, 1, True, True),
            (64, 128, 4, 5, 2, True, True),
            (64, 128, 4, 5, 4, True, True),
            (128, 64, 4, 5, 1, True, True),
            (256, 128, 8, 3, 1, True, True),
            (128, 256, 8, 3, 1, True, True),
            (128, 256, 8, 4, 1, False, False),
            (128, 256, 8, 3, 1, False, False),
            (256, 128, 8, 4, 1, False, False),
            (256, 128, 8, 4, 1, True, False),
            (128, 128, 8, 4, 1, False, False),
            (128, 128, 4, 4, 1, False, False),
            (128, 128, 8, 5, 1, False, True),
            (128, 256, 8, 4, 1, False, True),
        ]
        found += [
            QuantizedTile(tokens=rows, cols=cols, num_warps=warps, num_stages=stages, parts=parts, turned=turned, exact=exact)
            for rows, cols, warps, stages, parts, turned, exact in large
        ]
        found += [replace(tile, bulk=False) for tile in found if tile.turned]
    tiles = [tile for tile in found if not (product.gated and (tile.parts > 1 or (tile.cols == 64 and tile.num_warps == 4)))]
    return [*(rows if tokens == 1 else []), *tiles]


def fits(tile: QuantizedTile | QuantizedRowTile, packed: Packed) -> bool:
    unpacked = packed.values.dtype == torch.int16
    if isinstance(tile, QuantizedRowTile):
        return not unpacked and not packed.group
    return (tile.turned or not unpacked) and bytes_on_their_way(packed, tile) + 4096 < shared_bytes_of(DEVICE)


def describe(tile: QuantizedTile | QuantizedRowTile | None) -> str:
    if tile is None:
        return "chosen"
    if isinstance(tile, QuantizedRowTile):
        return f"rows {tile.rows} w{tile.num_warps}"
    return (
        f"t{tile.tokens} c{tile.cols} p{tile.parts} w{tile.num_warps} s{tile.num_stages} a{tile.ahead}"
        + ("" if tile.bulk else " ptr")
        + ("" if tile.turned else " straight")
        + ("" if tile.exact else " fast")
    )


def tune(formats: list[str], counts: list[int], processes: int) -> None:
    """The best layouts of each product, in microseconds."""
    jobs: dict[str, list[tuple[QuantizedProduct, int, QuantizedTile | QuantizedRowTile | None]]] = {}
    for name in formats:
        jobs[name] = []
        for product in [*LAYER, HEAD]:
            packed = prepare(FORMATS[name].weight(replace(product, num_out=128), 1)[0], DEVICE).packed
            assert packed is not None
            for tokens in counts:
                tiles = [tile for tile in layouts(product, tokens) if fits(tile, packed)]
                jobs[name] += [(product, tokens, tile) for tile in [None, *tiles] if product != HEAD or tokens <= MOST_HEAD_ROWS]
    compile_beside((name, some[i::processes]) for name, some in jobs.items() for i in range(processes))
    for name in formats:
        for product in [*LAYER, HEAD]:
            raw = FORMATS[name].weight(product, COPIES if product != HEAD else 2)
            ready = [prepare(weight, DEVICE) for weight in raw]
            packed = ready[0].packed
            assert packed is not None
            print(f"{name} {product.name}: {packed.num_bytes / 4.41e6:.1f} us at 4.41 TB/s", flush=True)
            for tokens in counts:
                x = torch.randn(tokens, product.width, dtype=DTYPE, device=DEVICE)
                want = wanted(raw[0], x[-64:], gated=product.gated)
                found: list[tuple[float, float, str]] = []
                for job_product, job_tokens, tile in jobs[name]:
                    if (job_product, job_tokens) != (product, tokens):
                        continue
                    try:
                        got = run_of(ready[0], product, tile)(x)
                        assert isinstance(got, torch.Tensor)
                        error = error_of(got, want)
                        runs = [run_of(weight, product, tile) for weight in ready]
                        ms = graph_ms(functools.partial(run_all, runs * 3, x))
                    except Exception as exception:  # noqa: BLE001 - compile_all said so
                        print(f"  {describe(tile)}: {str(exception)[-100:]}")
                        continue
                    found.append((ms * 1e3 / len(runs) / 3, error, describe(tile)))
                chosen = [entry for entry in found if entry[2] == "chosen"]
                best = sorted(entry for entry in found if entry[1] < 2e-2)[:SHOWN]
                print(f" {tokens:5} " + " | ".join(f"{us:.1f} {tile} ({error:.0e})" for us, error, tile in [*chosen, *best]), flush=True)


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--tokens", type=int, nargs="+", default=ROW_COUNTS)
    parser.add_argument("--tune", action="store_true", help="try layouts, and print the best of each product")
    parser.add_argument("--processes", type=int, default=12, help="that compile for --tune")
    args = parser.parse_args()
    started = time.perf_counter()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if args.tune:
        tune(args.formats, args.tokens, args.processes)
    else:
        table(args.formats, args.tokens)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
