"""Keys that the deployment's secret stands behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.ticket import ProbePass, Ticket
from twostep.cluster.signed import RECORDS, Signer
from twostep.errors import SetupError, Unauthenticated
from twostep.keys.api_keys import admin_key, admin_keys, system_key, system_keys
from twostep.keys.secret import DeploymentSecret, in_common, is_vouched, load_secret, purpose_key, secret_check, vouch
from twostep.rpc.call_signing import CallGate, CallSigner
from twostep.rpc.worker_role import RolePass

SECRET = DeploymentSecret(b"deployment secret, long enough")


def test_keys_of_other_purposes_and_secrets_are_others() -> None:
    keys = {purpose_key(SECRET.own, "one.v1"), purpose_key(SECRET.own, "two.v1"), purpose_key(b"another secret", "one.v1")}
    assert sorted(map(len, keys)) == [32, 32, 32]


def test_what_running_deployments_have_derived_stays_as_it_is() -> None:
    """Keys that operators wrote down open their routers after an upgrade too."""
    assert system_key(SECRET) == "ts-system-ec3b4bbee060ca0b63b22552aab40721e593ddfa1d8f7097fb40b122a58f9b04"
    assert admin_key(SECRET) == "ts-admin-6a89f7cf8060d7a3e29f961a9efba828fedb93eb5af411ba74c9a7f10918a8ca"
    assert secret_check(SECRET) == "7884e6d247d400d3086c9a76e1ed6758"


# ---- while it changes: processes with the former, with both, and with the new one -------------------------------------------------

FORMER, NEW = DeploymentSecret(b"the former secret, long enough"), DeploymentSecret(b"the new secret, as long as that")
BOTH, OTHER = DeploymentSecret(NEW.own, FORMER.own), DeploymentSecret(b"of another deployment altogether")
STATES = (FORMER, BOTH, NEW, OTHER)


def _understood(signing: DeploymentSecret, reading: DeploymentSecret, text: str) -> list[bool]:
    """Returns for each thing that is signed whether the reader takes it."""
    life = {"worker_id": text, "epoch": 7}
    ticket = Ticket(**life, address="a:1", request_id="r", attempt=0, layout="l", expires_unix_ms=1 << 60).signed(signing)
    probe, role = ProbePass.issue(signing, **life), RolePass.issue(signing, **life, role="decode", drain_timeout_s=1.0)
    record, value = Signer(signing, RECORDS).sign_object('{"a":1}'), Signer(signing, RECORDS).sign_value(text, "place")
    answer = vouch(signing, b"challenge", **life, address="a:1")
    metadata = CallSigner(signing, "caller").sign(text, 7)

    def taken(check: Callable[[], object]) -> bool:
        try:
            return check() is not False
        except Unauthenticated:
            return False

    return [
        taken(lambda: ticket.verify(reading, **life, layout="l")),
        taken(lambda: probe.verify(reading, **life)),
        taken(lambda: role.verify(reading, **life)),
        taken(lambda: Signer(reading, RECORDS).read_object(record.encode())),
        taken(lambda: Signer(reading, RECORDS).read_value(value.encode(), "place")),
        taken(lambda: is_vouched(answer, reading, b"challenge", **life, address="a:1")),
        taken(lambda: CallGate(reading, lambda: (text, 7)).admit("/m", metadata)),
        taken(lambda: in_common(secret_check(signing), secret_check(reading))),
    ]


@given(st.sampled_from(STATES), st.sampled_from(STATES), st.text(st.characters(codec="utf-8"), min_size=1, max_size=20))
def test_whoever_has_a_secret_in_common_understands_the_other(signing: DeploymentSecret, reading: DeploymentSecret, text: str) -> None:
    common = not set(signing.accepted).isdisjoint(reading.accepted)
    assert set(_understood(signing, reading, text)) == {common}


@given(st.binary(max_size=200))
def test_what_nobody_signed_is_refused_whatever_it_looks_like(told: bytes) -> None:
    with pytest.raises(Unauthenticated):
        CallGate(BOTH, lambda: ("w", 7)).admit("/m", [(CallSigner(BOTH, "c").sign("w", 7)[0][0], told)])
    with pytest.raises(Unauthenticated):
        Signer(BOTH, RECORDS).read_value(b"text " + told)
    assert not BOTH.keys.is_signed(b"text", told)


def test_a_router_is_opened_by_either_secrets_keys() -> None:
    for of_one, of_all in ((system_key, system_keys), (admin_key, admin_keys)):
        assert of_all(BOTH) == (of_one(NEW), of_one(FORMER))
        assert of_all(NEW) == (of_one(NEW),)


def test_a_former_secret_is_read_from_a_file_of_its_own(tmp_path: Path) -> None:
    own, former = tmp_path / "own", tmp_path / "former"
    own.write_bytes(NEW.own + b"\n")
    former.write_bytes(FORMER.own)
    assert load_secret(own, former=former) == BOTH
    for wrong in (NEW.own, b"short"):
        former.write_bytes(wrong)
        with pytest.raises(SetupError):
            load_secret(own, former=former)
    assert "secret" not in repr(BOTH)
