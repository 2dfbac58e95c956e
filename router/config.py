"""The router's configuration: parsed once, frozen."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from router.access.flags import access_flags
from router.batches.flags import batch_flags
from router.waiting.fair_queue import AGEING_S
from router.waiting.quota import tenant_weights
from twostep.cluster.demand_flags import DEFAULT_TPOT_MS, DEFAULT_TTFT_MS, target_flags
from twostep.rpc.channel import COMPRESSIONS, PLAINTEXT, TlsFiles
from twostep.settings.flag_values import whole
from twostep.settings.flags import FlagParser, allowed_hosts, allowed_origins, tracing_flag
from twostep.text.reasoning import REASONING_PARSERS
from twostep.text.tool_calls import TOOL_CALL_PARSERS

DEFAULT_HTTP_PORT = 8000
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything a router can be told. Times are seconds. An empty `router_id` is drawn at start."""

    model: Path
    load_format: str = "auto"
    redis_url: str = DEFAULT_REDIS_URL
    host: str = "0.0.0.0"
    port: int = 50051
    health_port: int | None = None
    metrics_port: int | None = None
    http_port: int | None = None
    max_body_bytes: int = 16 << 20
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    api_keys_file: Path | None = None
    api_keys: str = ""
    max_connections: int = 4096
    admin_port: int = -1
    admin_host: str = "127.0.0.1"
    admin_key_file: Path | None = None
    hold_back: str = ""
    hold_back_chars: int = 64
    hold_back_timeout: float = 1.0
    hold_back_failure: str = "closed"
    batch_dir: Path | None = None
    batch_concurrency: int = 64
    max_file_bytes: int = 200 << 20
    max_owner_bytes: int = 10 << 30
    file_retention_days: int = 30
    served_model_name: str = ""
    secret_file: Path | None = None
    router_id: str = ""
    hash_unit: int = 64
    default_max_tokens: int = 0
    reasoning_parser: str = "auto"
    tool_call_parser: str = "auto"
    special_tokens_in_messages: str = "text"
    max_inflight: int = 512
    max_waiting: int = 512
    max_inflight_prompt_tokens: int = 4 << 20
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    tenant_max_inflight: int = 0
    tenant_max_waiting: int = 0
    ageing: float = AGEING_S
    target_ttft_ms: float = DEFAULT_TTFT_MS
    target_tpot_ms: float = DEFAULT_TPOT_MS
    staged_steps: int = 4
    max_buffered_tokens: int = 1024
    max_attempts: int = 3
    request_timeout: float = 600.0
    client_write_timeout: float = 30.0
    no_worker_grace: float = 3.0
    stream_lease: float = 5.0
    prefix_lookup_timeout: float = 0.002
    drain_timeout: float = 30.0
    redis_start_timeout: float = 10.0
    grpc_compression: str = "none"
    tls: TlsFiles = PLAINTEXT
    tls_client_auth: str = "require"
    otlp_endpoint: str = ""
    placement_log: Path | None = None
    log_level: str = "info"
    log_json: bool = False

    @property
    def front_tls(self) -> TlsFiles:
        """Of the ports that clients come to."""
        # With an authority alone there is nothing to serve TLS with, which is refused as ever.
        return self.tls if self.tls_client_auth == "require" or self.tls.cert is None else replace(self.tls, ca=None)


