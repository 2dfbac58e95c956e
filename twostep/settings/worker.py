"""Settings of workers, of either role: a worker may change its own (docs/roles.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from twostep.quantized_vector import QUANTIZED, SLOTS_TOGETHER
from twostep.settings.readers import (
    KV_CACHE_DTYPES,
    KV_TRANSPORTS,
    KV_WIRES,
    PORT,
    SECONDS,
    SECONDS_OR_NONE,
    SHARE,
    Number,
    OneOf,
    Whole,
    device,
    host_and_port,
    kv_cache_dtype,
    kv_transports,
    model_names,
    speculative_config,
)
from twostep.settings.service import DTYPES, HASH_UNIT, TracedServiceSettings
from twostep.settings.table import FileKind, Rule, setting

ROLES = ("decode", "prefill")
DEFAULT_PORTS = {"prefill": 50061, "decode": 50071}
QUANTIZATIONS = ("none", "fp8", "int8", "int4")
LOAD_FORMATS = ("auto", "dummy")
# What a step takes where nobody says. A GPU's prefill is compute-bound from about 2000 tokens on; larger steps read the weights
# less often, and a prompt's first token waits for what of the next prompt fits into its last step. A decode worker's prompts share their
# steps with others' tokens.
CPU_STEP_TOKENS, CPU_NUM_SEQS = 512, 64
GPU_STEP_TOKENS, GPU_NUM_SEQS = {"prefill": 4096, "decode": 2048}, 256
# More cannot be kept account of between two steps: of blocks of 16 tokens, several times what a GPU of today holds of the smallest models.
MAX_BLOCKS = 1 << 22
LOSSY_WIRES = ("int8", "fp8")
# Shorter than a worker's heartbeat, it would end hand-overs that nothing is wrong with.
_LEASE_S = Number(1, 86_400, unit="seconds")
# Others' tokens are held up no longer than this by a chunk of a prompt, of which it has some 700 tokens of an 8-billion model.
GPU_MAX_STEP_MS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(TracedServiceSettings):
    """Holds what a worker may be told; times in seconds. 0, None and an empty text leave it to the worker."""

    # ---- the model and its steps ----
    model: str = setting("", "model directory, ORG/NAME of the Hugging Face hub, or a known name", metavar="DIR|NAME")
    served_model_name: tuple[str, ...] = setting(
        (),
        "names clients may ask for; answers carry the first; that of --model if not given",
        model_names,
        metavar="NAME ...",
        several=True,
    )
    runner: str = setting("model", "fake: hand-computable tokens and settable timing, no weights", choices=("model", "fake"))
    dtype: str = setting(
        "auto",
        "auto: that of the weights; on a CPU float32 if the weights are not quantized and take at most 2 GiB in it, or if the CPU does not "
        "compute bfloat16",
        choices=DTYPES,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "exact: as --dtype; fp8, int8: a byte a number, lossy; int4: half a byte, more so; auto: what the checkpoint's kv_cache_scheme "
        "asks for, else exact",
        kv_cache_dtype,
        choices=KV_CACHE_DTYPES,
    )
    quantization: str = setting(
        "none",
        "of an unquantized checkpoint, as it is read. fp8: weights for each channel, activations for each token; int8: weights for each "
        "channel; int4: weights in groups of 128, lossy",
        choices=QUANTIZATIONS,
    )
    device: str = setting("auto", "where the model runs: cpu, cuda, cuda:N, or auto: a GPU if there is one (auto:N: the N-th)", device)
    tensor_parallel_size: int = setting(
        1, "devices that one model is cut over: --device and those after it, a process each", Whole(1, 64), aliases=("-tp",)
    )
    enable_expert_parallel: bool = setting(
        False, "of a mixture of experts cut over devices, each holds whole experts instead of a part of each", aliases=("-ep",)
    )
    load_format: str = setting("auto", "dummy: random weights, only config.json is read", choices=LOAD_FORMATS)
    block_size: int = setting(
        16,
        f"tokens of a KV block; divides {HASH_UNIT}, the tokens of one prefix hash. GPUs are slow with less than 16",
        OneOf(tuple(size for size in range(1, HASH_UNIT + 1) if HASH_UNIT % size == 0)),
        metavar="N",
    )
    num_blocks: int = setting(0, "KV blocks; 0: what --kv-cache-memory-bytes holds", Whole(0, MAX_BLOCKS))
    kv_cache_memory_bytes: int = setting(
        0, "size of the KV cache; 0: 512 MiB on a CPU, what --gpu-memory-utilization leaves on a GPU", Whole(0, 1 << 50), metavar="BYTES"
    )
    gpu_memory_utilization: float = setting(
        0.9, "share of the whole card that this process may take: weights, steps, graphs, and the rest is KV cache", SHARE
    )
    prefix_cache_space: float = setting(
        0.0,
        "GiB of host memory for prefixes that the KV cache gives up, and for sequences that give way when it is full; 0: none, they are "
        "computed again. It pays where prompts come back later than the KV cache can keep them, and costs a copy of every prompt",
        Number(0, 1 << 20),
    )
    max_model_len: int = setting(0, "longest context in tokens; 0: the model's", Whole(0, 1 << 31))
    max_num_batched_tokens: int = setting(
        0,
        f"token budget of one engine step; if not given {CPU_STEP_TOKENS}, on a GPU {GPU_STEP_TOKENS['prefill']} of a prefill worker and "
        f"{GPU_STEP_TOKENS['decode']} of a decode worker, less where its measured curve says that larger steps only take longer",
        Whole(1, 1 << 20),
    )
    max_num_seqs: int = setting(
        0, f"sequences that run or are reserved at once; if not given {CPU_NUM_SEQS}, on a GPU {GPU_NUM_SEQS}", Whole(1, 1 << 20)
    )
    max_cudagraph_capture_size: int = setting(
        2048,
        "tokens of the largest step with prompts that a GPU replays as a CUDA graph; larger ones are launched kernel by kernel. "
        "0: only steps without prompts are replayed, which saves seconds at the start and half a GiB",
        Whole(0, 1 << 20),
    )
    max_waiting: int = setting(256, "prompts that may wait; more are refused", Whole(1, 1 << 20))
    speculative_config: str = setting(
        "",
        'drafts several tokens a step where that pays, and keeps those that are right: {"method": "ngram", "num_speculative_tokens": 4} '
        'looks up what followed the last tokens where they came before; {"method": "draft_model", "model": "PATH"} asks a smaller model of '
        'the same vocabulary; {"method": "eagle3", "model": "PATH"} an EAGLE-3 head of the model, as medusa and mtp ask other heads. '
        "Answers are those without",
        speculative_config,
        metavar="JSON",
    )
    max_step_ms: float | None = setting(
        None,
        "longest a step may take that computes prompts beside tokens of requests without a tpot_ms or gap_ms of their own; 0: any time. "
        f"If not given: 0, on a GPU {GPU_MAX_STEP_MS:g}",
        Number(0, 3_600_000, unit="milliseconds"),
    )
    calibrate: bool = setting(
        True, "measure at the start, for a second or two, how long steps take; without it routers reckon with guesses"
    )
    engine_process: str = setting(
        "auto",
        "on: the engine in a process of its own, so that steps and streams do not hold up each other; off: on a thread of the worker's; "
        "auto: on where the model runs on a GPU",
        choices=("auto", "on", "off"),
    )
    cpu_threads: int = setting(0, "threads of the CPU engine; 0: torch decides", Whole(0, 1024))
    fake_step_ms: float = setting(0.0, "least duration of a step of --runner fake", Number(0, 3_600_000, unit="milliseconds"))

    # ---- who and where it is ----
    host: str = setting("127.0.0.1", "address to listen on")
    grpc_port: int = setting(0, "gRPC port, 0 for any free one; if not given 50061 (prefill), 50071 (decode)", PORT)
    advertise_address: str = setting("", "how others reach this worker; --host and --grpc-port if not given", metavar="HOST[:PORT]")
    worker_id: str = setting("", "unique name, kept over restarts; role, host name and port if not given")
    pod_name: str = setting("", "Kubernetes pod of this process, which an autoscaler marks when it should go first")
    pod_namespace: str = setting("", "namespace of --pod-name")
    pod_owner: str = setting(
        "",
        "role of the Deployment that the pod is counted for, whatever role the worker takes later; the command's own if not given; none: "
        "of no Deployment that is scaled",
        choices=("", *ROLES, "none"),
    )
    drain_timeout: float = setting(30.0, "time for running requests to end after SIGTERM", SECONDS_OR_NONE)

    # ---- how KV travels ----
    kv_transfer: str = setting(
        "auto",
        f"how KV may travel, best first: {', '.join(KV_TRANSPORTS)} (local within one process only); auto: all that work here; none: not "
        "at all, for decode workers that compute every prompt themselves. cuda_ipc and nixl let peers read the whole KV cache",
        kv_transports,
        metavar="auto|none|NAME[,NAME...]",
    )
    kv_wire: str = setting(
        "raw",
        "form in which KV is published, and taken besides raw and zstd, where ray moves it. zstd: fewer bytes for time; int8, fp8: lossy, "
        "and not kept as prefixes",
        choices=KV_WIRES,
    )
    ray_address: str = setting("127.0.0.1:6379", "host:port of Ray's GCS", host_and_port, metavar="HOST:PORT")
    run_dir: Path | None = setting(
        None, "private, short directory for the KV agent's socket; a temporary one if not given", metavar="DIR", file=FileKind.FOLDER
    )
    transport_timeout: float = setting(60.0, "how long to wait for the KV transport at start", SECONDS)
    kv_budget_bytes: int = setting(0, "prefill: most KV published at once; 0: 70% of the object store", Whole(0, 1 << 50), metavar="BYTES")
    kv_ring_bytes: int = setting(
        0,
        "memory shared with the KV agent of the ray transport; 0: 64 MiB, on a GPU up to 256",
        Whole(1 << 20, 1 << 40, or_zero=True),
        metavar="BYTES",
    )
    chunk_bytes: int = setting(
        0,
        "prefill: size of a published chunk, about; 0: 8 MiB of what is copied out, 256 MiB of what is read in place",
        Whole(0, 1 << 30),
        metavar="BYTES",
    )
    lease_ttl: float = setting(
        30.0, "so long after its last progress a hand-over ends (prefill), and a reservation without a ticket (decode)", _LEASE_S
    )
    local_prefill: bool = setting(
        True,
        "decode: compute prompts here too, in chunks between the others' tokens, where routers find that better than a hand-over",
    )

    fixed_roles: bool = setting(
        False,
        "do the work of the role alone; otherwise any worker may compute a prompt between others' tokens, and keep the sequence, where "
        "routers find that better",
    )

    @property
    def both_roles(self) -> bool:
        """Returns whether it takes work of either role, whichever it is for."""
        return self.local_prefill and not self.fixed_roles

    @property
    def dummy_weights(self) -> bool:
        """Returns whether no weights are read."""
        return self.load_format == "dummy" and self.runner == "model"

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda worker: worker.num_blocks and worker.max_model_len > worker.num_blocks * worker.block_size,
            "{max-model-len} is more than the KV cache holds, {num-blocks} of {block-size} tokens: no request could be so long; raise "
            "--num-blocks, or lower --max-model-len",
        ),
        Rule(
            lambda worker: worker.kv_cache_dtype in QUANTIZED and worker.block_size % SLOTS_TOGETHER,
            f"{{kv-cache-dtype}} stores {SLOTS_TOGETHER} tokens together, of which {{block-size}} is no multiple; give --block-size 16",
        ),
        Rule(
            lambda worker: worker.kv_wire in LOSSY_WIRES and worker.block_size % SLOTS_TOGETHER,
            f"{{kv-wire}} sends {SLOTS_TOGETHER} tokens together, of which {{block-size}} is no multiple; give --block-size 16",
        ),
        Rule(
            lambda worker: worker.kv_wire in LOSSY_WIRES and worker.kv_cache_dtype in QUANTIZED,
            "{kv-cache-dtype} is a byte a number at most already, and cannot travel as {kv-wire}; give --kv-wire raw or zstd",
        ),
        Rule(
            lambda worker: worker.kv_wire != "raw" and worker.kv_transfer != "auto" and "ray" not in worker.kv_transfer,
            "{kv-wire} is how ray moves KV, and {kv-transfer} does without; leave one of them out",
        ),
        Rule(
            lambda worker: worker.tensor_parallel_size > 1 and worker.runner == "fake",
            "{tensor-parallel-size} cuts a model over devices, and {runner} has none; leave one of them out",
        ),
    )
