"""The experts of one layer on GPUs: which kernels multiply, and with which tiles.

    tokens            1 … 2                    more
    kernel            rows of the weight       tiles of pairs of one expert, of as many pairs as experts have on average and some more:
                      in registers (dense,     while these are few, nearly every weight is read once
                      and 8 bits x 8 bits)

Which, and how large, follow from the shapes alone, so that a captured step always takes the same, whoever is chosen. Quantized experts are
as quantized linear layers (triton_quantized_linear.py): numbers of 8 bits meet rounded inputs, others are unpacked in registers; what no
kernel takes is made dense as it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import triton

from twostep.model.kernels.experts import Beside, ExpertRouter, Experts, ExpertWeights, Routing, as_it_is, route
from twostep.model.kernels.input_quantizer import InputQuantizer
from twostep.model.kernels.linear_trial import try_linear
from twostep.model.kernels.ops import LinearInParts
from twostep.model.kernels.quantized_weight import QuantizedWeight
from twostep.model.kernels.triton_expert_products import ExpertRowTile, ExpertTile, Pairs, multiply_rows, multiply_tiles
from twostep.model.kernels.triton_launch import overlaps, shared_bytes_of
from twostep.model.kernels.triton_quantized_expert_products import multiply_eight, multiply_eight_rows, multiply_unpacked, stacked
from twostep.model.kernels.triton_quantized_input import RoundedBeside, round_input
from twostep.model.kernels.triton_quantized_linear import QUANTIZED_DTYPES, prepare
from twostep.model.kernels.triton_quantized_linear_tiles import Packed
from twostep.model.kernels.triton_routing import ExpertTiles, add_up, tiles_of

# Tokens up to which rows in registers are faster: hardly any expert has two.
_ROWS_UP_TO = 2
_WIDEST_ROW = 16384
_ROW_BYTES = 16384  # of a program's 8-bit weights in registers
# Tokens up to which the terms are left to the norm that comes next.
_PARTS_UP_TO = 256
# Pairs of a tile, by how many an expert has on average at most.
_TILE_TOKENS = ((10, 16), (20, 32), (96, 64))
_MOST_TOKENS = 128
_UNPACKED_TOKENS = 64
# Weights come in pieces of 16 bytes.
_ALIGNMENT = 16
# Shared memory of a program beside its tiles: barriers, and what threads exchange.
_SHARED_SLACK = 4096
# Two products, of which the second may round to 8 bits what the first has rounded to 16.
_DIFFERENCE = 5e-2
# On both sides of every change of kernel or layout, for many experts and for few.
_TRIAL_TOKENS = (1, 2, 3, 17, 64, 257, 2048)


class _Product(Protocol):
    """One of the experts' two products."""

    takes_rows: bool
    most_tokens: int  # of a tile

    def __call__(self, pairs: Pairs, tiles: ExpertTiles | None) -> torch.Tensor:
        """`tiles` None: by rows."""
        ...


