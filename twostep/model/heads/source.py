"""Says where a head comes from, and whether it is one of a model, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twostep.errors import SetupError
from twostep.model.eagle.config import parse_eagle_config
from twostep.model.eagle.files import load_head
from twostep.model.families.config import ModelConfig
from twostep.model.families.decoder import Decoder
from twostep.model.heads.eagle import EagleDrafts, shares_rope
from twostep.model.heads.head import DraftHead
from twostep.model.heads.medusa import MedusaDrafts, parse_medusa_config
from twostep.model.heads.mtp import MtpDrafts
from twostep.model.kernels.ops import Ops
from twostep.settings.speculative import EAGLE3, MEDUSA, MTP


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSource:
    """`method`: of --speculative-config; `head_dir`: the head's directory, which mtp has none of; `most_tokens`: drafted at once."""

    method: str
    head_dir: Path
    most_tokens: int

    @property
    def num_layers(self) -> int:
        """Layers of the pool that are the head's."""
        return int(self.method != MEDUSA)

    @property
    def uses_mtp(self) -> bool:
        return self.method == MTP

    def state_size(self, target: ModelConfig) -> int:
        """Returns how many numbers are kept of a token. Raises SetupError, naming what is wrong, where the head cannot draft for the
        model."""
        if target.encoder is not None or target.gated_delta is not None:
            what = "has an encoder" if target.encoder is not None else "keeps states, which cannot forget drafts that did not come"
            raise SetupError(f"the model {what}: no head drafts for it; leave --speculative-config out")
        if self.method == MTP:
            if not target.num_mtp_layers:
                raise SetupError(
                    f"the model has no layer that predicts further tokens (num_nextn_predict_layers), or none that is known of "
                    f"{target.architecture}; give another method"
                )
            return target.hidden_size
        if self.method == MEDUSA:
            parse_medusa_config(self.head_dir, target)
            return target.hidden_size
        assert self.method == EAGLE3
        head = parse_eagle_config(self.head_dir)
        # With an embedding of its own, or not: which one is known when the weights are read.
        head.check_target(target, has_embedding=True)
        own, theirs = (head.num_kv_heads, head.head_dim), (target.num_kv_heads, target.head_dim)
        if target.latent is not None or own != theirs:
            kept = "a latent" if target.latent is not None else f"{theirs[0]} heads of {theirs[1]} numbers"
            raise SetupError(
                f"the head keeps {own[0]} heads of {own[1]} numbers of a token (num_key_value_heads, head_dim), and a layer of the model "
                f"{kept}: it has no place in the model's blocks; give a head of the model's shape"
            )
        return head.hidden_size

    def table_bytes(self, target: ModelConfig, max_model_len: int) -> int:
        """Returns what the head's own rope tables take."""
        if self.method != EAGLE3:
            return 0
        head = parse_eagle_config(self.head_dir)
        # cos and sin, float32 of each pair.
        return 0 if shares_rope(head, target) else 4 * head.head_dim * max_model_len

    def load(self, model: Decoder, config: ModelConfig, ops: Ops, device: str) -> DraftHead:
        """`config`: the model's. Raises SetupError."""
        if self.method == MTP:
            return MtpDrafts(model)
        if self.method == MEDUSA:
            return MedusaDrafts(self.head_dir, config, model.dtype, device, ops)
        # It turns nothing itself.
        head = load_head(self.head_dir, config, model.embedding, model.dtype, num_positions=1)
        # Blocks behind every layer's window are given away.
        window = max(config.windows) if all(config.windows) else 0
        return EagleDrafts(head, model, ops, config.num_layers + 1, window)
