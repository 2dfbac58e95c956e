"""The flags of `twostep plan`. Loads nothing heavy."""

from __future__ import annotations

from twostep.settings.readers import KV_CACHE_DTYPES
from twostep.settings.reading import FlagParser
from twostep.settings.service import ARCHITECTURE
from twostep.settings.table import readers_of
from twostep.settings.worker import QUANTIZATIONS, WorkerSettings

DESCRIPTION = (
    "Simulates deployments until it has found the one to have: how many prefill and decode workers, beside workers that do both, what "
    "memory they need, how many requests they answer within their targets and what that costs. Needs no GPU. docs/planning.md says how."
)
EXAMPLE = "twostep plan --preset h200-llama-3.1-8b --workload prompts=2600+-30%,outputs=128+-30% --slo ttft=500,tpot=10,gap=25 --gpus 4"


def add_flags(command: FlagParser) -> None:
    worker = readers_of(WorkerSettings)
    add = command.add_argument
    add(
        "--workload",
        required=True,
        metavar="SPEC",
        help="as prompts=2600+-30%%,outputs=128+-30%% (also 512, 1200..2600, 2600~30%%, sharegpt)",
    )
    add("--slo", required=True, metavar="SPEC", help="targets of 95%% of the requests in ms: some of ttft=500,tpot=10,gap=25,e2e=5000")
    load = command.add_mutually_exclusive_group(required=True)
    load.add_argument("--rate", type=float, metavar="R", help="requests a second: what is the least that answers them?")
    load.add_argument("--gpus", type=int, metavar="N", help="so many GPUs: how are they best used?")

    add("--preset", default="", metavar="NAME|FILE", help="a known machine and model (h200-llama-3.1-8b is one), or JSON of step curves")
    command.flag("--redis-url", default="", metavar="URL", help="curves and sizes of the workers that are registered there now")

    add(
        "--model",
        default="",
        metavar="DIR|SHAPE",
        help="model directory (config.json will do), ORG/NAME of the hub, llama-3.1-8b or llama-3.1-70b; the preset's if not given",
    )
    command.flag("--architecture", default="", metavar="NAME", help=ARCHITECTURE)
    command.flag("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of the weights; auto: the model's")
    command.flag("--quantization", default="none", choices=QUANTIZATIONS, help="of an unquantized model, at its load")
    command.flag(
        "--kv-cache-dtype",
        default="auto",
        type=worker["kv-cache-dtype"],
        metavar="|".join(KV_CACHE_DTYPES),
        help="fp8, int8: a byte a number; int4: half a byte; exact: --dtype; auto: the model's",
    )
    add("--gpu-memory", default="", metavar="SIZE", help="of one GPU, as 141GiB or 80GB; the preset's if not given")
    share = "gpu-memory-utilization"
    command.flag(f"--{share}", type=worker[share], default=0.9, metavar="X", help="share of it that a worker takes")
    command.flag(
        "--tensor-parallel-size",
        "-tp",
        type=worker["tensor-parallel-size"],
        default=1,
        metavar="N",
        help="GPUs of one worker: the curves are such a worker's",
    )

    command.flag("--max-num-seqs", type=worker["max-num-seqs"], metavar="N", help="sequences of one step; the preset's if not given")
    command.flag(
        "--max-num-batched-tokens",
        type=worker["max-num-batched-tokens"],
        metavar="N",
        help="token budget of a prefill worker's step; the preset's if not given",
    )
    add("--fixed-roles", action="store_true", help="workers do nothing but their role's work, as with this flag of workers")
    command.flag("--block-size", type=worker["block-size"], default=16, metavar="N", help="tokens of one KV block")

    add("--gpu-hour-price", default="1", metavar="P[,D]", help="of one GPU, in whichever currency (1); of a decode worker's, if another")
    add("--seed", type=int, default=0, metavar="N", help="of the simulated requests")
    add("--json", action="store_true", help="one JSON object instead of text")
