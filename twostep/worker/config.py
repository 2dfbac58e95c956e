"""A worker's configuration: parsed once in `__main__`, frozen."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from twostep.checkpoint.model_name import name_of
from twostep.errors import SetupError
from twostep.model.loading.store import default_cache_dir
from twostep.settings.reading import read_settings
from twostep.settings.service import HASH_UNIT, ROUTER_LEASE_S, traces_endpoint
from twostep.settings.table import Rule
from twostep.settings.worker import DEFAULT_PORTS, WorkerSettings

ROLES = ("prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(WorkerSettings):
    """The settings, and what follows from them or never changes. Empty `worker_id`: role, host name and port. Empty `advertise_address`:
    host and port as others reach them. What is 0 or None is settled by the device (settle in worker/model.py).
    `other_step_tokens`: the step's budget once the worker has changed its role; 0: the same. `step_tokens_at_knee`: both were left to the
    machine, and steps that compute prompts beside others' tokens are no larger than pays (at_knee in worker/model.py)."""

    role: str
    other_step_tokens: int = 0
    step_tokens_at_knee: bool = False
    # Where known models are; None: ~/.cache/twostep.
    cache_dir: Path | None = None
    # Seconds of waiting that make a sequence one class more urgent: many times a prompt's own time, and well below any client's patience.
    ageing: float = 30.0
    # Calls and streams open at once. A router has one stream and a call for each request in flight, of which it allows fewer.
    max_concurrent_rpcs: int = 2048
    # Tokens of one prefix hash: prefixes are found only where every process of a deployment has the same.
    hash_unit: int = HASH_UNIT
    # Decode: sequences of a router without a stream for so long end. Routers wait as long for a broken stream (router/config.py).
    router_lease: float = ROUTER_LEASE_S
    # Not alive once work has seen no step for so long: ten times what the longest step with a compilation has taken.
    stall_timeout: float = 120.0
    # Of --runner fake without --model: enough for every byte and the special tokens.
    fake_vocab_size: int = 1000

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda worker: worker.runner == "model" and not worker.model,
            "--model is missing: give a model directory, ORG/NAME of the Hugging Face hub or a known name, or --runner fake",
        ),
        Rule(
            lambda worker: worker.kv_transfer == "none" and (worker.role == "prefill" or not worker.local_prefill),
            "{kv-transfer} is for decode workers with --local-prefill: nothing else can be done without handing KV over",
        ),
    )

    @property
    def model_name(self) -> str:
        """Returns the first name that clients ask for."""
        return self.served_model_name[0] if self.served_model_name else name_of(self.model) or "fake"

    @property
    def hands_over(self) -> bool:
        """Returns whether it gives KV to other workers."""
        return self.role == "prefill" or self.both_roles

    @property
    def serves_alone(self) -> bool:
        """Returns whether it takes prompts whose answers it decodes itself."""
        return self.local_prefill and (self.role == "decode" or self.both_roles)


def parse_config(role: str, argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> WorkerConfig:
    """Exits with a usage message if a flag does not make sense."""
    config = read_settings(
        WorkerConfig,
        argv,
        prog=f"python -P -m {role}_worker",
        description=f"Twostep {role} worker.",
        defaults={"role": role, "grpc_port": DEFAULT_PORTS[role], "otlp_endpoint": traces_endpoint()},
        environ=environ,
    )
    return replace(
        config,
        pod_owner=config.pod_owner or role,
        cache_dir=default_cache_dir(os.environ),
    )


def config_in_role(config: WorkerConfig, role: str) -> WorkerConfig:
    """Returns this worker's configuration in the other role, or in its own. Raises SetupError where it cannot take the role."""
    if role == config.role:
        return config
    if role == "prefill" and config.kv_transfer == "none":
        raise SetupError("a prefill worker hands its KV over, and this worker has --kv-transfer none; restart it with auto, say")
    budget = config.other_step_tokens or config.max_num_batched_tokens
    return replace(config, role=role, max_num_batched_tokens=budget, other_step_tokens=config.max_num_batched_tokens)


def reachable_address(config: WorkerConfig, port: int) -> str:
    """Returns host:port for others; `port`: the one it listens on."""
    host, _, given_port = config.advertise_address.rpartition(":")
    if host and given_port.isdecimal():
        return config.advertise_address
    host = config.advertise_address or config.host
    if host in ("0.0.0.0", "::"):
        try:
            host = socket.gethostbyname(socket.gethostname())
        except OSError as error:
            raise SetupError(f"--host {host} is no address that others can use; give --advertise-address") from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
