"""A trial of the gated delta nets' kernels on the card at hand, before they serve: they have to agree with torch once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from twostep.engine.batch import Batch, KvShape
from twostep.model.kernels import torch_delta_net
from twostep.model.kernels.delta_net import DeltaWeights
from twostep.model.kernels.triton_delta_net import StateRows, delta_net, most_chunks, owners
from twostep.model.step.kv_cache import KvCache
from twostep.model.step.sequence_states import SequenceStates

# A decode and prompts of three chunks, two and a part of one; and how far apart two orders of rounding may be.
_COUNTS, _BEGINS = [1, 150, 70, 2], [False, False, True, False]
_DIFFERENCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def trial(weights: DeltaWeights) -> str:
    """Computes one step of such a layer with kernels and with torch, of random numbers and of states in scattered blocks, and compares the
    outputs and the states afterwards. Returns what is wrong, or an empty text."""
    d, device, dtype = weights.dims, weights.conv.device, weights.conv.dtype
    name = str(dtype).removeprefix("torch.")
    # About 128, in as many columns as there are.
    head_dim = 8 * d.columns.count * -(-16 // d.columns.count)
    shape = KvShape(num_blocks=1, block_size=16, num_layers=4, num_kv_heads=2, head_dim=head_dim, dtype=name)
    num_bytes, num_seqs = d.column_bytes(dtype.itemsize), len(_COUNTS)
    each = shape.state_blocks_each(num_bytes, d.columns.count)
    shape = replace(shape, num_blocks=num_seqs * each, num_state_blocks=each)
    generator = torch.Generator("cpu").manual_seed(0)

    def made(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    weights = DeltaWeights(
        dims=d,
        conv=(made(d.num_channels, d.kernel) / d.kernel**0.5).to(device, dtype),
        dt_bias=made(d.num_value_heads).to(device),
        log_rate=made(d.num_value_heads).to(device),
        norm=(1 + 0.1 * made(d.value_dim)).to(device, dtype),
        eps=weights.eps,
    )
    projected = made(sum(_COUNTS), d.num_inputs + 2 * d.num_value_heads).to(device, dtype)
    heads, size = (num_seqs, d.num_key_heads), 4 * d.recurrent_numbers
    kept = made(*heads, d.recurrent_numbers).view(torch.uint8), made(*heads, d.conv_numbers).to(dtype).view(torch.uint8)
    states = torch.zeros(*heads, d.head_bytes(dtype.itemsize), dtype=torch.uint8)
    states[:, :, : size + kept[1].shape[2]] = torch.cat(kept, 2)
    states = states.view(num_seqs, d.columns.num_own, num_bytes)
    tables = torch.randperm(shape.num_blocks, generator=generator).view(num_seqs, each).to(device)
    query_start = np.concatenate(([0], np.cumsum(_COUNTS))).astype(np.int32)
    sequences, offsets = owners(query_start, np.arange(num_seqs))
    positions = offsets + np.repeat(np.where(_BEGINS, 0, 9), _COUNTS)
    batch = Batch(
        token_ids=positions.astype(np.int64),
        positions=positions.astype(np.int64),
        query_start=query_start,
        seq_lens=positions[query_start[1:] - 1].astype(np.int32) + 1,
        block_tables=np.zeros((1, num_seqs, 1), np.int32),
        slots=np.full((1, len(positions)), -1, np.int64),
        sample_rows=np.zeros(0, np.int64),
        sampling=(),
        state_sources=tables.cpu().numpy().astype(np.int32),
        state_tables=tables.cpu().numpy().astype(np.int32),
    )
    found = []
    try:
        for by_kernels in (False, True):
            cache = KvCache(shape, str(device))
            cache.write_states(tables, 0, d.columns, states.to(device))
            if by_kernels:
                rows = StateRows(
                    sequences=torch.from_numpy(sequences).to(device),
                    offsets=torch.from_numpy(offsets).to(device),
                    sources=tables.int(),
                    tables=tables.int(),
                    num_decodes=1,
                    most_chunks=most_chunks(len(positions), num_seqs - 1),
                )
                starts = torch.from_numpy(query_start).to(device)
                on_device = torch.from_numpy(batch.positions).to(device)
                out = delta_net(projected, cache, 0, rows=rows, positions=on_device, query_start=starts, weights=weights)
            else:
                out = torch_delta_net.delta_net(SequenceStates(batch, cache), 0, projected, weights)
            after = cache.read_states(tables, 0, d.columns, num_bytes).view(*heads, -1)
            recurrent, inputs = after[:, :, :size], after[:, :, size:]
            found.append((out.float(), recurrent.view(torch.float32).clone(), inputs.clone()))
        (want, want_state, want_inputs), (got, got_state, got_inputs) = found
        differences = [float((a - b).norm() / b.norm()) for a, b in ((got, want), (got_state, want_state))]
    except Exception as error:  # noqa: BLE001 - whatever a compiler or driver raises: this card does without
        return f"{type(error).__name__}: {str(error)[:200]}"
    if not torch.equal(got_inputs, want_inputs):
        return "other inputs are kept than by torch"
    # NaN is no small difference.
    right = all(difference < _DIFFERENCE[dtype] for difference in differences)
    return "" if right else f"they differ from torch by {max(differences):.1e}"
