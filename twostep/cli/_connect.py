"""A client from the connection flags."""

from __future__ import annotations

import argparse
import sys
import warnings

from twostep.client import Client


def client_of(args: argparse.Namespace, target: str = "") -> Client:
    """`target`: instead of all that were given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = Client(
            target or targets_of(args.target),
            api_key=args.api_key,
            timeout=args.timeout,
            compression=args.grpc_compression,
            tls_ca=args.tls_ca,
            tls_cert=args.tls_cert,
            tls_key=args.tls_key,
        )
    for warning in caught:
        print(f"twostep: {warning.message}", file=sys.stderr)
    return client


def targets_of(text: str) -> list[str]:
    """A list of routers; gRPC's own notations have commas of their own."""
    if text.startswith(("dns:", "ipv4:", "ipv6:", "unix:", "xds:")):
        return [text]
    return [target.strip() for target in text.split(",")]
