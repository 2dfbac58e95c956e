"""The EAGLE-3 head that --speculative-config asks for, beside the served model: whether it is one of that model, and what it takes of the
memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from twostep.errors import SetupError
from twostep.lab.plan.model import weight_bytes
from twostep.worker.config import WorkerConfig

if TYPE_CHECKING:
    from twostep.model.eagle.head import EagleHead
    from twostep.model.families.config import ModelConfig
    from twostep.model.runner.model_runner import ModelRunner

log = logging.getLogger(__name__)


class EagleDraft:
    """A head that was found, and not loaded yet. `block_bytes`: what it keeps of as many tokens as a block of the model's KV has.
    `fixed_bytes`: what it takes besides."""

    def __init__(self, config: WorkerConfig, head_dir: Path, served: ModelConfig) -> None:
        """`config` is settled. Raises SetupError where the head cannot draft for the served model."""
        from twostep.model.eagle.config import parse_eagle_config  # noqa: PLC0415
        from twostep.model.step.kv_cache import DTYPES  # noqa: PLC0415

        if not head_dir.is_dir():
            raise SetupError(f"{head_dir} is not there; give the directory of an EAGLE-3 head, such as `twostep lab eagle` makes")
        if config.device != "cpu":
            raise SetupError("EAGLE-3 heads draft on CPUs only; give --device cpu, or another method")
        self._head_dir = head_dir
        head = parse_eagle_config(head_dir)
        # With an embedding of its own, or not: which one is known when the weights are read.
        head.check_target(served, has_embedding=True)
        dtype = served.dtype if config.dtype == "auto" else config.dtype
        per_token = head.hidden_size + 2 * head.num_kv_heads * head.head_dim
        self.block_bytes = config.block_size * per_token * DTYPES[dtype].itemsize
        self.fixed_bytes = weight_bytes(head_dir, dtype)

    def load(self, runner: ModelRunner) -> EagleHead:
        """`runner`: of the served model. Raises SetupError."""
        from twostep.model.eagle.files import load_head  # noqa: PLC0415

        model = runner.model
        head = load_head(self._head_dir, runner.config, model.embedding, model.dtype)
        log.info("EAGLE-3 head %s loaded: it may propose %d of %d tokens", self._head_dir, len(head.d2t), runner.vocab_size)
        return head
