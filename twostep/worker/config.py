"""A worker's configuration: parsed once in `__main__`, frozen."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twostep.engine.preemption import PreemptionMode
from twostep.model.loading.store import default_cache_dir
from twostep.rpc.channel import PLAINTEXT, TlsFiles
from twostep.settings.flag_values import not_negative, positive, share, whole
from twostep.settings.flags import KV_TRANSPORTS, KV_WIRES, FlagParser, kv_transports, tracing_flag

# Others' tokens are held up no longer than this by a chunk of a prompt, of which it has some 700 tokens of an 8-billion model.
GPU_MAX_STEP_MS = 20.0
DEFAULT_PORTS = {"prefill": 50061, "decode": 50071}
# What a step takes where nobody says. A GPU's prefill is compute-bound from about 2000 tokens on, and larger steps read the weights less
# often; a decode worker's prompts are rare (those of sequences that gave way) and share their steps with others' tokens.
CPU_STEP_TOKENS, CPU_NUM_SEQS = 512, 64
GPU_STEP_TOKENS, GPU_NUM_SEQS = {"prefill": 8192, "decode": 2048}, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Everything a worker can be told; times in seconds. Empty `worker_id`: role, host name and port. Empty `advertise_address`: host
    and port as others reach them. `num_blocks` 0: as many as fit `kv_cache_memory_bytes`; that 0 too: on a GPU what
    `gpu_memory_utilization` leaves, on a CPU 512 MiB. `max_num_batched_tokens` and `max_num_seqs` 0: what
    suits the device (settle in worker/model.py). `chunk_bytes` 0: what suits the transport.
    `max_step_ms` None: what suits the device.
    `other_step_tokens`: the step's budget once the worker has changed its role; 0: the same. `step_tokens_at_knee`: both were left to the
    machine, and steps that compute prompts beside others' tokens are no larger than pays (at_knee in worker/model.py)."""

    role: str
    model: str = ""
    served_model_name: str = ""
    runner: str = "model"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1
    load_format: str = "auto"
    block_size: int = 16
    num_blocks: int = 0
    kv_cache_memory_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    swap_space: float = 4.0
    prefix_cache_space: float = 0.0
    preemption_mode: str = "auto"
    max_model_len: int = 0
    max_num_batched_tokens: int = CPU_STEP_TOKENS
    other_step_tokens: int = 0
    step_tokens_at_knee: bool = False
    max_num_seqs: int = CPU_NUM_SEQS
    max_waiting: int = 256
    max_step_ms: float | None = None
    ageing: float = 30.0
    local_prefill: bool = True
    calibrate: bool = True
    hash_unit: int = 64
    cpu_threads: int = 0
    fake_step_ms: float = 0.0
    fake_vocab_size: int = 1000
    host: str = "127.0.0.1"
    port: int = 0
    health_port: int | None = None
    metrics_port: int | None = None
    advertise_address: str = ""
    worker_id: str = ""
    pod_name: str = ""
    pod_namespace: str = ""
    pod_owner: str = ""
    redis_url: str = "redis://127.0.0.1:6379/0"
    secret_file: Path | None = None
    kv_transfer: str = "auto"
    kv_wire: str = "raw"
    ray_address: str = "127.0.0.1:6379"
    run_dir: Path | None = None
    # Where known models are; None: ~/.cache/twostep.
    cache_dir: Path | None = None
    kv_budget_bytes: int = 0
    kv_ring_bytes: int = 0
    chunk_bytes: int = 0
    transport_timeout: float = 60.0
    lease_ttl: float = 30.0
    router_lease: float = 5.0
    stall_timeout: float = 120.0
    drain_timeout: float = 30.0
    max_concurrent_rpcs: int = 2048
    tls: TlsFiles = PLAINTEXT
    otlp_endpoint: str = ""
    log_level: str = "info"
    log_json: bool = False


def parse_config(role: str, argv: Sequence[str] | None = None) -> WorkerConfig:
    """Exits with a usage message if a flag does not make sense."""
    default = WorkerConfig(role=role)
    parser = FlagParser(prog=f"python -P -m {role}_worker", description=f"Twostep {role} worker.")
    _model_flags(parser, default)
    _network_flags(parser, default, role)
    _transfer_flags(parser, default)
    tracing_flag(parser)
    parser.flag(
        "--log-level", default=default.log_level, choices=["debug", "info", "warning", "error"], help="least severe level that is logged"
    )
    parser.flag("--log-json", action="store_true", default=False, help="one JSON object a line")
    args = vars(parser.parse_args(argv))
    if args["runner"] == "model" and not args["model"]:
        parser.error("--model is missing: give a model directory or a known model's name, or --runner fake")
    if args["kv_transfer"] == "none" and (role == "prefill" or not args["local_prefill"]):
        parser.error("--kv-transfer none is for decode workers with --local-prefill: nothing else can be done without handing KV over")
    tls = TlsFiles(cert=args.pop("tls_cert"), key=args.pop("tls_key"), ca=args.pop("tls_ca"), peer_name=args.pop("tls_peer_name"))
    args["served_model_name"] = args["served_model_name"] or Path(args["model"]).name or "fake"
    return WorkerConfig(role=role, tls=tls, cache_dir=default_cache_dir(os.environ), **args)


