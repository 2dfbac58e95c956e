"""The last worker of a role is not sent away by mistake."""

from __future__ import annotations

import pytest
from placement_simulation import worker_record

from router.status.status import what_ends
from twostep.cluster.records import WorkerRecord


def fleet(words: str) -> list[WorkerRecord]:
    """`p0 d0+ d1- d2!`: + computes prompts too, - drains, ! no KV reaches."""
    return [
        worker_record(
            word.rstrip("+-!"),
            local_prefill="+" in word,
            draining="-" in word,
            not_ready_reason="no KV transport works" if "!" in word else "",
        )
        for word in words.split()
    ]


@pytest.mark.parametrize(
    ("words", "worker_id", "role", "ends"),
    [
        ("p0 p1 d0", "p0", "decode", False),
        ("p0 d0", "p0", "decode", True),
        ("p0 d0+", "p0", "decode", False),
        ("p0 p1- d0", "p0", "decode", True),
        ("p0 p1! d0", "p0", "decode", True),
        ("p0 p1! d0", "p1", "decode", False),
        ("p0 d0+ d1+", "d0", "prefill", False),
        ("p0 d0+ d1-", "d0", "prefill", True),
        ("p0 d0+", "d0", "prefill", True),
        ("p0 d0", "d0", "decode", False),
        ("p0 d0", "d9", "prefill", False),
    ],
)
def test_what_ends(words: str, worker_id: str, role: str, ends: bool) -> None:
    said = what_ends(fleet(words), worker_id, role)
    assert bool(said) is ends
    assert not said or said.startswith(f"{worker_id} is the last")
