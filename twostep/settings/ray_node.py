"""Settings of Ray's nodes (kv_transfer/ray/node.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twostep.settings.readers import Whole, host_and_port
from twostep.settings.service import LogSettings
from twostep.settings.table import FileKind, setting

# Below this Ray refuses to start.
MIN_OBJECT_STORE_BYTES = 75 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNodeSettings(LogSettings):
    """Holds what a node may be told. `ray_address` is the GCS's: of a head, where it listens. `log_json` is not of Ray's own lines."""

    ray_head: bool = setting(False, "this node is the head: the GCS runs here")
    ray_address: str = setting(
        "127.0.0.1:6379", "host:port of the GCS; of a head only the port is used", host_and_port, metavar="HOST:PORT"
    )
    ray_node_ip: str = setting("", "address under which other nodes reach this one; what Ray finds if not given")
    ray_temp_dir: Path = setting(Path("/tmp/ray"), "for sockets: private and short", metavar="DIR", file=FileKind.FOLDER)
    ray_store_bytes: int = setting(
        MIN_OBJECT_STORE_BYTES,
        "shared memory for KV on its way; /dev/shm must be larger",
        Whole(MIN_OBJECT_STORE_BYTES, 1 << 50),
        metavar="BYTES",
    )
    ray_client_port: int = setting(10001, "of a head: Ray's client server, which Twostep does not use", Whole(0, 65535))
    ray_first_port: int = setting(0, "fixed ports from here on, see kv_transfer/ray/node.py; 0: any", Whole(1024, 65535, or_zero=True))
    ray_worker_ports: int = setting(40, "how many of them are for KV agents, two each", Whole(8, 65535))
    ray_redis_username: str = setting("", "of a head: for the Redis of RAY_REDIS_ADDRESS")
    ray_redis_password_file: Path | None = setting(
        None, "of a head: its first line is that Redis's password", metavar="FILE", file=FileKind.READ
    )