class TritonExperts:
    """The Experts of a GPU."""

    def __init__(self, weights: ExpertWeights, router: ExpertRouter, dtype: torch.dtype) -> None:
        """Experts that are held, for inputs of `dtype`. Waits for the device."""
        self._router = router
        self._dtype = dtype
        self._device = weights.down[0].device
        self._width = weights.down[0].shape[0]
        self._held = weights.held
        self._biases = weights.biases or (None, None)
        self._clamped = weights.clamped
        self._gate_up = _product(weights.gate_up, dtype, gated=True)
        self._down = _product(weights.down, dtype, gated=False)
        self._takes_rows = self._gate_up.takes_rows and self._down.takes_rows
        self.enter: Callable[[torch.Tensor], torch.Tensor] = as_it_is
        if isinstance(self._gate_up, _Eight):
            self.enter = self._gate_up.entry = RoundedBeside(self._gate_up.quantizer, _ROWS_UP_TO if self._takes_rows else 0)
        self._most_tokens = min(self._gate_up.most_tokens, self._down.most_tokens)

    def __call__(self, x: torch.Tensor, routing: Routing, beside: Beside | None = None) -> torch.Tensor:
        return add_up(self._terms(x, routing, in_parts=False), routing.experts, self._held, beside, x.dtype)

    def parts(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        # Of experts that are not held there are no terms to be added up.
        if not 0 < len(x) <= _PARTS_UP_TO or len(self._held) < self._router.num_experts:
            return self(x, routing)
        return self._terms(x, routing, in_parts=True)

    def trial(self, right: Experts, num_tokens: Sequence[int] = _TRIAL_TOKENS) -> str:
        """Runs the kernels that steps will take, beside `right`. Empty, or what went wrong."""

        def routing_of(x: torch.Tensor) -> Routing:
            generator = torch.Generator(x.device).manual_seed(len(x))
            return route(torch.randn(len(x), self._router.num_experts, generator=generator, device=x.device), self._router)

        return try_linear(
            _Routed(self, routing_of),
            lambda x: right(x, routing_of(x)),
            num_tokens=num_tokens,
            width=self._width,
            dtype=self._dtype,
            device=self._device,
            most_different=_DIFFERENCE,
        )

    def _terms(self, x: torch.Tensor, routing: Routing, *, in_parts: bool) -> torch.Tensor:
        """Of each pair, [T * k, H] or float32 [k, T, H]."""
        chosen = routing.experts
        tiles = None
        if not self._takes_rows or len(x) > _ROWS_UP_TO:
            num_pairs = len(x) * self._router.top_k
            tiles = tiles_of(chosen, self._held, tile_tokens(num_pairs, self._router.num_experts, self._most_tokens))
        pairs = Pairs(x=x, chosen=chosen, held=self._held, bias=self._biases[0], clamped=self._clamped)
        inner = self._gate_up(pairs, tiles)
        pairs = Pairs(
            x=inner,
            chosen=chosen,
            held=self._held,
            weights=routing.weights,
            of_pairs=True,
            in_parts=in_parts,
            bias=self._biases[1],
        )
        return self._down(pairs, tiles)


@dataclass(frozen=True, slots=True)
class _Routed(LinearInParts):
    experts: TritonExperts
    routing_of: Callable[[torch.Tensor], Routing]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, self.routing_of(x))

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts.parts(x, self.routing_of(x))


def tile_tokens(num_pairs: int, num_experts: int, most: int = _MOST_TOKENS) -> int:
    """Pairs of a tile, where so many pairs are spread over so many experts."""
    mean = num_pairs / num_experts
    return min(most, next((tokens for up_to, tokens in _TILE_TOKENS if mean <= up_to), _MOST_TOKENS))


