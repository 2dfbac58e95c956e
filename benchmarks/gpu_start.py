"""From the start of a worker's process until it could serve, on one GPU, and where the time goes.

    PYTHONPATH=. python benchmarks/gpu_start.py --directory /tmp

Writes shards of Llama-3.1-8B's shapes with random values (as many layers as can be written in --write-seconds), then starts processes
that load them, size the pool, capture graphs and answer one request: with nothing in any cache, then with compiled kernels and files
cached. What is not in it: Redis, Ray and registration.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from twostep.lab.bench.shapes import LLAMA_8B

CONFIG = LLAMA_8B | {"eos_token_id": 0}
LAYER = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
    "input_layernorm": (4096,),
    "post_attention_layernorm": (4096,),
}
ENDS = {"model.embed_tokens.weight": (128256, 4096), "lm_head.weight": (128256, 4096), "model.norm.weight": (4096,)}
LAYERS_PER_FILE = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk to load from")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--write-seconds", type=float, default=30.0)
    parser.add_argument("--starts", nargs="+", default=["cold", "warm", "small"], help="small: too little memory")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.serve:
        serve(args.serve, flags)
        return
    directory = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        begun = time.perf_counter()
        num_bytes, num_layers = write_model(directory, args.layers, begun + args.write_seconds)
        took = time.perf_counter() - begun
        print(f"{num_bytes / 1e9:.1f} GB, {num_layers} layers, written in {took:.1f} s ({num_bytes / 1e9 / took:.2f} GB/s)", flush=True)
        caches = {name: str(directory / name) for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")}
        for kind in args.starts:
            more = ["--gpu-memory-utilization", "0.12"] if kind == "small" else []
            if kind == "cold":
                forget(directory)
            begun = time.perf_counter()
            command = [sys.executable, __file__, "--serve", str(directory), "--max-num-seqs", "256", "--max-num-batched-tokens", "8192"]
            subprocess.run([*command, *more], check=False, env=dict(os.environ) | caches)
            print(f"{kind}: {time.perf_counter() - begun:.1f} s for the whole process", flush=True)
    finally:
        shutil.rmtree(directory)


def write_model(directory: Path, num_layers: int, deadline: float) -> tuple[int, int]:
    """Bytes and layers there are in the end."""
    import torch  # noqa: PLC0415  a starting process shall import it by itself

    noise = (torch.randn(1 << 25) * 0.02).bfloat16().view(torch.uint8).numpy().data
    ones = torch.ones(1 << 16, dtype=torch.bfloat16).view(torch.uint8).numpy().data

    def write(first: int | None) -> tuple[int, dict[str, str]]:
        if time.perf_counter() > deadline:
            return 0, {}
        shapes = ENDS
        if first is not None:
            layers = range(first, min(first + LAYERS_PER_FILE, num_layers))
            shapes = {f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in LAYER.items()}
        path = directory / f"model-{'ends' if first is None else first:0>5}.safetensors"
        header: dict[str, dict[str, object]] = {}
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in shapes.items():
            size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            places[name] = (end, end + size)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": places[name]}
            end += size
        raw = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            for name, (start, stop) in places.items():
                source = ones if name.endswith("norm.weight") else noise
                for at in range(start, stop, len(source)):
                    file.write(source[: min(len(source), stop - at)])
            file.flush()
            os.fsync(file.fileno())
        return end, dict.fromkeys(shapes, path.name)

    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(write, [None, *range(0, num_layers, LAYERS_PER_FILE)]))
    weight_map: dict[str, str] = {}
    for number, (_, names) in enumerate(written):
        if not names:
            written = written[:number]
            break
        weight_map |= names
    num_layers = min(num_layers, LAYERS_PER_FILE * (len(written) - 1))
    for path in directory.glob("*.safetensors"):
        if path.name not in weight_map.values():
            path.unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))
    (directory / "tokenizer.json").write_text("{}")
    return sum(size for size, _ in written), num_layers


def forget(directory: Path) -> None:
    """The files, out of the page cache."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def serve(directory: str, flags: list[str]) -> None:
    """What a worker does until it is ready, and one request."""
    from twostep.errors import SetupError  # noqa: PLC0415
    from twostep.process.log import setup_logging  # noqa: PLC0415
    from twostep.process.startup import StartUp, process_start  # noqa: PLC0415

    start = StartUp(since=process_start())
    from twostep.engine.engine import Engine, EngineConfig  # noqa: PLC0415
    from twostep.engine.generate import generate  # noqa: PLC0415
    from twostep.engine.types import EngineRequest  # noqa: PLC0415
    from twostep.sampling_params import SamplingParams  # noqa: PLC0415
    from twostep.worker.config import parse_config  # noqa: PLC0415
    from twostep.worker.model import load_model  # noqa: PLC0415

    config = parse_config("decode", ["--model", directory, *flags])
    setup_logging()
    try:
        model = load_model(config, start)
    except SetupError as error:
        print(f"cannot start: {error.message}", flush=True)
        return
    engine = Engine(
        model.runner, EngineConfig(max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs, hash_unit=64)
    )
    print(start.finish(), flush=True)
    import torch  # noqa: PLC0415

    begun = time.perf_counter()
    request = EngineRequest(
        seq_id="a", token_ids=list(range(1, 101)), num_prompt_tokens=100, sampling=SamplingParams(max_tokens=20, ignore_eos=True)
    )
    tokens = generate(engine, [request])[0]
    free, total = torch.cuda.mem_get_info()
    print(
        f"first request: {len(tokens)} tokens in {time.perf_counter() - begun:.2f} s; "
        f"{(total - free) / 2**30:.2f} of {total / 2**30:.2f} GiB in use ({(total - free) / total:.3f}), torch reserves "
        f"{torch.cuda.memory_reserved() / 2**30:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
