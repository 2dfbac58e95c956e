"""The head that --speculative-config asks for, on the served model: whether it is one of that model, and what it takes of the memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.errors import SetupError
from twostep.settings.speculative import MTP, SpeculativeConfig
from twostep.worker.config import WorkerConfig

if TYPE_CHECKING:
    from twostep.model.families.config import ModelConfig


class Head:
    """A head that was found, and not loaded yet.

    source       what the runner loads it from
    num_layers   of the pool that are its own
    block_bytes  what is kept beside each of the pool's blocks
    fixed_bytes  what it takes besides, whatever the pool; later_bytes: of that, what is taken once the weights are there
    """

    def __init__(self, config: WorkerConfig, speculative: SpeculativeConfig, served: ModelConfig) -> None:
        """`config` is settled. Raises SetupError where the head cannot draft for the served model."""
        from twostep.model.heads.source import HeadSource  # noqa: PLC0415
        from twostep.model.loading.weight_files import stored_tensors  # noqa: PLC0415
        from twostep.model.runner.head_rounds import MOST_ROWS, num_scratch_blocks  # noqa: PLC0415
        from twostep.model.runner.model_runner import captured_bytes, kv_shape  # noqa: PLC0415
        from twostep.model.step.kv_cache import DTYPES  # noqa: PLC0415

        head_dir, most_tokens = Path(speculative.model), speculative.num_speculative_tokens
        if speculative.method != MTP and not head_dir.is_dir():
            raise SetupError(f"{head_dir} is not there; give the directory of a head, such as `twostep lab eagle` makes")
        self.source = HeadSource(method=speculative.method, head_dir=head_dir, most_tokens=most_tokens)
        self.num_layers = self.source.num_layers
        dtype = served.dtype if config.dtype == "auto" else config.dtype
        state_size = self.source.state_size(served)
        self.block_bytes = config.block_size * state_size * DTYPES[dtype].itemsize
        self.later_bytes = 0
        if self.num_layers:
            shape = kv_shape(served, dtype, 1, config.block_size, config.kv_cache_dtype, num_head_layers=self.num_layers)
            self.later_bytes += num_scratch_blocks(config.block_size, config.max_num_seqs, most_tokens) * shape.block_bytes
        if config.device != "cpu":
            self.later_bytes += captured_bytes(served, dtype, min(MOST_ROWS, config.max_num_seqs), 0)
        # MTP's weights are among the model's.
        tensors = () if speculative.method == MTP else stored_tensors(head_dir)
        weights = sum(math.prod(tensor.shape) for tensor in tensors) * DTYPES[dtype].itemsize
        tables = self.source.table_bytes(served, config.max_model_len or served.max_model_len)
        self.fixed_bytes = weights + tables + self.later_bytes
