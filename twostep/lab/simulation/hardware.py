"""How fast a simulated worker is and what it holds: a preset of `twostep plan`, without an engine behind it."""

from __future__ import annotations

from dataclasses import dataclass

from twostep.errors import SetupError
from twostep.lab.plan.memory import worker_memory
from twostep.lab.plan.presets import load_preset
from twostep.step_curve import StepCurve

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One worker of either role. `edge_s` is what router, network and edges add to a first token; `hand_over_s` lies between a prompt's
    last step and the decode worker's next one, and `token_hand_over_s` comes on top for each of its tokens. `ahead_s`: a step is planned
    so long before the running one ends."""

    prefill: StepCurve
    decode: StepCurve
    prefill_tokens: int = 8192
    decode_tokens: int = 2048
    max_num_seqs: int = 256
    num_blocks: int = 50_000
    block_size: int = _BLOCK_SIZE
    ahead_s: float = 0.024
    edge_s: float = 0.011
    hand_over_s: float = 0.007
    token_hand_over_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def prompt_s(self, num_tokens: int, pairs: float) -> float:
        """What a prompt adds to full steps."""
        return self.prefill.per_row_s * num_tokens + self.prefill.per_pair_s * pairs


def hardware_of(preset_name: str) -> Hardware:
    """Raises SetupError for a preset that does not say its model and memory."""
    preset = load_preset(preset_name)
    if preset.model is None or not preset.gpu_memory_bytes:
        raise SetupError(f"the preset {preset_name} names no model and no memory; give one like h200-llama-3.1-8b")
    memory = worker_memory(preset.model, preset.gpu_memory_bytes, runtime_bytes=preset.runtime_bytes, block_size=_BLOCK_SIZE)
    return Hardware(
        prefill=preset.prefill,
        decode=preset.decode,
        prefill_tokens=preset.prefill_tokens,
        decode_tokens=preset.decode_tokens,
        max_num_seqs=preset.max_num_seqs,
        num_blocks=memory.num_blocks,
        ahead_s=min(preset.prefill_ahead_s, 1.0) if preset.look_ahead else 0.0,
        edge_s=preset.edge_s,
        hand_over_s=preset.hand_over.latency_s,
        token_hand_over_s=preset.model.kv_token_bytes * (1 - preset.hand_over.hidden) / preset.hand_over.bytes_per_s,
    )
