"""What a worker's settings and a checkpoint must agree on, by config.json alone: known before anything starts. Torch-free."""

from __future__ import annotations

from pathlib import Path

from twostep.checkpoint.directory import read_json
from twostep.checkpoint.kv_scheme import kv_format, read_kv_scheme
from twostep.checkpoint.quantization import check_unquantized, read_quantization
from twostep.errors import SetupError
from twostep.settings.worker import LOSSY_WIRES, SLOTS_TOGETHER, WorkerSettings


def check_formats(model_dir: Path, worker: WorkerSettings) -> None:
    """Raises SetupError for weights that are quantized in a way that is not supported, or twice, and for KV that the checkpoint wants
    quantized and that could not be stored or sent so. What the settings alone contradict is refused with them."""
    config = read_json(model_dir / "config.json")
    stored = read_quantization(model_dir, config)
    if worker.quantization != "none":
        check_unquantized(stored, worker.quantization)
    format = kv_format(worker.kv_cache_dtype, read_kv_scheme(model_dir, config))
    if format == "none":
        return
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
