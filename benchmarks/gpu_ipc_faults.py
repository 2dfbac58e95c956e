"""What survives what, on two GPUs of one host: kill -9 and SIGSTOP of either side of a cuda_ipc read; and who can open whose memory.

PYTHONPATH=. python benchmarks/gpu_ipc_faults.py
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch
from gpu_transfer import BLOCK_BYTES, NUM_BLOCKS, POOL_BLOCKS, Reader, Source, fill

from kv_transfer.cuda_ipc.peers import close_handle, open_handle
from twostep.model.kernels.triton_pull import PullShape, pull_blocks

SHAPE = PullShape()


def context_works(device: str) -> bool:
    x = torch.ones(512, 512, device=device)
    return float((x @ x).sum()) == 512.0**3


def read_through(reader: Reader, event: Callable[[], None], *, seconds: float) -> tuple[int, int]:
    """Pulls without a pause while `event` happens in their midst. How many were done before, and after."""
    done, fired = [0, 0], threading.Event()

    def fire() -> None:
        time.sleep(0.3)
        event()
        fired.set()

    thread = threading.Thread(target=fire)
    thread.start()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        after = fired.is_set()
        for _ in range(20):  # always some on the way
            reader.pull(SHAPE)
        torch.cuda.synchronize()
        done[after] += 20
    thread.join()
    return done[0], done[1]


def free_gib(device: int) -> float:
    return torch.cuda.mem_get_info(device)[0] / 2**30


def source_killed() -> None:
    want = fill("cuda:1")
    torch.cuda.empty_cache()
    before = free_gib(0)
    source = Source()
    reader = Reader(source)
    served = free_gib(0)
    done = read_through(reader, source.process.kill, seconds=1.5)
    code = source.process.wait()
    reader.pool.zero_()
    reader.pull(SHAPE)
    torch.cuda.synchronize()
    right = torch.equal(reader.pool[reader.ids[1].long()], want[reader.ids[0].long()])
    mapped = free_gib(0)
    took = reader.close()
    print(
        f"source killed -9 ({code}) in mid-read: pulls {done[0]} before, {done[1]} after; still right: {right}; reader's context works: "
        f"{context_works('cuda:1')}; GPU 0 free: {before:.2f} GiB at first, {served:.2f} served, {mapped:.2f} while mapped, "
        f"{free_gib(0):.2f} after closing ({took:.1f} ms)",
        flush=True,
    )


def source_stopped() -> None:
    source = Source()
    reader = Reader(source)
    done = read_through(reader, lambda: source.process.send_signal(signal.SIGSTOP), seconds=2.0)
    source.process.send_signal(signal.SIGCONT)
    answer = source.tell("check")
    reader.close()
    print(
        f"source SIGSTOPped in mid-read: pulls {done[0]} before, {done[1]} while stopped; continued, it says {answer}; reader's context "
        f"works: {context_works('cuda:1')}",
        flush=True,
    )
    source.close()


def reader_gone(number: int) -> None:
    source = Source()
    child = subprocess.Popen(
        [sys.executable, __file__, "--read", base64.b64encode(source.handle).decode(), str(source.offset), "cuda:1", "--forever"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    said = child.stdout.readline().strip()
    time.sleep(0.3)
    child.send_signal(number)
    time.sleep(0.5)
    answer = source.tell("check")
    print(f"reader ({said}) gets {signal.Signals(number).name} in mid-read: the source says {answer}", flush=True)
    child.kill()
    child.wait()
    answer = source.tell("check")
    source.close()
    print(f"    and after the reader's end: {answer}; source ended with {source.process.returncode}", flush=True)


def read(handle: str, offset: int, device: str, *, forever: bool) -> None:
    """A reader in a process of its own: says whether the memory opens and what it holds."""
    torch.cuda.set_device(torch.device(device))
    base = open_handle(base64.b64decode(handle), torch.device(device))
    pool = torch.zeros(POOL_BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device=device)
    ids = torch.arange(NUM_BLOCKS, dtype=torch.int32, device=device).repeat(2, 1).contiguous()

    def pull() -> None:
        pull_blocks(base + offset, pool.data_ptr(), ids, None, block_bytes=BLOCK_BYTES, first_byte=0, num_bytes=BLOCK_BYTES, shape=SHAPE)

    pull()
    torch.cuda.synchronize()
    print("opened, right" if torch.equal(pool[:NUM_BLOCKS], fill(device)[:NUM_BLOCKS]) else "opened, wrong", flush=True)
    while forever:
        for _ in range(20):
            pull()
        torch.cuda.synchronize()
    close_handle(base, torch.device(device))


def visibility() -> None:
    """Processes that see one GPU each, and containers' namespaces."""
    base = dict(os.environ)
    unshare = shutil.which("unshare") or ""
    one_each = ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"})
    for what, prefix, of_source, of_reader, device in (
        ("an IPC namespace of the source's own", (unshare, "--ipc"), {}, {}, "cuda:1"),
        ("network and UTS namespaces of the source's own", (unshare, "--net", "--uts"), {}, {}, "cuda:1"),
        ("PID and IPC namespaces, and one GPU each", (unshare, "--pid", "--fork", "--mount-proc", "--ipc"), *one_each, "cuda:0"),
        ("expandable_segments in the source", (), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {}, "cuda:1"),
        ("cudaMallocAsync in the source", (), {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, {}, "cuda:1"),
        ("expandable_segments in the reader", (), {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "cuda:1"),
        ("a PID namespace of the source's own", (unshare, "--pid", "--fork", "--mount-proc"), {}, {}, "cuda:1"),
        ("each sees its own GPU", (), *one_each, "cuda:0"),
        ("the source sees its own, the reader both", (), {"CUDA_VISIBLE_DEVICES": "0"}, {}, "cuda:1"),
        ("same GPU", (), {}, {}, "cuda:0"),
        ("both see both GPUs", (), {}, {}, "cuda:1"),
    ):
        try:
            source = Source("cuda:0", prefix, base | of_source)
        except RuntimeError as error:
            print(f"{what}: {error}", flush=True)
            continue
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--read", base64.b64encode(source.handle).decode(), str(source.offset), device],
                capture_output=True, text=True, env=base | of_reader, timeout=40,
            )  # fmt: skip
            said = done.stdout.strip() or (done.stderr.strip().splitlines() or ["?"])[-1]
            print(f"{what}: {said}", flush=True)
        finally:
            source.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read", nargs=3, metavar=("HANDLE", "OFFSET", "DEVICE"))
    parser.add_argument("--forever", action="store_true")
    parser.add_argument("--only", choices=("faults", "visibility"), default="")
    args = parser.parse_args()
    if args.read:
        read(args.read[0], int(args.read[1]), args.read[2], forever=args.forever)
        return
    torch.cuda.set_device(1)
    if args.only != "visibility":
        source_killed()
        source_stopped()
        reader_gone(signal.SIGKILL)
        reader_gone(signal.SIGSTOP)
    if args.only != "faults":
        visibility()


if __name__ == "__main__":
    main()
