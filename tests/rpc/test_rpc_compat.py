"""What a process says is understood by one of the minor version before it, and the other way round: protos, and records in Redis."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from proto_compat import breaks

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


# ---- the comparison itself sees every kind of break ------------------------------------------------------------------------


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="a.proto", package="a")
    message = file.message_type.add(name="M")
    message.oneof_decl.add(name="either")
    message.field.add(name="x", number=1, type=FieldDescriptorProto.TYPE_INT32, label=FieldDescriptorProto.LABEL_OPTIONAL)
    message.field.add(name="y", number=2, type=FieldDescriptorProto.TYPE_STRING, label=FieldDescriptorProto.LABEL_OPTIONAL, oneof_index=0)
    message.nested_type.add(name="Inner").field.add(
        name="z", number=1, type=FieldDescriptorProto.TYPE_BYTES, label=FieldDescriptorProto.LABEL_REPEATED
    )
    message.reserved_range.add(start=5, end=7)
    message.reserved_name.append("given_up")
    enum = message.enum_type.add(name="E")
    enum.value.add(name="ZERO", number=0)
    enum.value.add(name="ONE", number=1)
    service = file.service.add(name="S")
    service.method.add(name="Call", input_type=".a.M", output_type=".a.M", server_streaming=True)
    return file


def _of(file: FileDescriptorProto) -> FileDescriptorSet:
    return FileDescriptorSet(file=[file])


def _message(file: FileDescriptorProto) -> DescriptorProto:
    return file.message_type[0]


def _set(thing: Any, name: str, value: Any) -> None:
    setattr(thing, name, value)


def _take_5(file: FileDescriptorProto) -> None:
    _message(file).field.add(name="new", number=5, type=FieldDescriptorProto.TYPE_INT32, label=FieldDescriptorProto.LABEL_OPTIONAL)


def _take_name(file: FileDescriptorProto) -> None:
    _message(file).field.add(name="given_up", number=9, type=FieldDescriptorProto.TYPE_INT32, label=FieldDescriptorProto.LABEL_OPTIONAL)


BREAKS: list[tuple[str, Callable[[FileDescriptorProto], None]]] = [
    ("a.M.x is gone", lambda f: _message(f).field.__delitem__(0)),
    ("a.M.x has number 8, it had 1", lambda f: _set(_message(f).field[0], "number", 8)),
    ("a.M.x (1) is w now", lambda f: _set(_message(f).field[0], "name", "w")),
    ("a.M.x is int64, it was int32", lambda f: _set(_message(f).field[0], "type", FieldDescriptorProto.TYPE_INT64)),
    ("a.M.x is repeated, it was optional", lambda f: _set(_message(f).field[0], "label", FieldDescriptorProto.LABEL_REPEATED)),
    ("a.M.y is in oneof none, it was in either", lambda f: _message(f).field[1].ClearField("oneof_index")),
    ("message a.M.Inner is gone", lambda f: _message(f).nested_type.__delitem__(0)),
    ("message a.M is gone", lambda f: _set(_message(f), "name", "N")),
    ("number 5 of new was given up", _take_5),
    ("number 5 is not reserved any more", lambda f: _message(f).reserved_range.__delitem__(0)),
    ("a.M.given_up was given up before", _take_name),
    ("a.M.E.ONE is gone", lambda f: _message(f).enum_type[0].value.__delitem__(1)),
    ("a.M.E.ONE is 4, it was 1", lambda f: _set(_message(f).enum_type[0].value[1], "number", 4)),
    ("service a.S is gone", lambda f: f.service.__delitem__(0)),
    ("method a.S.Call is gone", lambda f: f.service[0].method.__delitem__(0)),
    ("method a.S.Call takes .a.N", lambda f: _set(f.service[0].method[0], "input_type", ".a.N")),
    ("method a.S.Call streams otherwise", lambda f: _set(f.service[0].method[0], "server_streaming", False)),
]


@pytest.mark.parametrize(("said", "change"), BREAKS, ids=[said for said, _ in BREAKS])
def test_a_break_is_seen(said: str, change: Callable[[FileDescriptorProto], None]) -> None:
    new = _file()
    change(new)
    assert any(said in each for each in breaks(_of(_file()), _of(new))), breaks(_of(_file()), _of(new))


def test_what_is_added_breaks_nothing() -> None:
    new = _file()
    _message(new).field.add(name="more", number=3, type=FieldDescriptorProto.TYPE_INT32, label=FieldDescriptorProto.LABEL_OPTIONAL)
    _message(new).enum_type[0].value.add(name="TWO", number=2)
    new.service[0].method.add(name="Other", input_type=".a.M", output_type=".a.M")
    new.message_type.add(name="New")
    assert breaks(_of(_file()), _of(new)) == []


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
    assert today["layout"].keys() == before["layout"].keys() == set(LayoutRecord.__dataclass_fields__)
    for name in ("layout", "load", "curve", None):
        was, now = (before, today) if name is None else (before[name], today[name])
        for key, value in (was or {}).items():
            assert key in now, (name, key)
            assert type(now[key]) is type(value), (name, key)


def test_a_record_of_tomorrow_is_read_today() -> None:
    raw = json.loads(SAMPLES[0].read_text()) | {"version": "0.2.0", "colour": "blue", "later": {"deep": [1]}}
    raw["load"]["num_dreams"] = 3
    record = WorkerRecord.from_json(json.dumps(raw))
    assert (record.version, record.worker_id) == ("0.2.0", raw["worker_id"])


def test_a_record_tells_the_version_of_its_process() -> None:
    assert minor_of(WorkerRecord.from_json(SAMPLES[0].read_text()).version) == Minor(0, 1)
