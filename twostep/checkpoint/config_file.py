"""config.json, which may call an architecture by a name of its own: --architecture says which one it is. Torch-free: routers, workers and
plans read the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twostep.checkpoint.directory import read_json


def read_config(model_dir: Path, architecture: str = "") -> dict[str, Any]:
    """Returns config.json with `architecture` in place of what it says itself; empty: as it is. Raises SetupError, naming the file."""
    config = read_json(model_dir / "config.json")
    if not architecture:
        return config
    return {key: value for key, value in config.items() if key != "model_type"} | {"architectures": [architecture]}
