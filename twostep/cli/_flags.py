"""Every flag of every subcommand. Loads nothing heavy: `twostep --help` is instant."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

from twostep import __version__
from twostep.cli import _bench_flags, _keys_flags, _lab_flags, _plan_flags
from twostep.settings.readers import COUNT, KV_CACHE_DTYPES, SECONDS_OR_NONE, Whole
from twostep.settings.reading import FlagParser, add_config_flag, add_flags
from twostep.settings.service import ARCHITECTURE, DTYPES, MODEL_REVISION
from twostep.settings.table import readers_of, settings_of
from twostep.settings.up import DEFAULT_MODEL, FORWARDED, UpSettings
from twostep.settings.worker import LOAD_FORMATS, QUANTIZATIONS, WorkerSettings

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[FlagParser]

# Also the SDK's default; not imported from there, that would load grpc.
DEFAULT_TARGET = "localhost:50051"


# Sampling settings of commands and of a chat.
SAMPLING: dict[str, type[int] | type[float] | type[str]] = {
    "max_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "seed": int,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "stop": str,
}
_SAMPLING_HELP = {
    "max_tokens": "tokens to generate at most",
    "temperature": "0 is greedy",
    "top_k": "0 is off",
    "seed": "repeats an answer",
}


class Urgency(TypedDict):
    """Keyword arguments of the SDK's generate and chat."""

    request_class: Literal["interactive", "standard", "batch"]
    ttft_ms: float | None
    tpot_ms: float | None
    gap_ms: float | None
    tenant: str


def parser() -> FlagParser:
    """Returns the parser of the whole command line; `command` of what it reads names the subcommand."""
    top = FlagParser(prog="twostep", description="Large language models served in two steps: prefill and decode, behind one router.")
    top.add_argument("--version", action="version", version=f"twostep {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=FlagParser)

    for add in (
        _add_generate,
        _add_chat,
        _add_status,
        _add_models,
        _add_role,
        _add_keys,
        _add_up,
        _add_demo,
        _add_bench,
        _add_lab,
        _add_plan,
    ):
        add(commands)
    return top


def _add_generate(commands: _Commands) -> None:
    generate = commands.add_parser("generate", help="continue a text", description="Continues a text as it stands, and streams the answer.")
    generate.add_argument("prompt", nargs="?", default="-", help="the text; - or nothing: standard input")
    _connection(generate)
    _sampling(generate)
    _urgency(generate, "standard")
    _grammar(generate)
    generate.add_argument("--json", action="store_true", help="one JSON object with text, tokens, usage, phases and transfer, at the end")


def _add_chat(commands: _Commands) -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to a model",
        description="A conversation. /help lists its commands; Ctrl-C cancels the answer, Ctrl-D leaves. Piped input: one line, one turn.",
    )
    _connection(chat)
    _sampling(chat)
    _urgency(chat, "interactive")
    chat.add_argument("--system", default="", metavar="TEXT", help="the system message")
    chat.add_argument("--no-history", action="store_true", help="forget what was typed (else: $XDG_STATE_HOME/twostep/chat_history)")


def _add_status(commands: _Commands) -> None:
    status = commands.add_parser(
        "status",
        help="workers, load, hit rate and transfers, live",
        description="A table of the deployment as its router sees it, drawn anew every second until Ctrl-C. With several routers in "
        "--target, the load of each. Into a pipe: once. docs/cli.md explains the columns.",
    )
    status.add_argument("--json", action="store_true", help="one JSON object with all there is to know, once")
    status.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two looks; 0: one table, and that is all")
    _connection(status, with_model=False)


def _add_models(commands: _Commands) -> None:
    models = commands.add_parser(
        "models",
        help="what is served, what can be fetched, and what a model holds",
        description="Lists the models served; or says what a model holds: formats of weights and KV, and bytes. A name is fetched first.",
    )
    models.add_argument(
        "action",
        nargs="?",
        default="list",
        metavar="list|fetch|DIR|NAME",
        help="fetch: download a model, print where it is. Anything else, as --model elsewhere: what it holds",
    )
    models.add_argument(
        "name", nargs="?", default="", help="of fetch: ORG/NAME of the Hugging Face hub, or a known name; if not given the default"
    )
    models.flag("--model-revision", default="", metavar="REV", help=MODEL_REVISION)
    models.flag("--architecture", default="", metavar="NAME", help=ARCHITECTURE)
    models.add_argument("--json", action="store_true", help="as JSON")
    _connection(models, with_model=False)


