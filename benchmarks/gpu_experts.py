"""The experts of one layer on one GPU: routing, sorting, both products and the sum, against the bytes of the experts that are chosen.

    PYTHONPATH=. python benchmarks/gpu_experts.py                    Qwen3-30B-A3B's layers in bf16, each piece by itself
    PYTHONPATH=. python benchmarks/gpu_experts.py --format fp8       as --quantization fp8, int8 or int4 make them
    PYTHONPATH=. python benchmarks/gpu_experts.py --sweep            tiles of dense products other than the engine's choice

Each token chooses independently and uniformly. A time is that of one layer in a CUDA graph of several, each with weights of its own, so
that these come from memory; the median of replays.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from twostep.checkpoint.quantization import fitting, quantization_at_load
from twostep.model.kernels.experts import EveryExpert, ExpertRouter, ExpertWeights, Routing
from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.quantized_weight import QuantizedWeight
from twostep.model.kernels.triton_expert_products import ExpertTile, Pairs, multiply_tiles
from twostep.model.kernels.triton_experts import TritonExperts, choose_tile, tile_tokens
from twostep.model.kernels.triton_launch import shared_bytes_of
from twostep.model.kernels.triton_routing import ExpertTiles, route, sort_by_expert
from twostep.model.kernels.weight_quantizer import quantize
from twostep.settings.reading import FlagParser

TOKENS = [1, 2, 4, 16, 64, 128, 256, 512, 2048, 8192]
NUM_LAYERS = 3


@dataclass(frozen=True)
class Layer:
    num_experts: int
    top_k: int
    hidden: int
    width: int

    @property
    def router(self) -> ExpertRouter:
        return ExpertRouter(num_experts=self.num_experts, top_k=self.top_k, renormalize=True, scattered=True)


LAYERS = {"qwen3-30b-a3b": Layer(128, 8, 2048, 768), "mixtral-8x7b": Layer(8, 2, 4096, 14336), "deepseek-v2-lite": Layer(64, 6, 2048, 1408)}


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=list(LAYERS), default="qwen3-30b-a3b")
    parser.add_argument("--format", choices=["bf16", "fp8", "int8", "int4"], default="bf16")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    layer = LAYERS[args.layer]
    rate = read_rate()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, reads {rate / 1e9:,.0f} GB/s; {args.layer}, {args.format}", flush=True
    )
    torch.manual_seed(0)
    with torch.inference_mode():
        dense = [random_experts(layer) for _ in range(NUM_LAYERS)]
        if args.sweep:
            sweep(layer, dense, args.tokens, rate)
        else:
            table(layer, [as_format(weights, args.format) for weights in dense], args.tokens, rate)


def random_experts(layer: Layer) -> ExpertWeights:
    e, h, f = layer.num_experts, layer.hidden, layer.width
    gate_up = torch.empty(e, 2 * f, h, dtype=torch.bfloat16, device="cuda").normal_(0, h**-0.5)
    down = torch.empty(e, h, f, dtype=torch.bfloat16, device="cuda").normal_(0, f**-0.5)
    return ExpertWeights(gate_up=gate_up, down=down, held=range(e))


def as_format(weights: ExpertWeights, name: str) -> ExpertWeights:
    if name == "bf16":
        return weights
    format = quantization_at_load(name).groups[0].format
    how = None if format.activations is None else InputQuantizer(format.activations, torch.device("cuda"))

    def quantized(dense: Sequence[torch.Tensor] | torch.Tensor) -> list[QuantizedWeight]:
        made = [quantize(weight, fitting(format, weight.shape[1])) for weight in dense]
        return [QuantizedWeight(values=each.values, scales=each.scales, group=each.group, activations=how) for each in made]

    assert isinstance(weights.gate_up, torch.Tensor)
    assert isinstance(weights.down, torch.Tensor)
    return ExpertWeights(gate_up=quantized(weights.gate_up), down=quantized(weights.down), held=weights.held)


def num_bytes(weights: ExpertWeights) -> float:
    """Returns the bytes that one expert takes."""
    total = 0
    for each in (weights.gate_up, weights.down):
        total += each.nbytes if isinstance(each, torch.Tensor) else sum(weight.num_bytes for weight in each)
    return total / len(weights.held)


def table(layer: Layer, layers: list[ExpertWeights], tokens: list[int], rate: float) -> None:
    made = [TritonExperts(weights, layer.router, torch.bfloat16) for weights in layers]
    trouble = made[0].trial(EveryExpert(layers[0]))
    print(f"beside plain torch: {trouble or 'right'}", flush=True)
    each = num_bytes(layers[0])
    del layers
    print(f"{'tokens':>7}{'experts':>8}{'layer us':>10}{'floor':>8}{'ratio':>7}{'TFLOP/s':>9}   route, sort us")
    for count in tokens:
        touched, (whole, routed, sorted_) = measure(layer, made, count)
        floor = touched * each / rate * 1e6
        flops = 6.0 * count * layer.top_k * layer.hidden * layer.width
        print(
            f"{count:>7}{touched:>8}{whole:>10.1f}{floor:>8.1f}{whole / floor:>7.2f}{flops / whole / 1e6:>9.1f}"
            f"   {routed:.1f}, {sorted_:.1f}",
            flush=True,
        )


def measure(layer: Layer, made: list[TritonExperts], count: int) -> tuple[int, tuple[float, float, float]]:
    """Returns how many experts so many tokens choose, and the microseconds of a layer, of routing and of sorting."""
    x = torch.randn(count, layer.hidden, dtype=torch.bfloat16, device="cuda")
    logits = torch.randn(count, layer.num_experts, dtype=torch.bfloat16, device="cuda")
    routing = route(logits, layer.router)
    return len(routing.experts.unique()), (
        each_us(lambda: [experts.parts(x, routing) for experts in made]),
        each_us(lambda: [route(logits, layer.router) for _ in made]),
        each_us(lambda: [sort(layer, routing) for _ in made]),
    )


def sort(layer: Layer, routing: Routing, tokens: int | None = None) -> ExpertTiles:
    tokens = tokens or tile_tokens(routing.experts.numel(), layer.num_experts)
    return sort_by_expert(routing.experts, range(layer.num_experts), tokens)


def sweep(layer: Layer, layers: list[ExpertWeights], tokens: list[int], rate: float) -> None:
    shared = shared_bytes_of(torch.device("cuda", 0))
    for count in [each for each in tokens if each > 2]:
        routing = route(torch.randn(count, layer.num_experts, device="cuda"), layer.router)
        touched = len(routing.experts.unique())
        chosen = tile_tokens(routing.experts.numel(), layer.num_experts)
        held = range(layer.num_experts)
        for gated in (True, False):
            rows = count if gated else count * layer.top_k
            width = layer.hidden if gated else layer.width
            x = torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")
            found: list[tuple[float, str]] = []
            sides = [each.gate_up if gated else each.down for each in layers]
            weights = [side for side in sides if isinstance(side, torch.Tensor)]
            size = weights[0].nbytes / layer.num_experts * touched
            for of_pairs in sorted({max(16, chosen // 2), chosen, min(128, chosen * 2)}):
                tiles = sort(layer, routing, of_pairs)
                pairs = Pairs(x=x, chosen=routing.experts, held=held, weights=None if gated else routing.weights, of_pairs=not gated)
                engine = choose_tile(of_pairs, item_bytes=2, bulk=True, shared_bytes=shared)
                for tile in dict.fromkeys([engine, *candidates(of_pairs)]):
                    if (tile.cols + tile.tokens) * tile.depth * 2 * tile.num_stages + 4096 > shared:
                        continue
                    try:
                        us = each_us(partial(multiply_all, pairs, tiles, weights, tile, gated))
                    except Exception as error:  # noqa: BLE001 - a layout that does not fit this card is no reason to stop
                        print(f"{tile}: {type(error).__name__} {str(error)[:100]}", flush=True)
                        continue
                    mark = " *" if tile == engine and of_pairs == chosen else ""
                    kind = ("bulk" if tile.bulk else "ptr") + ("-turned" if tile.turned else "")
                    found.append((us, f"{kind} {tile.tokens}/{tile.cols}x{tile.depth} w{tile.num_warps} s{tile.num_stages}{mark}"))
            found.sort()
            best = ", ".join(f"{what} {us:.1f}" for us, what in found if us in [each[0] for each in found[:4]] or "*" in what)
            print(f"{count:>6} {'gate_up' if gated else 'down':8} floor {size / rate * 1e6:7.1f} us: {best}", flush=True)


def multiply_all(pairs: Pairs, tiles: ExpertTiles, weights: list[torch.Tensor], tile: ExpertTile, gated: bool) -> list[torch.Tensor]:
    return [multiply_tiles(pairs, tiles, weight, tile=tile, gated=gated) for weight in weights]


def candidates(tokens: int) -> list[ExpertTile]:
    few = tokens <= 64
    shapes = (
        product((64, 128), (64, 128), (4,), (3, 4, 5), (True,), (True, False))
        if few
        else product((128, 256), (64,), (4, 8), (3, 4), (True, False), (True,))
    )
    return [
        ExpertTile(tokens=tokens, cols=cols, depth=depth, num_warps=warps, num_stages=stages, turned=turned, bulk=bulk)
        for cols, depth, warps, stages, turned, bulk in shapes
    ]


def each_us(work: Callable[[], Sequence[object]], *, repeats: int = 7) -> float:
    """Median time of a layer of a graph of `work`."""
    count = len(work())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[2:])


def read_rate() -> float:
    """Bytes per second of a reduction over 4 GiB."""
    words = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    torch.amax(words)
    return words.numel() * 4 / each_us(lambda: [torch.amax(words)]) * 1e6


if __name__ == "__main__":
    main()
