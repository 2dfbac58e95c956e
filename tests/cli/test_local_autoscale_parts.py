"""`twostep up --autoscale`, its pure parts: room on a machine, what to start and retire, what makes no sense."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_plans import planned, told

from twostep.cli._up import admin_url, to_come
from twostep.local.autoscale import ROLES, Bounds, Changes, RunningWorker, Scale, changes
from twostep.local.machine import memory_of, room_for
from twostep.process.free_memory import Free

GIB = 1 << 30

# ---- room ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("each_gib", "memory_gib", "cores", "gpus", "room"),
    [
        (3, 60, 16, None, (16, "cores")),
        (20, 60, 16, None, (3, "memory")),
        (3, 60, 2, 2, (2, "GPUs")),
        (3, 9, 2, 8, (3, "memory")),
        (1, 0, 1, None, (1, "memory")),
    ],
)
def test_room(each_gib: int, memory_gib: int, cores: int, gpus: int | None, room: tuple[int, str]) -> None:
    found = room_for(each_gib * GIB, memory_bytes=memory_gib * GIB, cores=cores, gpus=gpus)
    assert (found.num_workers, found.limit) == room


def test_what_a_worker_needs() -> None:
    need = memory_of(5000, fake=False, on_gpu=False, kv_cache_bytes=2 * GIB)
    assert need == 3 * GIB + 5000
    assert memory_of(5000, fake=True, on_gpu=False, kv_cache_bytes=0) < need


# ---- what to do ----------------------------------------------------------------------------------------------------------


def scale(total: int = 8, *, most: int = 4) -> Scale:
    return Scale(prefill=Bounds(least=1, most=most), decode=Bounds(least=1, most=most), total=total)


def fleet(num_prefill: int, num_decode: int, retiring: tuple[str, ...] = ()) -> list[RunningWorker]:
    names = [f"prefill-{n}" for n in range(num_prefill)] + [f"decode-{n}" for n in range(num_decode)]
    return [RunningWorker(worker_id=n, owner=n.partition("-")[0], number=i, retiring=n in retiring) for i, n in enumerate(names)]


def test_victims_go_first_then_the_youngest() -> None:
    wanted = {"prefill": 1, "decode": 1}
    assert changes(fleet(1, 4), wanted, ("decode-0", "prefill-0"), scale()).retire == ("decode-0", "decode-3", "decode-2")
    assert changes(fleet(1, 4, ("decode-3", "decode-2")), wanted, (), scale()).retire == ("decode-1",)
    assert changes(fleet(1, 2, ("decode-1",)), wanted, ("decode-0",), scale()) == Changes()


def test_a_place_is_free_when_whoever_had_it_is_gone() -> None:
    wanted = {"prefill": 1, "decode": 3}
    assert changes(fleet(2, 2), wanted, (), scale(4)) == Changes(retire=("prefill-1",))
    assert changes(fleet(2, 2, ("prefill-1",)), wanted, (), scale(4)) == Changes()
    assert changes(fleet(1, 2), wanted, (), scale(4)) == Changes(start=("decode",))


def test_where_there_is_not_room_for_all_both_roles_get_some() -> None:
    assert changes(fleet(1, 1), {"prefill": 3, "decode": 3}, (), scale(4)).start == ("prefill", "decode")
    assert changes(fleet(2, 1), {"prefill": 3, "decode": 3}, (), scale(4)).start == ("decode",)


@given(
    owners=st.lists(st.tuples(st.sampled_from(ROLES), st.booleans()), max_size=10),
    wanted=st.fixed_dictionaries({role: st.integers(0, 20) for role in ROLES}),
    more=st.integers(0, 5),
    most=st.integers(1, 6),
    data=st.data(),
)
def test_bounds_hold_whatever_is_asked(
    owners: list[tuple[str, bool]], wanted: dict[str, int], more: int, most: int, data: st.DataObject
) -> None:
    """And look after look it comes to what is wanted, or to as many as there may be."""
    there = [RunningWorker(worker_id=f"w{n}", owner=role, number=n, retiring=gone) for n, (role, gone) in enumerate(owners)]
    victims = data.draw(st.permutations([worker.worker_id for worker in there]))
    bounds = scale(len(owners) + more, most=most)
    target = {role: bounds.of(role).clamp(wanted[role]) for role in ROLES}
    numbers = itertools.count(100)
    for _ in range(4):
        todo = changes(there, wanted, victims, bounds)
        assert len(there) + len(todo.start) <= bounds.total
        for role in ROLES:
            staying = {w.worker_id for w in there if w.owner == role and not w.retiring}
            leaving, coming = staying & set(todo.retire), todo.start.count(role)
            assert len(staying - leaving) == min(len(staying), target[role])
            assert not coming or len(staying) + coming <= target[role]
        assert set(todo.retire) <= {w.worker_id for w in there if not w.retiring}
        # By the next look, who drains is gone.
        there = [w for w in there if not w.retiring and w.worker_id not in todo.retire]
        there += [RunningWorker(worker_id=f"n{n}", owner=role, number=n) for role, n in zip(todo.start, numbers, strict=False)]
    counts = {role: sum(w.owner == role for w in there) for role in ROLES}
    assert counts == target or sum(counts.values()) == bounds.total


# ---- flags ---------------------------------------------------------------------------------------------------------------


def test_the_autoscaler_is_started_with_the_bounds_of_the_machine(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.local.plan.num_cores", lambda: 8)
    monkeypatch.setattr("twostep.local.plan.free_memory", lambda **_: Free(100 * GIB, "this machine"))
    common = ("--autoscale", "--model", str(tiny_llama_dir), "--device", "cpu", "--port", "0", "--decode-min-workers", "2", "--decode", "2")
    found = planned(told("up", *common, "--prefill-max-workers", "3"))
    plan, said = found.plan, found.said
    assert plan.scale == Scale(prefill=Bounds(least=1, most=3), decode=Bounds(least=2, most=7), total=8)
    assert said == ["autoscaler: 1 to 3 prefill, 2 to 7 decode workers, 8 together at most for want of cores"]
    assert found.components["autoscaler"].argv[1:4] == ("-P", "-m", "twostep.autoscaler")
    bounds = [found.flag("autoscaler", f"--{role}-{least}-workers") for role in ROLES for least in ("min", "max")]
    assert bounds == ["1", "3", "2", "7"]
    assert (found.flag("autoscaler", "--max-workers"), found.flag("autoscaler", "--max-cost")) == ("8", None)
    assert {name for name in found.components if name.startswith(("prefill", "decode"))} == {"prefill-0", "decode-0", "decode-1"}
    assert (found.flag("decode-1", "--pod-owner"), found.flag("prefill-0", "--pod-owner")) == ("decode", "prefill")
    # A machine that has less than is to be started at once is not believed.
    monkeypatch.setattr("twostep.local.plan.num_cores", lambda: 1)
    found = planned(told("up", *common))
    plan, said = found.plan, found.said
    assert plan.scale == Scale(prefill=Bounds(least=1, most=1), decode=Bounds(least=2, most=2), total=3)
    assert said[-1] == "autoscaler: the 3 workers that start are all that there is room for: none will be added"


@pytest.mark.parametrize(
    ("total", "num_workers", "said"),
    [
        (8, 3, "More or fewer of them as the load asks for it."),
        (8, 2, "More of them as the load asks for it."),
        (3, 3, "Fewer of them, or in other roles, as the load asks for it; for more of them there is no room."),
        (2, 2, "They stay as they are: there is no room for more of them, and no role may have fewer."),
    ],
)
def test_no_more_is_promised_than_there_is_room_for(total: int, num_workers: int, said: str) -> None:
    bounds = Bounds(least=1, most=7)
    assert to_come(Scale(prefill=bounds, decode=bounds, total=total), num_workers) == said


@pytest.mark.parametrize(
    ("port", "host", "url"),
    [
        (None, "", ""),
        ("-1", "", ""),
        ("0", "", ""),
        ("8001", "", "http://127.0.0.1:8001"),
        ("8001", "0.0.0.0", "http://127.0.0.1:8001"),
        ("8001", "::1", "http://[::1]:8001"),
        ("8001", "ops.internal", "http://ops.internal:8001"),
    ],
)
def test_the_admin_ports_address(port: str | None, host: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTEP_ADMIN_HOST", host)
    assert admin_url(told("up", *([f"--admin-port={port}"] if port is not None else []))) == url


def test_without_the_flag_nothing_scales(tiny_llama_dir: Path) -> None:
    found = planned(told("up", "--model", str(tiny_llama_dir), "--port", "0", "--decode-max-workers", "7"))
    assert found.plan.scale is None
    assert "autoscaler" not in found.components
    assert found.flag("decode-0", "--pod-owner") is None


def test_each_place_has_its_gpu(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostep.local.plan.count_gpus", lambda _: 4)
    plan = planned(told("up", "--autoscale", "--model", str(tiny_llama_dir), "--port", "0")).plan
    assert plan.scale == Scale(prefill=Bounds(least=1, most=3), decode=Bounds(least=1, most=3), total=4)
    assert [place and place.index for place in plan.places] == [0, 1, 2, 3]
    assert [worker.gpu for worker in plan.workers] == list(plan.places[:2])