def _add_role(commands: _Commands) -> None:
    role = commands.add_parser(
        "role",
        help="which role a worker has, and the other one for it",
        description="Says which role a worker has. With a role: the worker drains and takes that one, without loading its weights again; "
        "its running requests may end first, and what has not is begun again elsewhere. docs/roles.md says more.",
    )
    _role(role)


def _add_keys(commands: _Commands) -> None:
    keys = commands.add_parser(
        "keys",
        help="API keys: make, list, change, revoke",
        description="API keys of a router's --api-keys-file, or of a running router through its --admin-port. docs/access.md says more.",
    )
    _keys_flags.add_flags(keys)


def _add_up(commands: _Commands) -> None:
    up = commands.add_parser(
        "up",
        aliases=["serve"],
        unknown_later=True,
        help="run a whole system on this machine",
        usage="twostep up [MODEL] [--prefill N] [--decode M] [--aggregated] [--autoscale] [more options below]",
        description="Redis, Ray, a router, prefill and decode workers, kept running until Ctrl-C, which drains them; with --aggregated no "
        "Ray and no prefill workers. Every setting of router, workers and autoscaler may be given here, too: it is theirs then.",
    )
    up.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="as --model")
    _system(up)


def _add_demo(commands: _Commands) -> None:
    demo = commands.add_parser(
        "demo",
        unknown_later=True,
        help="start a system, ask one question, show how the answer came about, stop",
        usage="twostep demo [TEXT] [--max-tokens N] [--model M] [more options below]",
        description="Starts a system on free ports, streams one answer, shows latency phases and how the KV cache travelled, stops. Takes "
        "the flags of `twostep up`.",
    )
    _system(demo)
    demo.add_argument("prompt", nargs="?", default="What is the capital of Japan?", help="the question")
    demo.add_argument("--max-tokens", type=int, default=64, help="tokens to generate at most")