def parse_config(argv: Sequence[str] | None = None) -> RouterConfig:
    """Exits with a usage message if a flag does not make sense."""
    parser = FlagParser(prog="python -P -m router", description="Twostep router: one gRPC front door for prefill and decode workers.")
    default = RouterConfig(model=Path())
    parser.flag(
        "--model", type=Path, required=True, metavar="DIR", help="model directory: tokenizer.json, config.json; weights are not read"
    )
    parser.flag(
        "--load-format", default=default.load_format, choices=["auto", "dummy"], help="dummy: the workers' weights are made up, to measure"
    )
    parser.flag("--redis-url", default=default.redis_url, help="where workers register")
    parser.flag("--host", default=default.host, help="address to listen on")
    parser.flag("--port", type=whole(0, 65535), default=default.port, help="gRPC port, 0 for any free one")
    parser.flag(
        "--health-port", type=whole(-1, 65535), default=None, help="plaintext health-only port; --port + 1 if not given, -1 for none"
    )
    parser.flag(
        "--metrics-port", type=whole(-1, 65535), default=None, help="plaintext HTTP, GET /metrics; --port + 2 if not given, -1 for none"
    )
    parser.flag(
        "--http-port",
        type=whole(-1, 65535),
        default=None,
        help=f"OpenAI's API and the page; {DEFAULT_HTTP_PORT} if not given, any free one if --port is 0, -1 for none",
    )
    parser.flag("--max-body-bytes", type=whole(1024, 1 << 40), default=default.max_body_bytes, help="largest HTTP request taken")
    parser.flag(
        "--allowed-origins",
        type=allowed_origins,
        default=default.allowed_origins,
        metavar="JSON",
        help='origins whose pages may ask from a browser, as in ["https://chat.example"]; ["*"]: any; none if not given',
    )
    parser.flag(
        "--allowed-hosts",
        type=allowed_hosts,
        default=default.allowed_hosts,
        metavar="NAME,...",
        help="names by which clients may ask over HTTP, * for any; addresses and localhost always may; if not given any, "
        "but none where --host is a loopback address, so that no web page can make a name mean it",
    )
    access_flags(parser)
    batch_flags(parser)
    parser.flag("--served-model-name", default="", help="name clients ask for; the directory's name if not given")
    parser.flag("--secret-file", type=Path, default=None, help="deployment secret, the same file on every process")
    parser.flag("--router-id", default="", help="unique name of this replica; drawn at start if not given")
    parser.flag("--hash-unit", type=whole(1, 65536), default=default.hash_unit, help="tokens of one prefix hash, the same on every process")
    parser.flag(
        "--default-max-tokens",
        type=whole(0, 1 << 30),
        default=default.default_max_tokens,
        help="max_tokens of requests that give none; 0: as many as the context has room for, as vLLM does",
    )
    parser.flag(
        "--reasoning-parser",
        default=default.reasoning_parser,
        choices=REASONING_PARSERS,
        help="how the model marks what it thinks before it answers; auto: by its chat template",
    )
    parser.flag(
        "--tool-call-parser",
        default=default.tool_call_parser,
        choices=TOOL_CALL_PARSERS,
        help="how the model writes tool calls; auto: by its chat template",
    )
    parser.flag(
        "--special-tokens-in-messages",
        default=default.special_tokens_in_messages,
        choices=["text", "tokens"],
        help="what becomes of <|im_end|> and the like in what clients say in chats; tokens: whoever writes them can forge turns",
    )
    parser.flag("--max-inflight", type=whole(1, 1 << 20), default=default.max_inflight, help="requests served at once")
    parser.flag(
        "--max-waiting",
        type=whole(0, 1 << 20),
        default=default.max_waiting,
        help="requests that may wait to be served; more are refused",
    )
    parser.flag(
        "--max-inflight-prompt-tokens",
        type=whole(1, 1 << 40),
        default=default.max_inflight_prompt_tokens,
        help="prompt tokens of all requests served at once",
    )
    parser.flag(
        "--tenant-weights",
        type=tenant_weights,
        default={},
        metavar="NAME=W,...|FILE",
        help="shares of tenants that compete, by tokens; 1 for those not named",
    )
    parser.flag(
        "--tenant-max-inflight",
        type=whole(0, 1 << 20),
        default=default.tenant_max_inflight,
        help="requests of one tenant served at once; 0: as many as --max-inflight",
    )
    parser.flag(
        "--tenant-max-waiting",
        type=whole(0, 1 << 20),
        default=default.tenant_max_waiting,
        help="requests of one tenant that may wait; 0: as many as --max-waiting",
    )
    parser.flag(
        "--ageing",
        type=_seconds,
        default=default.ageing,
        help="seconds that a request waits behind more urgent classes before its own gets a turn in nine",
    )
    target_flags(parser)
    parser.flag(
        "--staged-steps",
        type=whole(0, 1 << 20),
        default=default.staged_steps,
        help="steps' worth of prompt tokens that this router keeps queued on one worker (half for batch requests); the rest waits here, "
        "where classes and tenants take turns; 0: no limit",
    )
    parser.flag(
        "--max-buffered-tokens",
        type=whole(1, 1 << 20),
        default=default.max_buffered_tokens,
        help="tokens kept for a slow client before it is cut",
    )
    parser.flag(
        "--max-attempts",
        type=whole(1, 100),
        default=default.max_attempts,
        help="times a request is begun, in all, when workers are lost",
    )
    parser.flag(
        "--request-timeout",
        type=_seconds,
        default=default.request_timeout,
        help="longest life of a request; a client's shorter deadline counts",
    )
    parser.flag(
        "--client-write-timeout",
        type=_seconds,
        default=default.client_write_timeout,
        help="a client that takes hardly anything for so long, of whatever waits for it, is cut",
    )
    parser.flag(
        "--no-worker-grace",
        type=_seconds,
        default=default.no_worker_grace,
        help="how long a request waits for a missing worker to come back",
    )
    parser.flag(
        "--stream-lease",
        type=_seconds,
        default=default.stream_lease,
        help="how long a decode worker's broken token stream may take to reopen before its requests are begun again on another; "
        "more than the workers' --router-lease is no use",
    )
    parser.flag(
        "--prefix-lookup-timeout",
        type=_seconds,
        default=default.prefix_lookup_timeout,
        help="how long a request waits to hear from Redis who holds its prefix",
    )
    parser.flag("--drain-timeout", type=_seconds, default=default.drain_timeout, help="time for running requests to end after SIGTERM")
    parser.flag("--redis-start-timeout", type=_seconds, default=default.redis_start_timeout, help="how long to wait for Redis at start")
    parser.flag(
        "--grpc-compression",
        default=default.grpc_compression,
        choices=COMPRESSIONS,
        help="gzip: prompts to workers and answers to clients travel compressed, which pays on slow links only; "
        "compressed requests are understood in any case",
    )
    parser.flag("--tls-cert", type=Path, default=None, help="PEM certificate; with --tls-key it switches TLS on")
    parser.flag("--tls-key", type=Path, default=None, help="PEM key of --tls-cert")
    parser.flag("--tls-ca", type=Path, default=None, help="PEM authority that peers must be certified by")
    parser.flag(
        "--tls-peer-name",
        default="",
        help="name that workers' certificates must have, whatever address they are reached at; the address itself if not given",
    )
    parser.flag(
        "--tls-client-auth",
        default=default.tls_client_auth,
        choices=["require", "none"],
        help="whether clients of this router need a certificate of --tls-ca; workers need one in any case",
    )
    parser.flag(
        "--placement-log",
        type=Path,
        default=None,
        metavar="FILE",
        help="write down who was chosen for each request and why, for `python -m router.placing.replay FILE`; two files of 256 MiB at most",
    )
    tracing_flag(parser)
    parser.flag(
        "--log-level", default=default.log_level, choices=["debug", "info", "warning", "error"], help="least severe level that is logged"
    )
    parser.flag("--log-json", action="store_true", default=False, help="one JSON object a line")
    args = vars(parser.parse_args(argv))
    tls = TlsFiles(cert=args.pop("tls_cert"), key=args.pop("tls_key"), ca=args.pop("tls_ca"), peer_name=args.pop("tls_peer_name"))
    args["served_model_name"] = args["served_model_name"] or Path(args["model"]).resolve().name
    return RouterConfig(tls=tls, **args)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value
