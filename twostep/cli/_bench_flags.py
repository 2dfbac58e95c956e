"""Flags of `twostep bench serve`. Loads nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from twostep.settings.reading import FlagParser

WORKLOADS = ("fixed", "normal", "sharegpt", "document", "shared-prefix", "multi-turn", "quoting", "mooncake")
_REMOVED = {
    "azure": "turn its lines into mooncake's: timestamp in ms, input_length, output_length, no hash_ids",
    "mixed": "run `--workload fixed` twice at once, with long and with short prompts",
}

DESCRIPTION = """Load on a served model, and what its users would have felt: TTFT, TPOT, gaps between tokens, goodput, throughput.

  twostep bench serve --concurrency 2 --num-requests 12 --input-tokens 64 --output-tokens 32
                                                                        two users with short prompts: enough for a laptop's CPUs
  twostep bench serve --rate 4 --goodput ttft:500 tpot:10 gap:25        60 s of Poisson arrivals: GPUs on this machine
  twostep bench serve --rate 4,6,8 --goodput ttft:500 tpot:30           one run for each rate, and the highest that keeps the targets
  twostep bench serve --sweep --rate 4 --goodput ttft:500 tpot:30       finds that rate by itself
  twostep bench serve --concurrency 32 --workload sharegpt              32 users, each asking again when answered

docs/benchmarking.md has every figure's definition. `vllm bench serve` and GuideLLM load an HTTP port, this one and others'."""


def _workload(name: str) -> str:
    if name in WORKLOADS:
        return name
    why = f"it was removed: {_REMOVED[name]}" if name in _REMOVED else f"give one of {', '.join(WORKLOADS)}"
    raise argparse.ArgumentTypeError(f"{name!r}: {why}")


QUALITY_DESCRIPTION = """What a checkpoint in fewer bits, or lossy KV, changes, beside a reference. One engine after the other, without any
network.

  twostep bench quality --against kv-cache-dtype=fp8 kv-cache-dtype=int8                  the default model, its KV in a byte
  twostep bench quality --model ./Qwen3-8B --against ./Qwen3-8B-FP8 ./Qwen3-8B-AWQ,kv-cache-dtype=fp8

docs/quality.md has every figure's definition, and what the formats cost on a small model."""


PAGE_DESCRIPTION = """Draws where the time of earlier runs went, one beside the other, as an HTML file that loads nothing.

  twostep bench page before.jsonl after.jsonl --output page.html        two runs of `twostep bench serve --save-requests`
  twostep bench page twostep.jsonl vllm.json --output page.html         the second of `vllm bench serve --save-result --save-detailed`

A file with several rates is several runs. docs/benchmarking.md has every figure's definition."""


def add_page_flags(command: FlagParser) -> None:
    command.add_argument("runs", nargs="+", type=Path, metavar="FILE", help="of --save-requests, or a result of vLLM's")
    command.add_argument("--output", type=Path, required=True, metavar="FILE", help="the HTML file to write")
    command.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="targets that count together: ttft, tpot, gap, e2e")


def add_flags(command: FlagParser) -> None:
    target = command.add_argument_group("what is loaded")
    command.flag(
        "--target",
        group=target,
        default="localhost:50051",
        metavar="HOST:PORT",
        help="a router's gRPC port; several, with commas, in turn",
    )
    command.flag(
        "--api-key",
        group=target,
        default="",
        metavar="KEY",
        help="if the router asks for one; the variable keeps it out of the process list",
    )
    target.add_argument("--model", default="", metavar="NAME", help="not needed if one is served only")
    target.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for a whole request (default: 600)")
    command.flag("--tls-ca", group=target, type=Path, metavar="PEM", help="authority to check a router by; switches TLS on")
    command.flag("--tls-cert", group=target, type=Path, metavar="PEM", help="own certificate")
    command.flag("--tls-key", group=target, type=Path, metavar="PEM", help="key of --tls-cert")

    load = command.add_argument_group("when requests come")
    load.add_argument("--rate", metavar="R[,R...]", help="requests (conversations) per second; inf: all at once; several: a run for each")
    load.add_argument("--concurrency", type=int, metavar="N", help="closed loop: users, each asking again when answered")
    load.add_argument("--trace-speed", type=float, metavar="X", help="replay a trace so many times as fast")
    load.add_argument("--duration", type=float, metavar="S", help="seconds that are measured (default: 60)")
    load.add_argument("--num-requests", type=int, metavar="N", help="end after so many requests instead")
    load.add_argument("--warmup", type=float, default=0.0, metavar="S", help="load before that and after it, not measured (default: 0)")
    load.add_argument("--seed", default="0", help="repeats prompts and times (default: 0)")

    work = command.add_argument_group("what they ask for")
    work.add_argument("--workload", default="normal", type=_workload, metavar="NAME", help=f"{', '.join(WORKLOADS)} (default: normal)")
    work.add_argument("--input-tokens", type=int, metavar="N", help="mean prompt: what is new in it, beside prefix and history")
    work.add_argument("--output-tokens", type=int, metavar="N", help="mean answer")
    work.add_argument("--spread", type=float, default=30.0, metavar="PERCENT", help="standard deviation of normal lengths (default: 30)")
    work.add_argument("--prefix-tokens", metavar="N[xK]", help="shared prefix (1024), K different ones; or a conversation's system prompt")
    work.add_argument("--turns", default="5", metavar="N|LOW:HIGH", help="turns of a conversation, 180 at most (default: 5)")
    work.add_argument("--think-time", type=float, default=0.0, metavar="S", help="mean time from an answer to the next turn (default: 0)")
    work.add_argument("--dataset-path", type=Path, metavar="FILE", help="mooncake: its JSONL; quoting: a text of its own")
    work.add_argument("--max-model-len", type=int, default=0, metavar="N", help="cut longer requests to this; 0: what the server tells")
    work.add_argument("--vocab-size", type=int, default=0, metavar="N", help="draw ids from 256 to this; 0: ids of ordinary text")
    work.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy")

    asked = command.add_argument_group("what each request says")
    asked.add_argument("--request-class", default="", choices=["interactive", "standard", "batch"], help="how urgent")
    asked.add_argument("--tenant", default="", metavar="NAME", help="whose share is used")
    asked.add_argument("--send-targets", action="store_true", help="tell ttft, tpot and gap of --goodput: what cannot be kept is refused")

    judged = command.add_argument_group("how it is judged")
    judged.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="targets that count together: ttft, tpot, gap, e2e")
    judged.add_argument(
        "--sweep",
        action="store_true",
        help="find the highest rate that keeps the targets, beginning at --rate; a run ends once it cannot keep them",
    )
    judged.add_argument("--attainment", type=float, default=0.95, metavar="X", help="share that must meet all targets (default: 0.95)")
    judged.add_argument("--gpus", metavar="N|P+D", help="for figures per GPU; of prefill and decode workers, as 1+3")

    out = command.add_argument_group("results")
    out.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    out.add_argument("--output", type=Path, metavar="FILE", help="write the JSON here, too")
    out.add_argument("--save-requests", type=Path, metavar="FILE", help="JSONL, one request a line, every token's time in it")
    out.add_argument("--page", type=Path, metavar="FILE", help="draw where the time went: an HTML file that loads nothing")
    out.add_argument("--plots", type=Path, metavar="DIR", help="draw a page, load.png, into this folder (needs matplotlib)")
