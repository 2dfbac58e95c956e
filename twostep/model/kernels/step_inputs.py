"""The arrays of a captured step: at addresses of their own on the device, packed anew on the host before each replay.

    rows         |d d d d d|c c c c c c c c|e e e|. . . . .|      one token of each decode, then the chunks' tokens, then padding
    sequences    |D D D D D . . .|C E . . . . . .|               the decodes' places, then the chunks'; padding behind either

Rows of padding are token 0, at position 0, and write nowhere (slot -1). Decodes of padding have a negative length: attention has nothing to
do for them. (An empty sequence costs a program a microsecond or more in every layer, one after the other.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from twostep.engine.batch import Batch
from twostep.model.kernels.torch_attention import slots_before
from twostep.model.kernels.triton_delta_net import owners
from twostep.model.kernels.triton_prefill import plan_tiles
from twostep.model.step.graph_ladder import StepShape

# Each array starts at a multiple of 16 bytes, so that one program of a kernel serves all captured steps.
_ALIGNMENT = 4


def slots_of(group: int) -> str:
    """Returns the name of a group's slots."""
    return f"slots {group}"


class StepInputs:
    """int32 each, by name:

        token_ids, positions         [rows]
        slots_of(group)              [rows], the slots of each group of layers
        carried                      [rows], rows of the step before that token ids are carried from, or -1
        seq_lens                     [num_seqs]
        number                       [1], the step's, for its progress (triton_progress.py)

    where a head drafts (StatePlaces):

        before                       [rows]

    where layers keep states:

        sequences, offsets           [rows], as StateRows has them (triton_delta_net.py)

        and where there are chunks:

        query_start                  [num_seqs + 1], first row of each chunk
        sample_rows                  [num_seqs], the batch's, then row 0
        tiles                        [1 + most tiles, 2], by plan_tiles
    """

    def __init__(
        self,
        shape: StepShape,
        tile_tokens: int,
        device: torch.device,
        *,
        padding_length: int = -1,
        num_groups: int = 1,
        has_states: bool = False,
        placed: int = 0,
    ) -> None:
        """`tile_tokens`: of a tile of the kernel that attends the chunks. `padding_length`: of decodes. `placed`: slots of a block, where a
        head drafts."""
        self.shape = shape
        self._tile_tokens = tile_tokens
        self._block_size = placed
        slots = [slots_of(group) for group in range(num_groups)]
        sizes = dict.fromkeys(("token_ids", "positions", *slots, "carried"), shape.rows) | {"seq_lens": shape.num_seqs, "number": 1}
        if has_states:
            sizes |= {"sequences": shape.rows, "offsets": shape.rows}
        if placed:
            sizes |= {"before": shape.rows}
        if shape.chunks:
            most_tiles = shape.rows // tile_tokens + shape.chunks
            sizes |= {"query_start": shape.num_seqs + 1, "sample_rows": shape.num_seqs, "tiles": 2 * (1 + most_tiles)}
        self._places: dict[str, slice] = {}
        total = 0
        for name, size in sizes.items():
            self._places[name] = slice(total, total + size)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._padding = np.zeros(total, np.int32)
        for name in (*slots, "carried"):
            self._padding[self._places[name]] = -1
        if has_states:
            self._padding[self._places["sequences"]] = -1
        self._padding[self._places["seq_lens"]][: shape.decodes] = padding_length
        self.memory = torch.from_numpy(self._padding.copy()).to(device)

    def tensor(self, name: str) -> torch.Tensor:
        return self.memory[self._places[name]]

    def packed(self, batch: Batch, num_decodes: int, number: int) -> npt.NDArray[np.int32]:
        """Returns what `memory` is to hold for a batch of one token for each of its first `num_decodes` sequences, chunks behind."""
        shape, packed = self.shape, self._padding.copy()
        num_rows, num_seqs = len(batch.token_ids), len(batch.seq_lens)

        def part(name: str) -> npt.NDArray[np.int32]:
            return packed[self._places[name]]

        part("token_ids")[:num_rows] = batch.token_ids
        part("positions")[:num_rows] = batch.positions
        for group, slots in enumerate(batch.slots):
            part(slots_of(group))[:num_rows] = slots
        if batch.carried is not None:
            part("carried")[:num_rows] = batch.carried
        if "before" in self._places:
            part("before")[:num_rows] = slots_before(batch, self._block_size)
        part("seq_lens")[:num_decodes] = batch.seq_lens[:num_decodes]
        part("number")[0] = number
        if batch.state_tables is not None:
            places = np.arange(num_seqs)
            places[num_decodes:] += shape.decodes - num_decodes
            part("sequences")[:num_rows], part("offsets")[:num_rows] = owners(batch.query_start, places)
        if not shape.chunks:
            return packed
        chunks = slice(shape.decodes, shape.decodes + num_seqs - num_decodes)
        part("seq_lens")[chunks] = batch.seq_lens[num_decodes:]
        starts = part("query_start")
        starts[chunks] = batch.query_start[num_decodes:-1]
        starts[chunks.stop :] = num_rows
        part("sample_rows")[: len(batch.sample_rows)] = batch.sample_rows
        tiles = plan_tiles(
            np.diff(batch.query_start[num_decodes:]).astype(np.int64), batch.seq_lens[num_decodes:].astype(np.int64), self._tile_tokens
        )
        tiles[1:, 0] += shape.decodes
        part("tiles")[: tiles.size] = tiles.reshape(-1)
        return packed