def _model_flags(parser: FlagParser, default: WorkerConfig) -> None:
    number = whole
    parser.flag("--model", default="", metavar="DIR", help="model directory, or the name of a known model")
    parser.flag("--served-model-name", default="", help="name clients ask for; the directory's name if not given")
    parser.flag("--runner", default="model", choices=["model", "fake"], help="fake: hand-computable tokens and settable timing, no weights")
    parser.flag(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="auto: that of the weights, on a CPU without bfloat16 float32",
    )
    parser.flag(
        "--kv-cache-dtype", default="auto", choices=["auto", "fp8", "int8"], help="auto: as --dtype; fp8, int8: a byte a number, lossy"
    )
    parser.flag(
        "--device",
        default=default.device,
        help="where the model runs: cpu, cuda, cuda:N, or auto: a GPU if there is one (auto:N: the N-th)",
    )
    parser.flag(
        "--tensor-parallel-size",
        "-tp",
        type=number(1, 64),
        default=default.tensor_parallel_size,
        help="devices that one model is cut over: --device and those after it, a process each",
    )
    parser.flag(
        "--load-format", default=default.load_format, choices=["auto", "dummy"], help="dummy: random weights, only config.json is read"
    )
    parser.flag("--block-size", type=number(1, 4096), default=default.block_size, help="tokens of a KV block; divides --hash-unit")
    parser.flag("--num-blocks", type=number(0, 1 << 31), default=0, help="KV blocks; 0: what --kv-cache-memory-bytes holds")
    parser.flag(
        "--kv-cache-memory-bytes",
        type=number(0, 1 << 50),
        default=default.kv_cache_memory_bytes,
        help="size of the KV cache; 0: 512 MiB on a CPU, what --gpu-memory-utilization leaves on a GPU",
    )
    parser.flag(
        "--gpu-memory-utilization",
        type=share,
        default=default.gpu_memory_utilization,
        help="share of the whole card that this process may take: weights, steps, graphs, and the rest is KV cache",
    )
    parser.flag(
        "--swap-space",
        type=not_negative,
        default=default.swap_space,
        help="GiB of host memory for the KV of sequences that give way when the KV cache is full; never more than the KV cache's size",
    )
    parser.flag(
        "--prefix-cache-space",
        type=not_negative,
        default=default.prefix_cache_space,
        help="GiB of host memory for prefixes that the KV cache gives up; 0: none. It pays where prompts come back later than the KV cache "
        "can keep them, and costs a copy of every prompt",
    )
    parser.flag(
        "--preemption-mode",
        default=default.preemption_mode,
        choices=[mode.value for mode in PreemptionMode],
        help="how they come back: computed again, copied from the host, or what takes less time",
    )
    parser.flag("--max-model-len", type=number(0, 1 << 31), default=0, help="longest context in tokens; 0: the model's")
    parser.flag(
        "--max-num-batched-tokens",
        type=number(0, 1 << 20),
        default=0,
        help=f"token budget of one engine step; 0: {CPU_STEP_TOKENS}, on a GPU {GPU_STEP_TOKENS[default.role]}; of a decode worker less, "
        "where its measured curve says that larger steps only take longer",
    )
    parser.flag(
        "--max-num-seqs",
        type=number(0, 1 << 20),
        default=0,
        help=f"sequences that run or are reserved at once; 0: {CPU_NUM_SEQS}, on a GPU {GPU_NUM_SEQS}",
    )
    parser.flag("--max-waiting", type=number(1, 1 << 20), default=default.max_waiting, help="prompts that may wait; more are refused")
    parser.flag(
        "--max-step-ms",
        type=not_negative,
        default=default.max_step_ms,
        help="longest a step may take that computes prompts beside others' tokens; 0: as those requests' promised TPOT says. "
        f"If not given: 0, on a GPU {GPU_MAX_STEP_MS:g}",
    )
    parser.flag("--ageing", type=positive, default=default.ageing, help="seconds of waiting that make a request one class more urgent")
    parser.flag(
        "--hash-unit", type=number(1, 65536), default=default.hash_unit, help="tokens of one prefix hash, the same on every process"
    )
    parser.flag(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        default=default.calibrate,
        help="measure at the start, for a second or two, how long steps take; without it routers reckon with guesses",
    )
    parser.flag("--cpu-threads", type=number(0, 1024), default=0, help="threads of the CPU engine; 0: torch decides")
    parser.flag("--fake-step-ms", type=not_negative, default=0.0, help="least duration of a step of --runner fake")
    parser.flag(
        "--fake-vocab-size", type=number(2, 1 << 31), default=default.fake_vocab_size, help="vocabulary of --runner fake without --model"
    )


