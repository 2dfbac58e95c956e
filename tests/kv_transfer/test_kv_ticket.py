"""Tickets, passes and layouts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.ticket import ProbePass, Ticket, fingerprint, layout_from_proto, layout_to_proto
from twostep.cluster.records import LayoutRecord
from twostep.errors import Incompatible, Unauthenticated, Unavailable
from twostep.keys.secret import DeploymentSecret
from twostep.rpc.v1 import kv_pb2

SECRET = DeploymentSecret(b"deployment secret")
LAYOUT = LayoutRecord(model_fingerprint="m", dtype="bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)

uint64, text = st.integers(0, 2**64 - 1), st.text(max_size=20)
tickets = st.builds(
    Ticket,
    worker_id=text,
    address=text,
    epoch=uint64,
    request_id=text,
    attempt=st.integers(0, 2**32 - 1),
    layout=text,
    expires_unix_ms=st.integers(0, 2**63 - 1),
    tenant=text,
)


@given(tickets, tickets, st.integers(0, 31), st.integers(1, 255))
def test_a_signature_survives_the_wire_and_fits_one_ticket_only(one: Ticket, other: Ticket, position: int, flip: int) -> None:
    signed = one.signed(SECRET)
    arrived = Ticket.from_proto(kv_pb2.Ticket.FromString(signed.to_proto().SerializeToString()))
    assert arrived == signed
    arrived.check_signature(SECRET)
    flipped = bytearray(signed.mac)
    flipped[position] ^= flip
    forged = [(arrived, DeploymentSecret(b"another secret")), (replace(arrived, mac=bytes(flipped)), SECRET)]
    forged += [(replace(other, mac=signed.mac), SECRET)] if one != other else []
    for ticket, secret in forged:
        with pytest.raises(Unauthenticated):
            ticket.check_signature(secret)


def ticket_of(**changes: Any) -> Ticket:
    base = Ticket(worker_id="w", address="h:1", epoch=7, request_id="r", attempt=1, layout=fingerprint(LAYOUT), expires_unix_ms=1000)
    return replace(base, **changes).signed(SECRET)


def verify(ticket: Ticket, now: int = 999) -> None:
    ticket.verify(SECRET, worker_id="w", epoch=7, layout=fingerprint(LAYOUT), now_unix_ms=now)


@pytest.mark.parametrize(
    ("ticket", "error"),
    [
        (replace(ticket_of(), attempt=2), Unauthenticated),
        (ticket_of(worker_id="x"), Incompatible),
        (ticket_of(epoch=6), Unavailable),
        (ticket_of(layout="other"), Incompatible),
        (ticket_of(expires_unix_ms=999), Unavailable),
        (replace(ticket_of(), tenant="x"), Unauthenticated),
        (replace(ticket_of(worker_id="ab", address="c"), worker_id="a", address="bc"), Unauthenticated),
    ],
)
def test_what_a_ticket_is_refused_for(ticket: Ticket, error: type[Exception]) -> None:
    verify(ticket_of())
    with pytest.raises(error):
        verify(ticket)


@given(text, uint64)
def test_a_pass_is_for_one_life_of_one_worker_and_ends(worker_id: str, epoch: int) -> None:
    issued = ProbePass.issue(SECRET, worker_id=worker_id, epoch=epoch)
    arrived = ProbePass.from_proto(kv_pb2.ProbeRequest.FromString(issued.to_proto().SerializeToString()))
    arrived.verify(SECRET, worker_id=worker_id, epoch=epoch)
    other = worker_id + "x"
    with pytest.raises(Unauthenticated):
        arrived.verify(DeploymentSecret(b"another secret"), worker_id=worker_id, epoch=epoch)
    for changed in (replace(arrived, worker_id=other), replace(arrived, expires_unix_ms=arrived.expires_unix_ms + 1)):
        with pytest.raises(Unauthenticated):
            changed.verify(SECRET, worker_id=changed.worker_id, epoch=epoch)
    for asked in ({"worker_id": worker_id, "epoch": epoch ^ 1}, {"worker_id": other, "epoch": epoch}):
        with pytest.raises(Unavailable):
            arrived.verify(SECRET, **asked)
    old = replace(arrived, expires_unix_ms=1)
    with pytest.raises(Unauthenticated):
        old.signed(SECRET).verify(SECRET, worker_id=worker_id, epoch=epoch)  # as one signed a minute ago


def test_a_ticket_is_no_pass_and_a_pass_no_ticket() -> None:
    """One secret signs both, over domains of their own."""
    issued = ProbePass.issue(SECRET, worker_id="w", epoch=7)
    with pytest.raises(Unauthenticated):
        verify(replace(ticket_of(), mac=issued.mac))
    with pytest.raises(Unauthenticated):
        replace(issued, mac=ticket_of().mac).verify(SECRET, worker_id="w", epoch=7)
    for kind, message in ((ProbePass, kv_pb2.ProbeRequest), (Ticket, kv_pb2.Ticket)):
        with pytest.raises(Unauthenticated):
            kind.from_proto(message(expires_unix_ms=-1))


def test_lease_ids_differ_by_life_and_attempt() -> None:
    changes: list[dict[str, Any]] = [{}, {"epoch": 8}, {"attempt": 2}, {"request_id": "s"}, {"worker_id": "x"}]
    assert len({ticket_of(**change).lease_id for change in changes}) == 5


def test_layout_survives_the_wire_and_every_field_is_in_its_fingerprint() -> None:
    assert layout_from_proto(layout_to_proto(LAYOUT)) == LAYOUT
    assert fingerprint(replace(LAYOUT)) == fingerprint(LAYOUT) == "cb4980d0f87a037547ef5c4ec6feb413", "as workers of 0.1 have it"
    for field in fields(LAYOUT):
        value = getattr(LAYOUT, field.name)
        other = replace(LAYOUT, **{field.name: value + "x" if isinstance(value, str) else value + 1})
        assert fingerprint(other) != fingerprint(LAYOUT)
