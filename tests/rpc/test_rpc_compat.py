"""A process and one of the minor version before it understand each other: protos, and records in Redis."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from proto_compat import breaks

from kv_transfer.ticket import layout_from_proto, layout_to_proto
from twostep import __version__
from twostep.cluster.records import LayoutRecord, WorkerRecord
from twostep.version_skew import UNSAID, Minor, minor_of

SNAPSHOTS = Path(__file__).parent / "snapshots"
MODULES = [f"twostep.rpc.v1.{path.stem}_pb2" for path in (Path(__file__).parents[2] / "protos/twostep/rpc/v1").glob("*.proto")]


def known(files: list[Path]) -> list[Path]:
    """Those of versions that may serve together with this one."""
    ours = minor_of(__version__)
    assert ours is not None
    near = []
    for path in files:
        theirs = minor_of(path.stem)
        assert theirs is not None, path
        if theirs.major == ours.major and ours.minor - 1 <= theirs.minor <= ours.minor:
            near.append(path)
    return near


def snapshot(path: Path) -> FileDescriptorSet:
    return FileDescriptorSet.FromString(path.read_bytes())


def current() -> FileDescriptorSet:
    files = FileDescriptorSet()
    for name in MODULES:
        importlib.import_module(name).DESCRIPTOR.CopyToProto(files.file.add())
    return files


RELEASED = known(sorted(SNAPSHOTS.glob("*.binpb")))


def test_there_is_something_to_compare_with() -> None:
    assert RELEASED, "scripts/proto-snapshot keeps the protos of a released minor; the one before this version is missing"


@pytest.mark.parametrize("path", RELEASED, ids=lambda path: path.stem)
def test_protos_are_understood_by_the_version_before(path: Path) -> None:
    old = snapshot(path)
    assert len(old.file) >= 6
    assert breaks(old, current()) == []


DAMAGES: dict[str, Callable[[Any], None]] = {
    "number": lambda message: setattr(message.field[0], "number", 999),
    "name": lambda message: setattr(message.field[0], "name", "other"),
    "type": lambda message: setattr(message.field[0], "type", FieldDescriptorProto.TYPE_SFIXED64),
    "label": lambda message: setattr(message.field[0], "label", FieldDescriptorProto.LABEL_REPEATED),
    "gone": lambda message: message.field.__delitem__(0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_break_is_seen_and_an_addition_is_none(damage: str) -> None:
    new = current()
    new.file[0].message_type.add(name="New")
    message = next(each for file in new.file for each in file.message_type if each.name == "GenerateRequest")
    message.field.add(name="more", number=998, type=FieldDescriptorProto.TYPE_INT32, label=FieldDescriptorProto.LABEL_OPTIONAL)
    assert breaks(current(), new) == []
    DAMAGES[damage](message)
    assert breaks(current(), new)


# ---- records ---------------------------------------------------------------------------------------------------------------

SAMPLES = sorted(SNAPSHOTS.glob("worker-record-*.json"))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_records_of_the_version_before_are_read(path: Path) -> None:
    raw = json.loads(path.read_text())
    record = WorkerRecord.from_json(path.read_text())
    again = json.loads(record.to_json())
    for key, value in raw.items():
        if not isinstance(value, dict):
            assert again[key] == value, key
        else:
            assert value.items() <= again[key].items(), key
    assert record.version == raw.get("version", UNSAID)
    assert record.not_ready_reason == ""


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_the_version_before_reads_records_of_today(path: Path) -> None:
    """It leaves out what it does not know, but of the layout, where it must know all; and what it knows must be there, of the same kind."""
    before = json.loads(path.read_text())
    today = json.loads(WorkerRecord.from_json(path.read_text()).to_json())
    since = {"num_planes", "num_state_blocks", "state_layout", "num_groups", "num_windowed", "reach"}
    assert today["layout"].keys() == before["layout"].keys() == set(LayoutRecord.__dataclass_fields__) - since
    for name in ("layout", "load", "curve", None):
        was, now = (before, today) if name is None else (before[name], today[name])
        for key, value in (was or {}).items():
            assert key in now, (name, key)
            assert type(now[key]) is type(value), (name, key)


def test_a_layout_that_the_version_before_would_misread_says_so() -> None:
    raw = json.loads(SAMPLES[0].read_text())
    record = WorkerRecord.from_json(json.dumps(raw | {"layout": raw["layout"] | {"num_planes": 1}}))
    assert record.layout.num_planes == json.loads(record.to_json())["layout"]["num_planes"] == 1
    assert layout_to_proto(replace(record.layout, num_planes=2)).num_planes == 0
    assert layout_from_proto(layout_to_proto(record.layout)) == record.layout


def test_a_record_of_tomorrow_is_read_today() -> None:
    raw = json.loads(SAMPLES[0].read_text()) | {"version": "0.2.0", "colour": "blue", "later": {"deep": [1]}}
    raw["load"]["num_dreams"] = 3
    record = WorkerRecord.from_json(json.dumps(raw))
    assert (record.version, record.worker_id) == ("0.2.0", raw["worker_id"])


def test_a_record_tells_the_version_of_its_process() -> None:
    assert minor_of(WorkerRecord.from_json(SAMPLES[0].read_text()).version) == Minor(0, 1)
