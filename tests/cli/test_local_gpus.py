"""Dealing GPUs to the workers of one machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostep.local import gpus
from twostep.local.components import Components
from twostep.local.gpus import count_gpus, describe, share_gpus
from twostep.local.options import LocalOptions
from twostep.local.plan import make_plan
from twostep.local.probes import Probes


@given(st.integers(1, 20), st.integers(0, 9), st.integers(1, 4))
def test_every_worker_gets_its_gpus_and_no_gpu_is_given_away_twice_over(num_workers: int, num_gpus: int, per_worker: int) -> None:
    shares = share_gpus(num_workers, num_gpus, per_worker=per_worker)
    assert len(shares) == (num_workers if num_gpus else 0)
    taken, users = [0.0] * num_gpus, [0] * num_gpus
    for share in shares:
        places = {(share.index + i) % num_gpus for i in range(share.num_gpus)}
        assert len(places) == min(per_worker, num_gpus)
        for gpu in places:
            taken[gpu] += share.utilization
            users[gpu] += 1
    assert all(total <= gpus.DEFAULT_UTILIZATION + 1e-9 for total in taken)
    assert max(users, default=0) - min(users, default=0) <= 1
    if shares:
        assert max(share.num_sharing for share in shares) == max(users)


def test_a_share_that_was_asked_for_is_not_divided() -> None:
    assert [share.utilization for share in share_gpus(4, 2, utilization=0.4)] == [0.4] * 4


def test_the_plan_in_words() -> None:
    assert describe(["prefill-0", "decode-0"], share_gpus(2, 1)) == "prefill-0 on GPU 0 (0.45 of it), decode-0 on GPU 0 (0.45 of it)"
    assert describe(["prefill-0", "decode-0"], share_gpus(2, 8)) == "prefill-0 on GPU 0, decode-0 on GPU 1"
    assert describe(["decode-0"], share_gpus(1, 4, per_worker=2)) == "decode-0 on 2 GPUs from 0"


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 4), ("", 0), ("-1", 0), ("2", 1), ("0,3", 2), ("0,-1,2", 1), ("GPU-1a,GPU-2b", 2), ("0,1,2,3,4", 4)]
)
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int) -> None:
    monkeypatch.setattr(gpus, "_count_by_driver", lambda: 4)
    assert count_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [["auto:0", "0.45"], ["auto:1", "0.9"], ["auto:0", "0.45"]]),
        ({"device": "cuda", "gpu_memory_utilization": 0.3}, [["cuda:0", "0.3"], ["cuda:1", "0.3"], ["cuda:0", "0.3"]]),
        ({"device": "cpu", "kv_cache_dtype": "fp8"}, [["cpu"]] * 3),
        ({"device": "cuda:1"}, [["cuda:1"]] * 3),
        ({"runner": "fake"}, [[]] * 3),
    ],
)
def test_workers_are_started_on_their_gpus(
    monkeypatch: pytest.MonkeyPatch, tiny_llama_dir: Path, options: dict[str, object], expected: list[list[str]]
) -> None:
    monkeypatch.setattr(gpus, "_count_by_driver", lambda: 2)
    lines: list[str] = []
    chosen = LocalOptions(model=str(tiny_llama_dir), num_decode=2, port=0, redis_url="redis://r", ray_address="r:1", **options)  # type: ignore[arg-type]
    where = make_plan(chosen, environ={}, progress=lines.append)
    try:
        found = []
        for component in Components(chosen, where, environ={}, probes=Probes()).all()[-3:]:
            flags = dict(zip(component.argv, component.argv[1:], strict=False))
            assert flags.get("--kv-cache-dtype", "") == chosen.kv_cache_dtype
            found.append([flags[name] for name in ("--device", "--gpu-memory-utilization") if name in flags])
        assert found == expected
        assert bool(lines) == (where.workers[0].gpu is not None)
    finally:
        shutil.rmtree(where.run_dir)
