"""Keys that the deployment's secret stands behind."""

from __future__ import annotations

from twostep.keys.api_keys import admin_key, system_key
from twostep.keys.secret import purpose_key
from twostep.prefix import secret_check

SECRET = b"deployment secret, long enough"


def test_keys_of_other_purposes_and_secrets_are_others() -> None:
    keys = {purpose_key(SECRET, "one.v1"), purpose_key(SECRET, "two.v1"), purpose_key(b"another secret", "one.v1")}
    assert sorted(map(len, keys)) == [32, 32, 32]


def test_what_running_deployments_have_derived_stays_as_it_is() -> None:
    """Keys that operators wrote down open their routers after an upgrade too."""
    assert system_key(SECRET) == "ts-system-ec3b4bbee060ca0b63b22552aab40721e593ddfa1d8f7097fb40b122a58f9b04"
    assert admin_key(SECRET) == "ts-admin-6a89f7cf8060d7a3e29f961a9efba828fedb93eb5af411ba74c9a7f10918a8ca"
    assert secret_check(SECRET) == "7884e6d247d400d3086c9a76e1ed6758"
