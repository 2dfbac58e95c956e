"""A client from the connection flags."""

from __future__ import annotations

import argparse

from twostep.client import Client


def client_of(args: argparse.Namespace) -> Client:
    return Client(args.target, timeout=args.timeout, tls_ca=args.tls_ca, tls_cert=args.tls_cert, tls_key=args.tls_key)
