"""Flags of `twostep bench serve`. Loads nothing heavy."""

from __future__ import annotations

from pathlib import Path

from twostep.settings.flags import FlagParser

WORKLOADS = ("fixed", "normal", "mixed", "sharegpt", "document", "shared-prefix", "quoting", "multi-turn", "mooncake", "azure")
ARRIVALS = ("poisson", "gamma", "constant", "closed", "trace")

DESCRIPTION = """Load on a served model, and what its users would have felt: TTFT, TPOT, gaps between tokens, goodput, throughput, cost.

  twostep bench serve --concurrency 2 --num-requests 12 --input-tokens 64 --output-tokens 32
                                                                        two users with short prompts: enough for a laptop's CPUs
  twostep bench serve --rate 4 --goodput ttft:500 tpot:10 gap:25        60 s of Poisson arrivals: GPUs on this machine
  twostep bench serve --rates 4,6,8 --goodput ttft:500 tpot:30          one run for each rate, and the highest that keeps the targets
  twostep bench serve --sweep --rate 4 --goodput ttft:500 tpot:30       finds that rate by itself
  twostep bench serve --concurrency 32 --workload sharegpt              32 users, each asking again when answered
  twostep bench serve --target http://HOST:8000/v1 --model NAME ...     any OpenAI-compatible server, for comparison

docs/benchmarking.md has every figure's definition."""


