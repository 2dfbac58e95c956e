"""Says who may do what where a router asks nobody for a key: an open door should be somebody's choice, not a default nobody saw."""

from __future__ import annotations

import ipaddress

LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost", "localhost.localdomain"})


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None: it is a name."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Returns whether nobody outside this machine reaches what listens there. A name that may stand for any address counts as reached."""
    address = address_of(host)
    return host.lower() in LOOPBACK_NAMES or (address is not None and address.is_loopback)


def open_door(host: str, ports: dict[str, int], *, asks_for_keys: bool, asks_for_certificates: bool) -> str:
    """Returns the warning for the operator who starts a router that others can use without a key or certificate; empty if they cannot.
    `ports`: by the name of what listens there; 0 or less: nothing does."""
    if asks_for_keys or asks_for_certificates or is_loopback(host):
        return ""
    where = ", ".join(f"{name} {_shown(host)}:{port}" for name, port in ports.items() if port > 0)
    return (
        f"OPEN TO EVERYBODY: {where}: no API key is asked for. Whoever reaches this address may use the model without any limit, "
        "read, add and delete the files and batches of all who have no key either, and see the status page. Give --api-keys-file FILE "
        "(`twostep keys create --api-keys-file FILE` makes the first one), listen on --host 127.0.0.1, or let a firewall or NetworkPolicy "
        "say who gets here"
    )


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host or "0.0.0.0"