def choose_tile(tokens: int, *, item_bytes: int, bulk: bool, shared_bytes: int, depth_bytes: int = 256) -> ExpertTile:
    """How tiles of so many pairs are multiplied. `item_bytes`: of weights and inputs; `shared_bytes`: that a program may take."""
    many = tokens > 64
    depth = max(16, depth_bytes // (2 if many and item_bytes > 1 else 1) // item_bytes)
    tile = ExpertTile(
        tokens=tokens, cols=256 if many else 128, depth=depth, num_warps=8 if many else 4, num_stages=4, turned=not many, bulk=bulk
    )
    # Of few tokens, two programs to a multiprocessor: one begins while the other ends.
    room = shared_bytes if many else shared_bytes // 2
    while tile.num_stages > 2 and (tile.cols + tokens) * depth * item_bytes * tile.num_stages + _SHARED_SLACK > room:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile


def _comes_in_bulk(device: torch.device, row_bytes: int) -> bool:
    """Returns whether the tensor memory accelerator, which came with Hopper, as overlapping kernels did, takes rows of so many bytes."""
    return row_bytes % _ALIGNMENT == 0 and (device.type != "cuda" or overlaps(device))


class _Dense:
    takes_rows = True
    most_tokens = _MOST_TOKENS

    def __init__(self, weight: torch.Tensor, quantizer: InputQuantizer | None, *, gated: bool) -> None:
        self._weight = weight.contiguous()
        self._quantizer = quantizer
        self._gated = gated
        self.takes_rows = weight.shape[2] * (1 + gated) <= _WIDEST_ROW

    def __call__(self, pairs: Pairs, tiles: ExpertTiles | None) -> torch.Tensor:
        weight = self._weight
        if self._quantizer is not None:
            pairs = replace(pairs, x=self._quantizer(pairs.x))
        if tiles is None:
            tile = ExpertRowTile(rows=max(2, 8192 // triton.next_power_of_2(weight.shape[2])), num_warps=4)
            return multiply_rows(pairs, weight, tile=tile, gated=self._gated)
        device, item = weight.device, weight.element_size()
        bulk = _comes_in_bulk(device, weight.shape[2] * item)
        tile_of_pairs = choose_tile(tiles.tokens, item_bytes=item, bulk=bulk, shared_bytes=shared_bytes_of(device))
        return multiply_tiles(pairs, tiles, weight, tile=tile_of_pairs, gated=self._gated)


class _Eight:
    takes_rows = True
    most_tokens = _MOST_TOKENS

    def __init__(self, packed: Packed, quantizer: InputQuantizer, *, gated: bool) -> None:
        self._packed = packed
        self.quantizer = quantizer
        # Of what may have been rounded already.
        self.entry: RoundedBeside | None = None
        self._gated = gated
        self.takes_rows = packed.width * (1 + gated) <= _WIDEST_ROW

    def __call__(self, pairs: Pairs, tiles: ExpertTiles | None) -> torch.Tensor:
        if tiles is None:
            width = triton.next_power_of_2(self._packed.width * (1 + self._gated))
            rows = ExpertRowTile(rows=max(2, _ROW_BYTES // width), num_warps=4)
            return multiply_eight_rows(pairs, self._packed, self.quantizer, tile=rows, gated=self._gated)
        device = self._packed.values.device
        bulk = _comes_in_bulk(device, self._packed.width)
        tile = choose_tile(tiles.tokens, item_bytes=1, bulk=bulk, shared_bytes=shared_bytes_of(device), depth_bytes=128)
        if self._packed.group and tile.cols > 128:
            tile = replace(tile, cols=128)
        x = round_input(pairs.x, self.quantizer) if self.entry is None else self.entry.take(pairs.x)
        return multiply_eight(pairs, x, tiles, self._packed, tile=tile, exact=tile.turned, gated=self._gated)


class _Unpacked:
    takes_rows = False
    most_tokens = _UNPACKED_TOKENS

    def __init__(self, packed: Packed, quantizer: InputQuantizer | None, *, gated: bool) -> None:
        self._packed = packed
        self._quantizer = quantizer
        self._gated = gated

    def __call__(self, pairs: Pairs, tiles: ExpertTiles | None) -> torch.Tensor:
        assert tiles is not None
        if self._quantizer is not None:
            pairs = replace(pairs, x=self._quantizer(pairs.x))
        few = tiles.tokens <= 32
        tile = ExpertTile(
            tokens=tiles.tokens, cols=128, depth=0, num_warps=4 if few else 8, num_stages=4 if few else 3, turned=True, bulk=False
        )
        return multiply_unpacked(pairs, tiles, self._packed, tile=tile, gated=self._gated)


def _product(weights: torch.Tensor | Sequence[QuantizedWeight], dtype: torch.dtype, *, gated: bool) -> _Product:
    if isinstance(weights, torch.Tensor):
        return _Dense(weights, None, gated=gated)
    how = weights[0].activations
    prepared = [prepare(weight, weight.device) for weight in weights] if dtype in QUANTIZED_DTYPES else []
    packed = [each.packed for each in prepared if each.packed is not None]
    # Zero points that some have and others do not are rare enough.
    if len(packed) < len(weights) or len({each.zeros is None for each in packed}) > 1:
        return _Dense(torch.stack([weight.dequantize(dtype) for weight in weights]), how, gated=gated)
    if prepared[0].takes_rounded:
        assert how is not None
        return _Eight(stacked(packed), how, gated=gated)
    return _Unpacked(stacked(packed), how, gated=gated)