def add_flags(command: FlagParser) -> None:
    target = command.add_argument_group("what is loaded")
    command.flag(
        "--target",
        group=target,
        default="localhost:50051",
        metavar="HOST:PORT|URL",
        help="a router (several, with commas, in turn), or http://…/v1",
    )
    command.flag(
        "--api-key",
        group=target,
        default="",
        metavar="KEY",
        help="if what is loaded asks for one, over gRPC or HTTP; the variable keeps it out of the process list",
    )
    target.add_argument("--api", default="completions", choices=["completions", "chat"], help="over HTTP: which of OpenAI's endpoints")
    target.add_argument("--model", default="", metavar="NAME", help="not needed if one is served only")
    target.add_argument("--tokenizer", type=Path, metavar="DIR", help="over HTTP: the model's, so that texts have a known number of tokens")
    target.add_argument("--extra-body", default="", metavar="JSON", help='over HTTP: more fields of each request, as {"cache_salt": "a"}')
    target.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for a whole request (default: 600)")
    command.flag("--tls-ca", group=target, type=Path, metavar="PEM", help="authority to check a router by; switches TLS on")
    command.flag("--tls-cert", group=target, type=Path, metavar="PEM", help="own certificate")
    command.flag("--tls-key", group=target, type=Path, metavar="PEM", help="key of --tls-cert")

    load = command.add_argument_group("when requests come")
    load.add_argument("--arrivals", default="", choices=ARRIVALS, help="only closed waits for answers")
    load.add_argument("--rate", type=float, metavar="R", help="requests (conversations) per second; inf: all at once")
    load.add_argument("--burstiness", type=float, metavar="B", help="shape of gamma arrivals: less than 1 in bursts, 1 is Poisson")
    load.add_argument("--concurrency", type=int, metavar="N", help="closed loop: users, each asking again when answered")
    load.add_argument("--trace-speed", type=float, metavar="X", help="replay a trace so many times as fast")
    load.add_argument("--duration", type=float, metavar="S", help="seconds that are measured (default: 60)")
    load.add_argument("--num-requests", type=int, metavar="N", help="end after so many requests instead")
    load.add_argument("--warmup", type=float, default=0.0, metavar="S", help="load before that, not measured (default: 0)")
    load.add_argument("--cooldown", type=float, default=0.0, metavar="S", help="load after that, not measured (default: 0)")
    load.add_argument("--max-in-flight", type=int, default=10_000, metavar="N", help="more at once are errors (default: 10000)")
    load.add_argument("--seed", default="0", help="repeats prompts and times (default: 0)")

    work = command.add_argument_group("what they ask for")
    work.add_argument("--workload", default="normal", choices=WORKLOADS, help="default: normal")
    work.add_argument("--input-tokens", type=int, metavar="N", help="mean prompt: what is new in it, beside prefix and history")
    work.add_argument("--output-tokens", type=int, metavar="N", help="mean answer")
    work.add_argument("--spread", type=float, default=30.0, metavar="PERCENT", help="standard deviation of normal lengths (default: 30)")
    work.add_argument("--long-share", type=float, default=0.5, metavar="X", help="mixed: share of 1200-2600, beside 60-128 (default: 0.5)")
    work.add_argument("--prefix-tokens", type=int, metavar="N", help="shared prefix (default: 1024), or a conversation's system prompt (0)")
    work.add_argument("--num-prefixes", type=int, default=1, metavar="N", help="different shared prefixes (default: 1)")
    work.add_argument("--prefix-zipf", type=float, default=0.0, metavar="X", help="k-th has weight 1/k^X (default: 0, all alike)")
    work.add_argument("--turns", default="5", metavar="N|LOW:HIGH", help="turns of a conversation, 180 at most (default: 5)")
    work.add_argument("--think-time", type=float, default=0.0, metavar="S", help="mean time from an answer to the next turn (default: 0)")
    work.add_argument("--dataset-path", type=Path, metavar="FILE", help="sharegpt: its JSON; mooncake: JSONL; azure: CSV or JSONL")
    work.add_argument("--max-model-len", type=int, default=0, metavar="N", help="cut longer requests to this; 0: what the server tells")
    work.add_argument("--vocab-size", type=int, default=0, metavar="N", help="draw ids from 256 to this; 0: ids of ordinary text")
    work.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy")
    work.add_argument("--stop-at-eos", action="store_true", help="answers may end early; else ignore_eos is asked for")
    work.add_argument("--warm-cache", action="store_true", help="may hit what earlier runs left in the cache; else kept apart")

    asked = command.add_argument_group("what each request says (Twostep only)")
    asked.add_argument("--request-class", default="", choices=["interactive", "standard", "batch"], help="how urgent")
    asked.add_argument("--tenant", default="", metavar="NAME", help="whose share is used")
    asked.add_argument("--send-targets", action="store_true", help="tell ttft and tpot of --goodput: what cannot be kept is refused")

    judged = command.add_argument_group("how it is judged")
    judged.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="targets that count together: ttft, tpot, gap, e2e")
    judged.add_argument("--rates", default="", metavar="R,R,...", help="one run for each rate")
    judged.add_argument("--sweep", action="store_true", help="find the highest rate that keeps the targets, beginning at --rate")
    judged.add_argument("--sweep-resolution", type=float, default=0.05, metavar="X", help="stop when this near (default: 0.05)")
    judged.add_argument("--sweep-points", type=int, default=16, metavar="N", help="runs at most (default: 16)")
    judged.add_argument("--stop-early", action="store_true", help="end a run as soon as too many have missed for it to pass")
    judged.add_argument("--attainment", type=float, default=0.95, metavar="X", help="share that must meet all targets (default: 0.95)")
    judged.add_argument("--num-gpus", type=int, metavar="N", help="for figures per GPU; those of prefill and decode if not given")
    judged.add_argument("--prefill-gpus", type=int, default=0, metavar="N", help="for the cost")
    judged.add_argument("--decode-gpus", type=int, default=0, metavar="N", help="for the cost")
    judged.add_argument("--gpu-hour-price", type=float, metavar="P", help="of one GPU, in any currency")
    judged.add_argument("--decode-gpu-hour-price", type=float, metavar="P", help="of a decode worker's, if another")
    judged.add_argument("--max-slip-ms", type=float, default=10.0, metavar="MS", help="warn if requests leave later (default: 10)")

    out = command.add_argument_group("results")
    out.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    out.add_argument("--output", type=Path, metavar="FILE", help="write the JSON here, too")
    out.add_argument("--save-requests", type=Path, metavar="FILE", help="JSONL, one request a line, every token's time in it")
    out.add_argument("--plots", type=Path, metavar="DIR", help="draw PNG files into this folder (needs matplotlib)")
    out.add_argument("--title", default="", help="of the plots")
    out.add_argument("--no-progress", action="store_true", help="no progress bar")
