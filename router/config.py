"""The router's configuration: parsed once, frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.waiting.fair_queue import AGEING_S
from twostep.checkpoint.model_name import name_of
from twostep.settings.reading import read_settings
from twostep.settings.router import RouterSettings
from twostep.settings.service import HASH_UNIT, ROUTER_LEASE_S, traces_endpoint
from twostep.settings.tls import TlsFiles

PROMPT_TOKENS_EACH = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(RouterSettings):
    """The settings, and what never changes; times in seconds. An empty `router_id` is drawn at start."""

    # Seconds that a request waits behind more urgent classes before its own gets a turn in nine.
    ageing: float = AGEING_S
    # Steps' worth of prompt tokens that this router keeps queued on one worker (half for batch requests); the rest waits here, where
    # classes and tenants take turns. Fewer let workers run dry between two looks, more take the turns away. 0: no limit.
    staged_steps: int = 4
    # Tokens kept for a slow client before it is cut: more than a client behind a bad link is ever late, some 50 KB.
    max_buffered_tokens: int = 1024
    # Prompt tokens of all requests served at once: PROMPT_TOKENS_EACH for each of --max-inflight, so that one bound moves the other.
    max_inflight_prompt_tokens: int = PROMPT_TOKENS_EACH * 512
    # Requests of batches that this router asks at once: an eighth of --max-inflight, for they only fill the gaps.
    batch_concurrency: int = 512 // 8
    # The largest file of /v1/files, as of OpenAI's batches.
    max_file_bytes: int = 200 << 20
    # Times a request is begun, in all, when workers are lost: one that has lost three is likely what loses them.
    max_attempts: int = 3
    # A client that takes hardly anything for so long, of whatever waits for it, is cut.
    client_write_timeout: float = 30.0
    # How long a decode worker's broken token stream may take to reopen before its requests are begun again on another: no longer than
    # workers keep them for a router without a stream.
    stream_lease: float = ROUTER_LEASE_S
    # Tokens of one prefix hash: prefixes are found only where every process of a deployment has the same.
    hash_unit: int = HASH_UNIT

    @property
    def front_tls(self) -> TlsFiles:
        """Returns the files of the ports that clients come to."""
        # With an authority alone there is nothing to serve TLS with, which is refused as ever.
        return self.tls if self.tls_client_auth == "require" or self.tls.cert is None else replace(self.tls, ca=None)


def parse_config(argv: Sequence[str] | None = None) -> RouterConfig:
    """Exits with a usage message if a flag does not make sense."""
    config = read_settings(
        RouterConfig,
        argv,
        prog="python -P -m router",
        description="Twostep router: one gRPC front door for prefill and decode workers.",
        defaults={"otlp_endpoint": traces_endpoint()},
    )
    return replace(
        config,
        served_model_name=config.served_model_name or (name_of(config.model),),
        max_inflight_prompt_tokens=PROMPT_TOKENS_EACH * config.max_inflight,
        batch_concurrency=max(1, config.max_inflight // 8),
    )
