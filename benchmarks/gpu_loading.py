"""How fast weights come from local disk to one GPU, against the disk's own rate and the plain ways of safetensors.

    PYTHONPATH=. python benchmarks/gpu_loading.py --directory /tmp

Writes shards of Llama-3.1-8B's shapes (as many layers as fit --gigabytes, about half of it at 8), reads them with a cold and with a
warm page cache, and deletes them. "ours" is `read_weights`, as the engine loads; "mapped" copies each tensor of the mapped file to the
device, "direct" is safetensors' safe_open(device="cuda") and a copy on the device. Rates are of the file's bytes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open

from twostep.model.families.modules import Place
from twostep.model.loading import weight_files
from twostep.model.loading.weight_files import StoredTensor, read_weights, stored_tensors

LAYER = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (1024, 4096),
    "self_attn.v_proj": (1024, 4096),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (14336, 4096),
    "mlp.up_proj": (14336, 4096),
    "mlp.down_proj": (4096, 14336),
}
EMBEDDING = (128256, 4096)
LAYER_BYTES = 2 * sum(rows * cols for rows, cols in LAYER.values())
SHARD_BYTES = 4.9e9
VARIANTS = ((8, 8), (16, 8), (32, 2), (32, 4), (32, 8), (64, 2))


def write_model(directory: Path, gigabytes: float) -> None:
    """bfloat16 shards and their index; random bytes, the same block of them again and again."""
    num_layers = max(1, int((gigabytes * 1e9 - 4 * EMBEDDING[0] * EMBEDDING[1]) / LAYER_BYTES))
    shapes = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": EMBEDDING}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in LAYER.items()}
    shards: list[dict[str, tuple[int, int]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        if filled > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += 2 * shape[0] * shape[1]
    noise = os.urandom(1 << 26)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        path = directory / f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, path.name)
        header, end = {}, 0
        for name, (rows, cols) in shard.items():
            header[name] = {"dtype": "BF16", "shape": [rows, cols], "data_offsets": [end, end + 2 * rows * cols]}
            end += 2 * rows * cols
        raw = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            for start in range(0, end, len(noise)):
                file.write(memoryview(noise)[: min(len(noise), end - start)])
            file.flush()
            os.fsync(file.fileno())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def forget(files: list[Path]) -> None:
    """Out of the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_seconds(files: list[Path], at_once: int) -> float:
    """Reading past the page cache, or through it where the file system cannot."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    pieces = [(path, start) for path in files for start in range(0, path.stat().st_size, 1 << 24)]

    def read(piece: tuple[Path, int]) -> None:
        path, start = piece
        buffer = torch.empty((1 << 24) + 4096, dtype=torch.uint8)
        aligned = -buffer.data_ptr() % 4096
        view = buffer.numpy().data[aligned : aligned + (1 << 24)]
        try:
            file = os.open(path, flags)
        except OSError:
            file = os.open(path, os.O_RDONLY)
        try:
            os.preadv(file, [view], start)
        finally:
            os.close(file)

    begun = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(read, pieces))
    return time.perf_counter() - begun


def copy_seconds() -> float:
    """One GB of pinned memory to the device."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        device.copy_(host)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times) / (1 << 30) * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="no new measurement begins after this long")
    args = parser.parse_args()
    ends = time.perf_counter() + args.seconds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, pinned copy {1 / copy_seconds():.1f} GB/s", flush=True)
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        begun = time.perf_counter()
        write_model(directory, args.gigabytes)
        files = sorted(directory.glob("*.safetensors"))
        total = sum(path.stat().st_size for path in files)
        print(f"{total / 1e9:.2f} GB in {len(files)} shards, written at {total / 1e9 / (time.perf_counter() - begun):.2f} GB/s", flush=True)
        tensors = stored_tensors(directory)
        places = [Place.whole(torch.empty(tensor.shape, dtype=torch.bfloat16, device="cuda")) for tensor in tensors]
        measure(files, tensors, places, total, ends)


def measure(files: list[Path], tensors: list[StoredTensor], places: list[Place], total: int, ends: float) -> None:
    by_name = {tensor.name: place.tensor for tensor, place in zip(tensors, places, strict=True)}
    work = list(zip(tensors, places, strict=True))

    def ours(num_readers: int, slot_mib: int) -> None:
        weight_files._SLOT_BYTES = slot_mib << 20
        read_weights(work, num_readers=num_readers)

    def library(device: str) -> None:
        for path in files:
            with safe_open(path, framework="pt", device=device) as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    by_name[name].copy_(file.get_tensor(name))

    def show(label: str, cold: bool, run: Callable[[], object]) -> None:
        if time.perf_counter() > ends:
            print(f"{label}: no time left", flush=True)
            return
        if cold:
            forget(files)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken = time.perf_counter() - begun
        print(f"{'cold' if cold else 'warm'}  {label:28} {taken:6.2f} s  {total / 1e9 / taken:6.2f} GB/s", flush=True)

    show("disk past the cache, 16 at once", True, lambda: disk_seconds(files, 16))
    for num_readers, slot_mib in VARIANTS:
        show(f"ours, {num_readers} readers, {slot_mib} MiB", True, functools.partial(ours, num_readers, slot_mib))
    # As integers: random bytes are NaN here and there.
    loaded = {name: tensor.view(torch.int16).clone() for name, tensor in by_name.items()}
    for tensor in by_name.values():
        tensor.zero_()
    show("mapped", False, lambda: library("cpu"))
    assert all(torch.equal(by_name[name].view(torch.int16), tensor) for name, tensor in loaded.items())
    print("what ours loaded is bit for bit what safetensors loads", flush=True)
    loaded.clear()
    show("direct", False, lambda: library("cuda"))
    for num_readers, slot_mib in ((1, 8), *VARIANTS):
        show(f"ours, {num_readers} readers, {slot_mib} MiB", False, functools.partial(ours, num_readers, slot_mib))
    show("mapped", True, lambda: library("cpu"))
    show("direct", True, lambda: library("cuda"))
    show("disk past the cache, 32 at once", True, lambda: disk_seconds(files, 32))


if __name__ == "__main__":
    main()
