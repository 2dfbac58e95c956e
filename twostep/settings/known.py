"""All names that Twostep reads from its environment: a variable that is none of them was mistyped."""

from __future__ import annotations

import functools

from twostep.settings.autoscaler import AutoscalerSettings
from twostep.settings.pod import PodSettings
from twostep.settings.ray_node import RayNodeSettings
from twostep.settings.router import RouterSettings
from twostep.settings.table import Settings, settings_of, variable_of
from twostep.settings.up import UpSettings
from twostep.settings.worker import WorkerSettings

# What starts each process, and its table.
TABLES: dict[str, type[Settings]] = {
    "twostep up": UpSettings,
    "python -P -m router": RouterSettings,
    "python -P -m prefill_worker, decode_worker": WorkerSettings,
    "python -P -m twostep.autoscaler": AutoscalerSettings,
    "python -P -m twostep.local.pod": PodSettings,
    "python -P -m kv_transfer.ray.node": RayNodeSettings,
}
# Flags of the `twostep` command that are no settings of a process, and have variables.
COMMANDS = ("admin", "api-key", "request-class", "target", "tenant")


@functools.cache
def known_variables() -> frozenset[str]:
    """Returns the variables that some process or command reads."""
    names = {each.variable for table in TABLES.values() for each in settings_of(table)}
    return frozenset(names | {variable_of(name) for name in (*COMMANDS, "config")})
