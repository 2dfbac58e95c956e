"""Gated delta nets' kernels over a scattered pool, against the rule by its definition, token by token in float64. Blocks that nobody's
state is read from are poison, and blocks that none is written to stay as they are."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kernel_pools import DEVICE, poisoned_pool, relative_limit

from twostep.engine.batch import KvShape
from twostep.model.kernels.delta_net import DeltaDims, DeltaWeights
from twostep.model.kernels.delta_trial import trial
from twostep.model.kernels.triton_delta_net import StateRows, delta_net, most_chunks, owners
from twostep.model.kernels.triton_ops import TritonOps
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.state_columns import StateColumns

LAYER, NUM_LAYERS = 1, 2  # of those with a state
EPS = 1e-6
# Query, key and value behind the convolution; two operands of each of eight products of a chunk, five of which enter further ones; the
# inverse; the result.
_ROUNDINGS = 3 + 2 * 8 + 5 + 1 + 1
# Rows of a head's matrix are cut by the ends of pieces, or not; heads of a key head; keys and values of every kind of number; columns of
# one key head and of two, all of a block's or some.
ODD = DeltaDims(num_key_heads=1, num_value_heads=3, key_dim=12, value_dim=20, kernel=4)
WIDE = DeltaDims(num_key_heads=1, num_value_heads=1, key_dim=33, value_dim=40, kernel=2)
EVEN = DeltaDims(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32, kernel=3, columns=StateColumns(count=2, num_own=2))
PART = replace(EVEN, num_value_heads=2, columns=StateColumns(count=4, first=1, num_own=2))
PAIR = replace(EVEN, value_dim=20, columns=StateColumns(count=4, first=3, num_own=1))


@dataclass
class Step:
    """`counts` new tokens of each sequence, the first `num_decodes` of which decode. What `begins` is not there before."""

    dims: DeltaDims
    counts: list[int]
    begins: list[bool]
    dtype: torch.dtype = torch.float32
    strength: float = 1.0
    moves: bool = False  # to other blocks than it is read from
    quantization: str = "none"  # of the KV that is there besides
    padding: tuple[int, int, int] = (0, 0, 0)  # empty places of decodes and of prompts, and rows at the end
    weights: DeltaWeights = field(init=False)
    cache: KvCache = field(init=False)

    def __post_init__(self) -> None:
        d = self.dims
        heads = d.num_value_heads
        self.weights = DeltaWeights(
            dims=d,
            conv=(torch.randn(d.num_channels, d.kernel) / d.kernel**0.5).to(self.dtype).to(DEVICE),
            dt_bias=torch.randn(heads, device=DEVICE),
            log_rate=torch.randn(heads, device=DEVICE) + float(np.log(self.strength)),
            norm=(1 + 0.3 * torch.randn(d.value_dim)).to(self.dtype).to(DEVICE),
            eps=EPS,
        )
        sizes = {"block_size": 4, "num_layers": 1, "num_kv_heads": 1, "head_dim": 64 if d in (EVEN, PART) else 24}
        kind = {"dtype": str(self.dtype).removeprefix("torch."), "quantization": self.quantization}
        self.each = KvShape(num_blocks=1, **sizes, **kind).state_blocks_each(d.column_bytes(self.dtype.itemsize), d.columns.count)
        self.per_seq = NUM_LAYERS * self.each
        num_blocks = 2 * self.per_seq * len(self.counts) + 3
        self.cache = poisoned_pool(self.dtype, num_blocks=num_blocks, quantization=self.quantization, **sizes)

    @property
    def num_decodes(self) -> int:
        return next((i for i, n in enumerate(self.counts) if n != 1), len(self.counts))

    def run(self) -> None:
        """Computes it both ways and compares."""
        d, device = self.dims, DEVICE
        num_seqs, num_rows = len(self.counts), sum(self.counts)
        free = list(range(self.cache.shape.num_blocks))
        random.Random(num_rows).shuffle(free)
        sources = torch.tensor([[free.pop() for _ in range(self.per_seq)] for _ in self.counts])
        tables = torch.tensor([[free.pop() for _ in range(self.per_seq)] for _ in self.counts]) if self.moves else sources
        # What is there before.
        recurrent = torch.randn(num_seqs, d.num_value_heads, d.key_dim, d.value_dim)
        inputs = torch.randn(num_seqs, d.num_channels, d.kernel - 1).to(self.dtype)
        size, num_inputs = 4 * d.recurrent_numbers, d.conv_numbers * self.dtype.itemsize
        held = torch.zeros(num_seqs, d.num_key_heads, d.head_bytes(self.dtype.itemsize), dtype=torch.uint8)
        held[:, :, :size] = recurrent.view(num_seqs, d.num_key_heads, -1).view(torch.uint8)
        held[:, :, size : size + num_inputs] = inputs[:, channels_of(d)].flatten(2).view(torch.uint8)
        held = held.view(num_seqs, d.columns.num_own, -1)
        known = torch.tensor([not begins for begins in self.begins])
        self.cache.write_states(sources[known].to(device), LAYER, d.columns, held[known].to(device))
        # A row is a slice of something wider.
        width = d.num_inputs + 2 * d.num_value_heads
        empty_decodes, empty_prompts, empty_rows = self.padding
        projected = torch.randn(num_rows + empty_rows, width + 8).to(self.dtype).to(device)[:, :width]
        decodes = self.num_decodes
        places = np.arange(num_seqs)
        places[decodes:] += empty_decodes
        num_places = num_seqs + empty_decodes + empty_prompts
        query_start = np.concatenate(([0], np.cumsum(self.counts))).astype(np.int32)
        sequences, offsets = owners(query_start, places)
        befores = np.array([0 if begins else 5 for begins in self.begins])
        positions = np.repeat(befores, self.counts) + offsets
        starts = np.zeros(num_places + 1, np.int32)
        starts[places[decodes:]] = query_start[decodes:-1]
        starts[places[-1] + 1 :] = num_rows
        wrong = torch.full((num_places, self.per_seq), 2**31 - 1, dtype=torch.int32)
        padded = [wrong.index_copy(0, torch.from_numpy(places), x.int()).to(device) for x in (sources, tables)]
        rows = StateRows(
            sequences=torch.from_numpy(np.pad(sequences, (0, empty_rows), constant_values=-1)).to(device),
            offsets=torch.from_numpy(np.pad(offsets, (0, empty_rows))).to(device),
            sources=padded[0],
            tables=padded[1],
            num_decodes=decodes + empty_decodes,
            most_chunks=most_chunks(num_rows + empty_rows, num_places - decodes - empty_decodes),
        )
        before = self.cache._bytes.clone()
        got = delta_net(
            projected,
            self.cache,
            LAYER,
            rows=rows,
            positions=torch.from_numpy(np.pad(positions, (0, empty_rows))).to(device),
            query_start=torch.from_numpy(starts).to(device),
            weights=self.weights,
        )
        assert not got[num_rows:].any()
        touched = tables[:, LAYER * self.each : (LAYER + 1) * self.each].reshape(-1)
        others = torch.ones(len(before), dtype=torch.bool).index_fill(0, touched, False)
        assert torch.equal(self.cache._bytes[others], before[others])
        after = self.cache.read_states(tables.to(device), LAYER, d.columns, held.shape[2]).cpu()
        # And in them nothing but the columns.
        self.cache.write_states(tables.to(device), LAYER, d.columns, held.to(device))
        back = before.clone()
        KvCache(self.cache.shape, device, tensor=back.view(self.cache.tensor.dtype).view_as(self.cache.tensor)).write_states(
            tables.to(device), LAYER, d.columns, held.to(device)
        )
        assert torch.equal(self.cache._bytes, back)
        after = after.view(num_seqs, d.num_key_heads, -1)
        recurrent_after = after[:, :, :size].view(torch.float32).reshape(recurrent.shape)
        inputs_after = torch.empty_like(inputs)
        inputs_after[:, channels_of(d)] = after[:, :, size : size + num_inputs].view(self.dtype).unflatten(2, (-1, d.kernel - 1))
        for s, (start, count) in enumerate(zip(query_start, self.counts, strict=False)):
            part = slice(start, start + count)
            state, kept = (recurrent[s] * known[s]).double(), inputs[s] * known[s]
            want, state, kept = by_definition(projected[part].cpu(), kept, state, self.weights)
            self.assert_near(got[part].cpu(), want)
            self.assert_near(recurrent_after[s], state)
            assert torch.equal(inputs_after[s], kept)

    def assert_near(self, got: torch.Tensor, want: torch.Tensor) -> None:
        # Differences of sums of strong decays have fewer digits.
        limit = relative_limit(self.dtype, _ROUNDINGS) * max(1.0, self.strength)
        assert bool(got.isfinite().all())
        assert float((got.double() - want).norm()) < limit * float(want.norm() + 1e-3)


def channels_of(d: DeltaDims) -> torch.Tensor:
    """The channels that each key head has: of q, of k, and of v."""
    q, k, v = torch.arange(d.num_channels).split(
        (d.num_key_heads * d.key_dim, d.num_key_heads * d.key_dim, d.num_value_heads * d.value_dim)
    )
    return torch.cat([part.view(d.num_key_heads, -1) for part in (q, k, v)], 1)


def by_definition(
    projected: torch.Tensor, kept: torch.Tensor, state: torch.Tensor, weights: DeltaWeights
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence's output, state and last inputs, in float64 between the roundings of what is stored."""
    d, dtype = weights.dims, projected.dtype
    conv, dt_bias, rate, norm = (x.cpu().double() for x in (weights.conv, weights.dt_bias, weights.log_rate, weights.norm))
    by_head = projected[:, : d.num_inputs].view(len(projected), d.num_key_heads, -1)
    q, k, v, z = by_head.split((d.key_dim, d.key_dim, d.share * d.value_dim, d.share * d.value_dim), -1)
    b, a = projected[:, d.num_inputs :].double().view(len(projected), d.num_key_heads, 2, d.share).unbind(2)
    inputs = torch.cat((kept.T, torch.cat([x.reshape(len(projected), -1) for x in (q, k, v)], 1)))
    outs = []
    for t in range(len(projected)):
        mixed = F.silu((inputs[t : t + d.kernel].double().T * conv).sum(1)).to(dtype).double()
        keys = d.num_key_heads * d.key_dim
        query, key = (
            (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(d.share, 0)
            for x in mixed[: 2 * keys].view(2, d.num_key_heads, d.key_dim)
        )
        value = mixed[2 * keys :].view(d.num_value_heads, d.value_dim)
        state = state * (-rate.exp() * F.softplus(a[t].reshape(-1) + dt_bias)).exp()[:, None, None]
        held = torch.einsum("hk,hkv->hv", key, state)
        state = state + torch.einsum("hk,hv->hkv", key, (value - held) * b[t].reshape(-1).sigmoid()[:, None])
        outs.append(torch.einsum("hk,hkv->hv", query, state) * d.key_dim**-0.5)
    normed = F.rms_norm(torch.stack(outs), (d.value_dim,), eps=weights.eps) * norm
    return (normed * F.silu(z.reshape(normed.shape).double())).view(len(projected), -1), state, inputs[len(projected) :].T


@pytest.mark.parametrize(
    ("dims", "moves"), [(ODD, True), (WIDE, True), (EVEN, False), (PART, True), (PAIR, False)], ids=["odd", "wide", "even", "part", "pair"]
)
def test_decodes_beside_prompts_that_begin_and_go_on(dims: DeltaDims, moves: bool) -> None:
    Step(dims, [1, 1, 1, 70, 2, 1], [False, True, False, True, False, False], moves=moves).run()


@pytest.mark.parametrize("seed", range(8))
def test_a_captured_step_touches_what_its_sequences_have(seed: int) -> None:
    """Places of decodes and prompts, and rows, stay empty."""
    rng = random.Random(seed)
    decodes, prompts = rng.choice([(0, 1), (0, 2), (1, 0), (3, 0), (2, 1), (1, 2)])
    counts = [1] * decodes + [rng.choice([2, 3, 5, 63, 64, 65, 127, 200]) for _ in range(prompts)]
    places = rng.randrange(4), rng.randrange(3)
    # The places for decodes are rows, too.
    padding = (*places, places[0] + rng.randrange(3))
    begins = [rng.random() < 0.5 for _ in counts]
    Step(WIDE, counts, begins, strength=[0.001, 1.0, 50.0][seed % 3], padding=padding, moves=seed % 2 == 0).run()


@pytest.mark.parametrize(("dtype", "quantization"), [(torch.bfloat16, "int8"), (torch.float16, "none")])
def test_in_16_bits(dtype: torch.dtype, quantization: str) -> None:
    Step(ODD, [1, 1, 67, 3], [False, True, False, True], dtype=dtype, quantization=quantization).run()


def test_keys_that_repeat_themselves_lose_nothing() -> None:
    """The same token over and over, all written and nothing forgotten: powers of such a system have twenty digits."""
    step = Step(WIDE, [130], [True], strength=1e-4)
    randn = torch.randn
    with pytest.MonkeyPatch.context() as patch:

        def same(*sizes: int, **options: object) -> torch.Tensor:
            made = randn(*sizes, **options)
            if sizes[0] == 130:
                made[:] = made[:1]
                made[:, step.dims.num_inputs : step.dims.num_inputs + 1] = 9.0
            return made

        patch.setattr(torch, "randn", same)
        step.run()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_prove_themselves_or_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Step(WIDE, [1], [True]).weights
    ops = TritonOps(DEVICE)
    ops.tries = True
    ops.prepare_delta(weights)
    assert ops.has_delta_kernels
    # As if there were one chunk. What the others would have written is no number then, not what the trial before has left there.
    monkeypatch.setattr("twostep.model.kernels.delta_trial.most_chunks", lambda num_rows, num_seqs: 1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    try:
        assert trial(weights)
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr("twostep.model.kernels.delta_trial.trial", lambda weights: "it differs")
    other = TritonOps(DEVICE)
    other.tries = True
    other.prepare_delta(weights)
    assert not other.has_delta_kernels