def _add_bench(commands: _Commands) -> None:
    bench = commands.add_parser("bench", help="measure", description="Measures on this machine, beside the machine's own limits.")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=FlagParser)
    engine = kinds.add_parser(
        "engine",
        help="one engine: tokens/s, TTFT, TPOT, MFU, MBU",
        description="One engine without any network: prefill and decode of a batch of random prompts, how near they come to what this "
        "device reaches in the same run, and which limit binds. docs/benchmarking.md has the definitions.",
    )
    _bench_engine(engine)
    quality = kinds.add_parser(
        "quality",
        help="what fewer bits change: perplexity, divergence, equal greedy tokens",
        description=_bench_flags.QUALITY_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _bench_quality(quality)
    serve = kinds.add_parser(
        "serve",
        help="a served model under load: TTFT, TPOT, gaps, goodput, throughput",
        usage="twostep bench serve [--target T] [--rate R] [--workload W] [--goodput NAME:MS ...] [more options below]",
        description=_bench_flags.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _bench_flags.add_flags(serve)
    page = kinds.add_parser(
        "page",
        help="where the time of earlier runs of serve went, as a page",
        description=_bench_flags.PAGE_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _bench_flags.add_page_flags(page)


def _add_lab(commands: _Commands) -> None:
    lab = commands.add_parser("lab", help="make what serving needs beside a model", description="Makes what is served beside a model.")
    made = lab.add_subparsers(dest="kind", required=True, metavar="KIND", parser_class=FlagParser)
    eagle = made.add_parser(
        "eagle",
        help="train an EAGLE-3 head on a model's own answers",
        description=_lab_flags.EAGLE_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _lab_flags.add_eagle_flags(eagle)


def _add_plan(commands: _Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="how many workers of each role, simulated",
        usage="twostep plan --workload SPEC --slo SPEC (--rate R | --gpus N) [--preset NAME] [more options below]",
        description=_plan_flags.DESCRIPTION,
        epilog=f"For example: {_plan_flags.EXAMPLE}",
    )
    _plan_flags.add_flags(plan)


def _bench_engine(command: FlagParser) -> None:
    command.flag(
        "--model",
        default=DEFAULT_MODEL,
        metavar="DIR|NAME|SHAPE",
        help="a model directory, a known name, or random weights of llama-3.1-8b or llama-3.1-70b",
    )
    command.flag("--architecture", default="", metavar="NAME", help=ARCHITECTURE)
    worker = readers_of(WorkerSettings)
    command.flag("--load-format", default="auto", choices=LOAD_FORMATS, help="dummy: random weights, only config.json is read")
    command.flag("--dtype", default="auto", choices=DTYPES, help="auto: that of the weights")
    command.flag("--quantization", default="none", choices=QUANTIZATIONS, help="of an unquantized checkpoint, as it is read")
    command.flag(
        "--kv-cache-dtype",
        default="auto",
        type=worker["kv-cache-dtype"],
        metavar="|".join(KV_CACHE_DTYPES),
        help="fp8, int8: a byte a number; int4: half a byte; exact: as --dtype; auto: the checkpoint's, else exact",
    )
    command.flag("--device", type=worker["device"], default="auto", help="cpu, cuda, cuda:N, or auto: the GPU if there is one")
    command.add_argument(
        "--batch-size", type=COUNT, nargs="+", default=[1, 8], metavar="B", help="sequences at once; several are run in turn"
    )
    command.add_argument("--input-tokens", type=COUNT, default=512, metavar="N", help="length of each prompt")
    command.add_argument("--output-tokens", type=Whole(3, 1 << 20), default=64, metavar="N", help="tokens generated after each")
    command.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy")
    command.flag("--block-size", type=worker["block-size"], default=16, metavar="N", help="tokens of one KV block")
    tokens = "max-num-batched-tokens"
    command.flag(f"--{tokens}", type=worker[tokens], default=2048, metavar="N", help="token budget of one step")
    num_bytes = "kv-cache-memory-bytes"
    command.flag(f"--{num_bytes}", type=worker[num_bytes], metavar="BYTES", help="size of the KV cache, instead of what is free")
    share = "gpu-memory-utilization"
    command.flag(f"--{share}", type=worker[share], default=0.9, metavar="X", help="share of the GPU to take")
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _bench_quality(command: FlagParser) -> None:
    worker = readers_of(WorkerSettings)
    command.flag("--model", default=DEFAULT_MODEL, metavar="DIR|NAME", help="the reference")
    command.add_argument(
        "--against",
        nargs="+",
        required=True,
        metavar="WHAT",
        help="what to compare with it, each by itself: a model, or settings of a worker, NAME=VALUE, or several of these between commas; "
        "what is not given is the reference's",
    )
    command.flag("--dtype", default="auto", choices=DTYPES, help="of the reference; auto: that of the weights")
    command.flag(
        "--kv-cache-dtype",
        default="auto",
        type=worker["kv-cache-dtype"],
        metavar="|".join(KV_CACHE_DTYPES),
        help="of the reference; auto: the checkpoint's, else exact",
    )
    command.flag("--device", type=worker["device"], default="auto", help="cpu, cuda, cuda:N, or auto: the GPU if there is one")
    command.add_argument("--text", type=Path, metavar="FILE", help="a text in UTF-8; some pages in the package if not given")
    command.add_argument("--max-tokens", type=COUNT, default=4096, metavar="N", help="tokens of it to take at most (default: 4096)")
    command.add_argument(
        "--window", type=Whole(2, 1 << 20), default=512, metavar="N", help="tokens of a prompt that is scored (default: 512)"
    )
    command.add_argument("--num-prompts", type=COUNT, default=16, metavar="N", help="prompts that are continued (default: 16)")
    command.add_argument("--prompt-tokens", type=COUNT, default=64, metavar="N", help="tokens of each (default: 64)")
    command.add_argument("--answer-tokens", type=COUNT, default=64, metavar="N", help="tokens of each one's answer (default: 64)")
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _role(command: FlagParser) -> None:
    command.add_argument("address", metavar="HOST:PORT", help="the worker's gRPC port")
    command.add_argument("role", nargs="?", choices=["prefill", "decode"], help="what it is to be")
    command.add_argument("--force", action="store_true", help="even if it is the last one in its role")
    command.flag("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="a router, which knows whether others have its role")
    command.add_argument("--drain-timeout", type=SECONDS_OR_NONE, default=30.0, metavar="S", help="time for its running requests to end")
    command.flag("--secret-file", type=Path, metavar="FILE", help="the deployment's secret, without which no worker answers")
    _tls(command, "authority to check the worker by; switches TLS on")
    command.add_argument("--json", action="store_true", help="one JSON object")


def _tls(command: FlagParser, ca: str) -> None:
    command.flag("--tls-ca", type=Path, metavar="PEM", help=ca)
    command.flag("--tls-cert", type=Path, metavar="PEM", help="own certificate")
    command.flag("--tls-key", type=Path, metavar="PEM", help="key of --tls-cert")


def _connection(command: FlagParser, *, with_model: bool = True) -> None:
    command.flag("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="the router; several, with commas, share the requests")
    command.flag("--api-key", default="", metavar="KEY", help="if the router asks for one; the variable keeps it out of the process list")
    command.add_argument("--timeout", type=float, default=600.0 if with_model else 30.0, metavar="S", help="seconds for a whole request")
    _tls(command, "authority to check the router by; switches TLS on")
    command.flag("--grpc-compression", default="none", choices=["none", "gzip"], help="gzip: for long prompts over slow links")
    if with_model:
        command.add_argument(
            "--no-migrate", action="store_true", help="when a worker or router is lost half-way, fail instead of going on through another"
        )
        command.add_argument("--model", default="", help="name of a served model; not needed if there is one only")


def _sampling(command: FlagParser) -> None:
    """Left out: the model's own default."""
    for name, kind in SAMPLING.items():
        if name != "stop":
            letter = "N" if kind is int else "X"
            command.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=letter, help=_SAMPLING_HELP.get(name))
    command.add_argument("--stop", action="append", default=None, metavar="TEXT", help="end before this text; may be given several times")


def _grammar(command: FlagParser) -> None:
    group = command.add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema", metavar="FILE|JSON", help='the answer is JSON that this schema allows; {"type": "object"} allows any object'
    )
    group.add_argument("--regex", metavar="PATTERN", help="the whole answer matches this")


def sampling_of(args: argparse.Namespace) -> dict[str, object]:
    given = vars(args)
    return {name: given[name] for name in (*SAMPLING, "json_schema", "regex") if given.get(name) is not None}


def _urgency(command: FlagParser, default: str) -> None:
    command.flag(
        "--request-class",
        default=default,
        choices=["interactive", "standard", "batch"],
        help="interactive goes first, batch fills the gaps",
    )
    command.add_argument("--ttft-ms", type=float, metavar="MS", help="refuse at once what cannot get its first token within so long")
    command.add_argument("--tpot-ms", type=float, metavar="MS", help="and what cannot get each token after it within so long")
    command.add_argument("--gap-ms", type=float, metavar="MS", help="and what would have to wait longer between two tokens")
    command.flag("--tenant", default="", metavar="NAME", help="whose share of the system is used")


def urgency_of(args: argparse.Namespace) -> Urgency:
    return {
        "request_class": args.request_class,
        "ttft_ms": args.ttft_ms,
        "tpot_ms": args.tpot_ms,
        "gap_ms": args.gap_ms,
        "tenant": args.tenant,
    }


def _system(command: FlagParser) -> None:
    add_flags(command, settings_of(UpSettings))
    for title, settings in FORWARDED.items():
        add_flags(command.add_argument_group(f"settings of {title}"), settings)
    add_config_flag(command)
