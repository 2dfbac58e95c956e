"""The memory between two decisions: it goes through JSON without a trace, and what is not one is refused."""

from __future__ import annotations

import json

import pytest
from policy_fleet import Fleet, config, traffic

from twostep.autoscaler.memory import Memory
from twostep.errors import InvalidRequest


def busy() -> Fleet:
    fleet = Fleet.of(config(), 2, 2)
    fleet.run(traffic(20.0, ttft_met=0.5, tpot_met=1.0), 60.0)
    fleet.step(traffic(33.0))
    return fleet


def test_an_empty_memory_goes_through_json() -> None:
    assert Memory.from_json(Memory().to_json()) == Memory()


def test_a_full_memory_goes_through_json() -> None:
    memory = busy().memory
    assert memory.forecast is not None
    assert memory.wanted is not None
    assert memory.needs
    assert memory.switching
    assert Memory.from_json(memory.to_json()) == memory
    assert Memory.from_json(memory.to_json().encode()) == memory


def test_a_new_leader_decides_as_the_old_one_would_have() -> None:
    old, new = Fleet.of(config(), 3, 2), Fleet.of(config(), 3, 2, json=True)
    for rate in (30.0, 45.0, 80.0, 80.0, 20.0, 20.0, 5.0):
        assert old.run(traffic(rate), 90.0) == new.run(traffic(rate), 90.0)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"form":0}', '"x"', '{"form":1,"began_s":NaN}', "[" * 5000, b"\xff\xfe".decode("latin1")],
)
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="begin without one"):
        Memory.from_json(text)


def test_a_memory_with_a_damaged_part_is_refused() -> None:
    whole = json.loads(busy().memory.to_json())
    for name in whole:
        for damage in ("x", 7, [7], {"x": {"y": 1}}, 10**400):
            text = json.dumps({**whole, name: damage})
            try:
                Memory.from_json(text)
            except InvalidRequest:
                continue
            assert damage != 10**400
            assert name in ("at_s", "began_s", "busy_s", "unheard_s", "victims", "courses"), f"{name} = {damage!r} was taken"
