"""Flags of `twostep keys`."""

from __future__ import annotations

import argparse
from pathlib import Path

from twostep.settings.reading import FlagParser

LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_concurrent")
_HELP = {
    "requests_per_minute": "calls that it may make",
    "tokens_per_minute": "tokens of prompts and answers",
    "tokens_per_day": "the same, in any 24 hours",
    "max_concurrent": "calls under way at once, on one router",
}


def add_flags(command: FlagParser) -> None:
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=FlagParser)
    create = actions.add_parser("create", help="make one: it is printed this once", description="Makes an API key, and prints it.")
    _fields(create)
    change = actions.add_parser("change", help="other limits, another tenant, disabled", description="Changes what is given.")
    change.add_argument("id", metavar="ID", help="as `twostep keys list` shows it")
    _fields(change)
    change.add_argument("--disabled", action=argparse.BooleanOptionalAction, default=None, help="it is refused until it is enabled again")
    listing = actions.add_parser("list", help="those that there are", description="Lists the API keys; none of them can be read from it.")
    revoke = actions.add_parser("revoke", help="it is refused from now on", description="Takes an API key away, for good.")
    revoke.add_argument("id", metavar="ID", help="as `twostep keys list` shows it")
    for action in (create, change, listing, revoke):
        _where(action)
        action.add_argument("--json", action="store_true", help="JSON instead of words")


def _fields(command: FlagParser) -> None:
    """Left out: as it is, or none."""
    command.add_argument("--name", default=None, metavar="TEXT", help="whose it is, for those who read the list")
    command.add_argument("--tenant", default=None, metavar="NAME", help="whose cached prefixes and share it uses; its own if not given")
    command.add_argument(
        "--most-urgent", default=None, choices=["interactive", "standard", "batch"], help="the class that its requests may have at best"
    )
    for name in LIMITS:
        command.add_argument(f"--{name.replace('_', '-')}", type=int, default=None, metavar="N", help=f"{_HELP[name]}; 0: no limit")
    command.add_argument("--expires", default=None, metavar="TIME", help="like 2027-01-31T12:00:00Z; empty: never")
    command.add_argument(
        "--speaks-for-tenants",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="of a gateway: it may say whose its requests are, by the header x-twostep-tenant",
    )


def _where(command: FlagParser) -> None:
    command.flag("--api-keys-file", type=Path, default=None, metavar="FILE", help="the routers' file of keys")
    command.flag("--admin", default="", metavar="URL", help="a router's --admin-port, like http://127.0.0.1:8001: wherever its keys are")
    command.flag("--secret-file", type=Path, default=None, metavar="FILE", help="the deployment's secret, which opens the admin port")
    command.flag("--admin-key-file", type=Path, default=None, metavar="FILE", help="the admin port's own key, if it has one")
    command.flag("--tls-ca", type=Path, default=None, metavar="PEM", help="authority to check the admin port by")
    command.flag("--tls-cert", type=Path, default=None, metavar="PEM", help="own certificate, if the admin port asks for one")
    command.flag("--tls-key", type=Path, default=None, metavar="PEM", help="key of --tls-cert")
