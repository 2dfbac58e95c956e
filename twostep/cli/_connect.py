"""A client from the connection flags."""

from __future__ import annotations

import argparse

from twostep.client import Client


def client_of(args: argparse.Namespace) -> Client:
    return Client(
        _targets(args.target),
        timeout=args.timeout,
        compression=args.grpc_compression,
        tls_ca=args.tls_ca,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
    )


def _targets(text: str) -> list[str]:
    """A list of routers; gRPC's own notations have commas of their own."""
    if text.startswith(("dns:", "ipv4:", "ipv6:", "unix:", "xds:")):
        return [text]
    return [target.strip() for target in text.split(",")]
