"""Measures how long a CPU takes to load the quantized weights of a random llama (973 million in its layers), beside reading its files.

    python benchmarks/quantized_loading.py --threads 1 --formats packed gptq awq

Files are written to a temporary directory and read once before, so that they are in the page cache. `cpu` is the time of this process on
all its threads, which other work on the machine changes less than the time on the clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from twostep.model.families.modules import Place
from twostep.model.families.registry import build_model, parse_config
from twostep.model.kernels.ops import Ops
from twostep.model.loading.weight_files import read_weights, stored_tensors
from twostep.model.loading.weights import load_weights
from twostep.settings.reading import FlagParser

LAYERS, WIDTH, INNER, KV, VOCAB, GROUP = 16, 2048, 8192, 512, 1024, 128
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (KV, WIDTH),
    "self_attn.v_proj": (KV, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
}
SHAPES |= {"mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER)}
_INTS = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
CONFIGS = {
    "packed": _INTS
    | {"format": "pack-quantized", "config_groups": {"0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": GROUP}}}},
    "int8": _INTS | {"format": "int-quantized", "config_groups": {"0": {"targets": ["Linear"], "weights": {"strategy": "channel"}}}},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def layer(kind: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of a layer, of random numbers."""

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)

    scales = (torch.rand(rows, columns // GROUP) * 0.01 + 0.001).half()
    if kind == "packed":
        return {"weight_packed": words(rows, columns // 8), "weight_scale": scales, "weight_shape": torch.tensor([rows, columns])}
    if kind == "int8":
        return {"weight": torch.randint(-127, 128, (rows, columns), dtype=torch.int8), "weight_scale": scales[:, :1].contiguous()}
    turned = {"scales": scales.T.contiguous()}
    if kind == "awq":
        return turned | {"qweight": words(columns, rows // 8), "qzeros": words(columns // GROUP, rows // 8)}
    zeros = torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32)
    return turned | {"qweight": words(columns // 8, rows), "qzeros": zeros, "g_idx": (torch.arange(columns) // GROUP).int()}


def save(kind: str, directory: Path) -> int:
    """Writes a model directory; returns its weights' bytes."""
    tensors = {name: torch.randn(VOCAB, WIDTH).bfloat16() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    norms = ["model.norm"]
    for number in range(LAYERS):
        prefix = f"model.layers.{number}"
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
        for name, shape in SHAPES.items():
            tensors |= {f"{prefix}.{name}.{part}": tensor for part, tensor in layer(kind, *shape).items()}
    save_file(tensors | {f"{name}.weight": torch.ones(WIDTH).bfloat16() for name in norms}, directory / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    config |= {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[kind]}))
    return (directory / "model.safetensors").stat().st_size


def timed(work: Callable[[], object], repeats: int) -> str:
    """Returns the shortest times of some."""
    seconds, of_cpu = [], []
    for _ in range(repeats):
        began, cpu = time.perf_counter(), time.process_time()
        work()
        seconds.append(time.perf_counter() - began)
        of_cpu.append(time.process_time() - cpu)
    return f"{min(seconds):6.2f} s, cpu {min(of_cpu):5.2f}"


def load(directory: Path) -> None:
    load_weights(build_model(parse_config(directory), torch.bfloat16, Ops()), directory)


def main() -> None:
    flags = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--formats", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    flags.add_argument("--threads", type=int, default=1)
    flags.add_argument("--repeats", type=int, default=3)
    args = flags.parse_args()
    torch.set_num_threads(args.threads)
    for kind in args.formats:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            num_bytes = save(kind, directory)
            stored = stored_tensors(directory)
            work = [(tensor, Place.whole(torch.empty(tensor.shape, dtype=tensor.dtype))) for tensor in stored]
            alone = timed(partial(read_weights, work), args.repeats)
            loaded = timed(partial(load, directory), args.repeats)
        print(f"{kind:<8} {num_bytes / 1e6:6.0f} MB   read {alone}   loaded {loaded}", flush=True)


if __name__ == "__main__":
    main()
