"""What two KV pools must agree on: fingerprint and comparison of twostep.cluster.records.LayoutRecord, and its protobuf form."""

from __future__ import annotations

import dataclasses
import hashlib

from twostep.cluster.convertible import check_convertible
from twostep.cluster.records import LayoutRecord
from twostep.errors import Incompatible
from twostep.rpc.v1 import kv_pb2


def fingerprint(layout: LayoutRecord) -> str:
    """32 hex digits; equal if and only if all fields are."""
    fields = ((f.name, getattr(layout, f.name)) for f in dataclasses.fields(layout))
    return hashlib.sha256(repr(tuple(fields)).encode()).hexdigest()[:32]


def check_compatible(ours: LayoutRecord, theirs: LayoutRecord, *, convert: bool = False) -> None:
    """Raises Incompatible naming every field that differs. `convert`: the caller converts `theirs` to `ours` (kv_transfer.convert), so
    that only what cannot be converted is refused."""
    if ours == theirs:
        return
    if convert:
        check_convertible(theirs, ours)
        return
    names = [f.name for f in dataclasses.fields(LayoutRecord)]
    differing = [f"{n} ({getattr(ours, n)!r} here, {getattr(theirs, n)!r} there)" for n in names if getattr(ours, n) != getattr(theirs, n)]
    raise Incompatible(f"KV layouts differ in {', '.join(differing)}; start both workers with the same model, dtype and --block-size")


def layout_to_proto(layout: LayoutRecord) -> kv_pb2.KvLayout:
    return kv_pb2.KvLayout(**dataclasses.asdict(layout))


def layout_from_proto(message: kv_pb2.KvLayout) -> LayoutRecord:
    return LayoutRecord(**{f.name: getattr(message, f.name) for f in dataclasses.fields(LayoutRecord)})
