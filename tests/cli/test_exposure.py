"""A router that lets everybody in says so."""

from __future__ import annotations

import pytest

from twostep.keys.exposure import is_loopback, open_door

PORTS = {"gRPC": 50051, "HTTP": 8000}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_nobody_is_told_of_a_loopback_address(host: str) -> None:
    assert is_loopback(host)
    assert not open_door(host, PORTS, asks_for_keys=False, asks_for_certificates=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.7", "gpu-7.example", "2001:db8::1"])
def test_an_address_that_others_reach_is_named_with_what_they_may_do_and_the_flag(host: str) -> None:
    said = open_door(host, PORTS | {"admin": -1}, asks_for_keys=False, asks_for_certificates=False)
    assert f"{host.join('[]') if ':' in host else host or '0.0.0.0'}:8000" in said
    for word in ("50051", "files", "--api-keys-file", "--host"):
        assert word in said
    assert "admin" not in said


@pytest.mark.parametrize("guard", ["asks_for_keys", "asks_for_certificates"])
def test_keys_and_certificates_are_enough(guard: str) -> None:
    assert not open_door("0.0.0.0", PORTS, **({"asks_for_keys": False, "asks_for_certificates": False} | {guard: True}))
