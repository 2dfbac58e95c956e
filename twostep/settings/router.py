"""Settings of routers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from twostep.settings.readers import (
    MILLISECONDS,
    OPTIONAL_PORT,
    PORT,
    SECONDS,
    SECONDS_OR_NONE,
    Number,
    Whole,
    allowed_hosts,
    allowed_origins,
    model_names,
    module_function,
    tenant_weights,
    trace_url,
)
from twostep.settings.service import TracedServiceSettings
from twostep.settings.table import FileKind, Required, Rule, setting
from twostep.settings.worker import LOAD_FORMATS

DEFAULT_PORT = 8000
DEFAULT_GRPC_PORT = 50051
COMPRESSIONS = ("none", "gzip")
# Names of twostep/text/reasoning.py and tool_calls.py, which a table that every process reads cannot import.
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1", "deepseek_v3", "glm45", "mistral", "openai_gptoss")
TOOL_CALL_PARSERS = (
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "glm47",
    "hermes",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "mistral",
    "openai",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(TracedServiceSettings):
    """Holds what a router may be told; times in seconds."""

    model: Path = setting(Required, "the workers' model: its directory, or ORG/NAME of the Hugging Face hub", metavar="DIR|NAME")
    served_model_name: tuple[str, ...] = setting(
        (),
        "names clients may ask for; answers carry the first; that of --model if not given",
        model_names,
        metavar="NAME ...",
        several=True,
    )
    chat_template: Path | None = setting(None, "Jinja file in place of the model's own chat template", metavar="FILE", file=FileKind.READ)
    load_format: str = setting("auto", "dummy: the workers' weights are made up, to measure", choices=LOAD_FORMATS)
    port: int = setting(DEFAULT_PORT, "HTTP port: OpenAI's API and the page; 0 for any free one, -1 for none", OPTIONAL_PORT)
    grpc_port: int = setting(DEFAULT_GRPC_PORT, "gRPC port, 0 for any free one", PORT)
    router_id: str = setting("", "unique name of this replica; drawn at start if not given")
    tls_client_auth: str = setting(
        "require",
        "whether clients of this router need a certificate of --tls-ca; workers need one in any case",
        choices=("require", "none"),
    )
    redis_start_timeout: float = setting(10.0, "how long to wait for Redis at start", SECONDS)
    drain_timeout: float = setting(30.0, "time for running requests to end after SIGTERM", SECONDS)
    placement_log: Path | None = setting(
        None,
        "write down who was chosen for each request and why, for `python -m router.placing.replay FILE`; two files of 256 MiB at most",
        metavar="FILE",
        file=FileKind.WRITTEN,
    )

    trace_url: str = setting(
        "",
        "where traces are shown, for links of the page: a URL with {trace_id} in it, such as https://jaeger.example/trace/{trace_id}",
        trace_url,
        metavar="URL",
    )

    # ---- who may ask ----
    allowed_origins: tuple[str, ...] = setting(
        (),
        'origins whose pages may ask from a browser, as in ["https://chat.example"]; ["*"]: any; none if not given',
        allowed_origins,
        metavar="JSON",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "names by which clients may ask over HTTP, * for any; addresses and localhost always may; if not given any, but none where --host "
        "is a loopback address, so that no web page can make a name mean it",
        allowed_hosts,
        metavar="NAME,...",
    )
    api_key: str = setting("", "let in those only who show this key; clients of `twostep` send the same variable's", secret=True)
    api_key_file: Path | None = setting(None, "the same, with the key in the first line of a file", metavar="FILE", file=FileKind.READ)
    api_keys_file: Path | None = setting(
        None,
        "let in those only who show a key of this file, which `twostep keys` writes; it is read again when it changes",
        metavar="FILE",
        file=FileKind.READ,
    )
    api_keys: str = setting(
        "",
        "the same, with the keys in Redis, for all routers; redis-adopt: also those there that nobody has signed yet, which it signs",
        choices=("", "redis", "redis-adopt"),
        metavar="redis",
    )
    admin_port: int = setting(
        -1, "HTTP for operators: API keys, workers' roles, the log's level, a drain; -1 for none, 0 for any free one", OPTIONAL_PORT
    )
    admin_host: str = setting("127.0.0.1", "address of --admin-port; whoever can reach it needs the admin key all the same")
    admin_key_file: Path | None = setting(
        None, "what opens --admin-port; if not given, a key that follows from the deployment's secret", metavar="FILE", file=FileKind.READ
    )
    max_connections: int = setting(
        4096,
        "connections at once, on either port; new ones are refused where, over HTTP, no idle one makes room for them",
        Whole(1, 1 << 20),
    )
    max_body_bytes: int = setting(16 << 20, "largest HTTP request taken", Whole(1024, 1 << 40), metavar="BYTES")

    # ---- what is held back before it is sent ----
    hold_back: str = setting(
        "",
        "show all text to this function before it is sent: it may replace it or end the answer (docs/access.md)",
        module_function,
        metavar="MODULE:FUNCTION",
    )
    hold_back_chars: int = setting(
        64,
        "characters of an answer that are kept back, so that the function sees what follows them before they are sent",
        Whole(0, 1 << 20),
    )
    hold_back_timeout: float = setting(
        1.0, "seconds that the function may take for each piece of text", Number(0, 3600, above=True, unit="seconds")
    )
    hold_back_failure: str = setting(
        "closed", "what it could not judge in time is not sent, and the request fails; open: it is sent", choices=("closed", "open")
    )

    # ---- files and batches ----
    batch_dir: Path | None = setting(
        None,
        "keep files and batches here, and serve /v1/files and /v1/batches; routers of one deployment may share it",
        metavar="DIR",
        file=FileKind.FOLDER,
    )
    max_owner_bytes: int = setting(
        10 << 30,
        "most that one tenant has on disk, or all of them where no API keys are asked for; 0: no bound",
        Whole(0, 1 << 60),
        metavar="BYTES",
    )
    file_retention_days: int = setting(30, "files and ended batches are kept so long", Whole(1, 36_500))

    # ---- answers of /v1/responses that later requests refer to ----
    response_ttl: float = setting(
        3600.0,
        "answers of /v1/responses stay in Redis so long after their last use, for their API key alone; 0: none is stored",
        SECONDS_OR_NONE,
    )
    response_bytes: int = setting(
        256 << 20,
        "most that they have of Redis, half of its maxmemory in any case; an eighth of it for one API key",
        Whole(0, 1 << 50),
        metavar="BYTES",
    )

    # ---- what requests say and what answers are ----
    default_max_tokens: int = setting(
        0, "max_tokens of requests that give none; 0: as many as the context has room for, as vLLM does", Whole(0, 1 << 30)
    )
    reasoning_parser: str = setting(
        "auto", "how the model marks what it thinks before it answers; auto: by its chat template", choices=REASONING_PARSERS
    )
    tool_call_parser: str = setting("auto", "how the model writes tool calls; auto: by its chat template", choices=TOOL_CALL_PARSERS)
    special_tokens_in_messages: str = setting(
        "text",
        "what becomes of <|im_end|> and the like in what clients say in chats; tokens: whoever writes them can forge turns",
        choices=("text", "tokens"),
    )
    grpc_compression: str = setting(
        "none",
        "gzip: prompts to workers and answers to clients travel compressed, which pays on slow links only; compressed requests are "
        "understood in any case",
        choices=COMPRESSIONS,
    )

    # ---- whose turn it is, and how long a request may take ----
    max_inflight: int = setting(512, "requests served at once", Whole(1, 1 << 20))
    max_waiting: int = setting(512, "requests that may wait to be served; more are refused", Whole(0, 1 << 20))
    tenant_weights: Mapping[str, float] = setting(
        dict, "shares of tenants that compete, by tokens; 1 for those not named", tenant_weights, metavar="NAME=W,...|FILE"
    )
    tenant_max_inflight: int = setting(0, "requests of one tenant served at once; 0: as many as --max-inflight", Whole(0, 1 << 20))
    tenant_max_waiting: int = setting(0, "requests of one tenant that may wait; 0: as many as --max-waiting", Whole(0, 1 << 20))
    target_ttft_ms: float = setting(
        1000.0,
        "time to the first token that the deployment is scaled for, of requests that name none; the same on routers and autoscalers",
        MILLISECONDS,
    )
    target_tpot_ms: float = setting(50.0, "time per token after it, likewise; no request is refused for either", MILLISECONDS)
    request_timeout: float = setting(600.0, "longest life of a request; a client's shorter deadline counts", SECONDS)
    no_worker_grace: float = setting(3.0, "how long a request waits for a missing worker to come back", SECONDS)
    prefix_lookup_timeout: float = setting(0.002, "how long a request waits to hear from Redis who holds its prefix", SECONDS)

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.api_keys_file or self.api_keys or self.api_key_file or self.api_key)

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda router: router.api_keys_file is not None and router.api_keys,
            "{api-keys-file} and {api-keys} contradict each other; keep the keys in one place",
        ),
        Rule(
            lambda router: router.api_key_file is not None and (router.api_keys_file is not None or router.api_keys),
            "{api-key-file} is for a router with one key; with {api-keys-file} or {api-keys} add it there with `twostep keys create`",
        ),
    )
