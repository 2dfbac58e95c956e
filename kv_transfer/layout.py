"""A KV pool's layout (twostep.cluster.records.LayoutRecord): its fingerprint and its protobuf form. Which two can be paired:
twostep.cluster.convertible."""

from __future__ import annotations

import dataclasses
import hashlib

from twostep.cluster.records import LayoutRecord
from twostep.rpc.v1 import kv_pb2


def fingerprint(layout: LayoutRecord) -> str:
    """32 hex digits; equal if and only if all fields are."""
    fields = ((f.name, getattr(layout, f.name)) for f in dataclasses.fields(layout))
    return hashlib.sha256(repr(tuple(fields)).encode()).hexdigest()[:32]


def layout_to_proto(layout: LayoutRecord) -> kv_pb2.KvLayout:
    return kv_pb2.KvLayout(**dataclasses.asdict(layout))


def layout_from_proto(message: kv_pb2.KvLayout) -> LayoutRecord:
    return LayoutRecord(**{f.name: getattr(message, f.name) for f in dataclasses.fields(LayoutRecord)})
