"""What a worker's settings and a checkpoint must agree on, by config.json alone: known before anything starts. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostep.checkpoint.directory import read_json
from twostep.checkpoint.kv_scheme import kv_format, read_kv_scheme
from twostep.checkpoint.quantization import check_unquantized, read_quantization
from twostep.checkpoint.usual_keys import usual_keys
from twostep.errors import SetupError
from twostep.quantized_vector import SLOTS_TOGETHER, reasons_against
from twostep.settings.worker import LOSSY_WIRES, WorkerSettings


def check_formats(model_dir: Path, worker: WorkerSettings) -> None:
    """Raises SetupError for weights that are quantized in a way that is not supported, or twice, for KV that the checkpoint wants
    quantized and that could not be stored or sent so, and for int4 KV of a model that it is not for. What the settings alone contradict is
    refused with them."""
    config = read_json(model_dir / "config.json")
    stored = read_quantization(model_dir, config)
    if worker.quantization != "none":
        check_unquantized(stored, worker.quantization)
    format = kv_format(worker.kv_cache_dtype, read_kv_scheme(model_dir, config))
    if format == "none":
        return
    if format == "int4":
        _check_int4(config, worker.block_size)
    asked = f"the checkpoint's kv_cache_scheme asks for KV in {format}"
    if worker.kv_wire in LOSSY_WIRES:
        raise SetupError(
            f"{asked}, which cannot travel as --kv-wire {worker.kv_wire}; give --kv-wire raw or zstd, or --kv-cache-dtype exact"
        )
    if worker.block_size % SLOTS_TOGETHER:
        raise SetupError(
            f"{asked}, which is stored {SLOTS_TOGETHER} tokens together, and --block-size {worker.block_size} is no multiple; give "
            "--block-size 16, or --kv-cache-dtype exact"
        )


def _check_int4(config: Mapping[str, Any], block_size: int) -> None:
    keys = usual_keys(config)
    hidden, num_heads = keys.get("hidden_size"), keys.get("num_attention_heads")
    head_dim = keys.get("head_dim") or (
        hidden // num_heads if isinstance(hidden, int) and isinstance(num_heads, int) and num_heads else None
    )
    if not isinstance(head_dim, int):
        return  # what such a file lacks is said by who loads it
    num_planes = 1 if keys.get("kv_lora_rank") is not None else 2
    reasons = reasons_against("int4", head_dim=head_dim, block_size=block_size, num_planes=num_planes)
    if reasons:
        raise SetupError(f"--kv-cache-dtype int4 is not for this model: {'; '.join(reasons)}; give --kv-cache-dtype int8")