def _network_flags(parser: FlagParser, default: WorkerConfig, role: str) -> None:
    parser.flag("--host", default=default.host, help="address to listen on")
    parser.flag("--port", type=whole(0, 65535), default=DEFAULT_PORTS[role], help="gRPC port, 0 for any free one")
    parser.flag(
        "--health-port", type=whole(-1, 65535), default=None, help="plaintext health-only port; --port + 1 if not given, -1 for none"
    )
    parser.flag(
        "--metrics-port", type=whole(-1, 65535), default=None, help="plaintext HTTP, GET /metrics; --port + 2 if not given, -1 for none"
    )
    parser.flag(
        "--advertise-address", default="", metavar="HOST[:PORT]", help="how others reach this worker; --host and --port if not given"
    )
    parser.flag("--worker-id", default="", help="unique name, kept over restarts; role, host name and port if not given")
    parser.flag("--pod-name", default="", help="of the Kubernetes pod of this process: whoever scales the deployment marks that")
    parser.flag("--pod-namespace", default="", help="namespace of --pod-name")
    parser.flag(
        "--pod-owner",
        default=role,
        choices=sorted(DEFAULT_PORTS),
        help="role of the Deployment that the pod is counted for, whatever role the worker takes later; the command's own if not given",
    )
    parser.flag("--redis-url", default=default.redis_url, help="where workers register")
    parser.flag("--secret-file", type=Path, default=None, help="deployment secret, the same file on every process")
    parser.flag("--tls-cert", type=Path, default=None, help="PEM certificate; with --tls-key it switches TLS on")
    parser.flag("--tls-key", type=Path, default=None, help="PEM key of --tls-cert")
    parser.flag("--tls-ca", type=Path, default=None, help="PEM authority that peers must be certified by")
    parser.flag(
        "--tls-peer-name",
        default="",
        help="name that workers' certificates must have, whatever address they are reached at; the address itself if not given",
    )
    parser.flag("--max-concurrent-rpcs", type=whole(1, 1 << 20), default=default.max_concurrent_rpcs, help="calls and streams open at once")
    parser.flag("--drain-timeout", type=not_negative, default=default.drain_timeout, help="time for running requests to end after SIGTERM")
    parser.flag("--stall-timeout", type=positive, default=default.stall_timeout, help="not alive once work has seen no step for so long")


def _transfer_flags(parser: FlagParser, default: WorkerConfig) -> None:
    parser.flag(
        "--kv-transfer",
        type=kv_transports,
        default="auto",
        metavar="auto|none|NAME[,NAME...]",
        help=f"how KV may travel, best first: {', '.join(KV_TRANSPORTS)} (local within one process only); auto: all that work here; none: "
        "not at all, for decode workers that compute every prompt themselves. cuda_ipc and nixl let peers read the whole KV cache",
    )
    parser.flag(
        "--kv-wire",
        default=default.kv_wire,
        choices=KV_WIRES,
        help="form in which KV is published, and taken besides raw and zstd, where ray moves it. zstd: fewer bytes for time; "
        "int8, fp8: lossy, and not kept as prefixes",
    )
    parser.flag("--ray-address", default=default.ray_address, help="host:port of Ray's GCS")
    parser.flag(
        "--run-dir", type=Path, default=None, help="private, short directory for the KV agent's socket; a temporary one if not given"
    )
    parser.flag(
        "--transport-timeout", type=positive, default=default.transport_timeout, help="how long to wait for the KV transport at start"
    )
    # Of either role, since a worker may change its own (docs/roles.md).
    parser.flag(
        "--kv-budget-bytes",
        type=whole(0, 1 << 50),
        default=0,
        help="prefill: most KV published at once; 0: 70%% of the object store",
    )
    parser.flag(
        "--kv-ring-bytes",
        type=whole(0, 1 << 40),
        default=0,
        help="memory shared with the KV agent of the ray transport; 0: 64 MiB, on a GPU up to 256",
    )
    parser.flag(
        "--chunk-bytes",
        type=whole(0, 1 << 30),
        default=default.chunk_bytes,
        help="prefill: size of a published chunk, about; 0: 8 MiB of what is copied out, 256 MiB of what is read in place",
    )
    parser.flag(
        "--lease-ttl",
        type=positive,
        default=default.lease_ttl,
        help="so long after its last progress a hand-over ends (prefill), and a reservation without a ticket (decode)",
    )
    parser.flag(
        "--local-prefill",
        action=argparse.BooleanOptionalAction,
        default=default.local_prefill,
        help="decode: compute prompts here too, in chunks between the others' tokens, where routers find that better than a hand-over",
    )
    parser.flag(
        "--router-lease",
        type=positive,
        default=default.router_lease,
        help="decode: sequences of a router without a stream for so long end",
    )
