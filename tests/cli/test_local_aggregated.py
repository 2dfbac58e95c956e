"""`twostep up --aggregated`: what is started, and what makes no sense with it."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from twostep.cli._flags import parser
from twostep.cli._up import options_of
from twostep.errors import SetupError
from twostep.local.components import Components
from twostep.local.options import LocalOptions
from twostep.local.plan import make_plan
from twostep.local.probes import Probes


def told(*words: str) -> LocalOptions:
    args: argparse.Namespace = parser().parse_args(words)
    return options_of(args)


def commands(options: LocalOptions) -> dict[str, tuple[str, ...]]:
    """Command lines by component."""
    where = make_plan(options, environ={}, progress=lambda _: None)
    try:
        return {component.name: component.argv for component in Components(options, where, environ={}, probes=Probes()).all()}
    finally:
        shutil.rmtree(where.run_dir)


def flag(argv: tuple[str, ...], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


def test_workers_that_do_everything_and_no_ray(tiny_llama_dir: Path) -> None:
    started = commands(told("up", "--aggregated", "--decode", "2", "--model", str(tiny_llama_dir), "--port", "0"))
    assert set(started) == {"redis", "router", "decode-0", "decode-1"}
    for name in ("decode-0", "decode-1"):
        assert flag(started[name], "--kv-transfer") == "none"
        assert "--local-prefill" in started[name]
        assert flag(started[name], "--ray-address") is None


def test_with_prefill_workers_all_is_as_it_was(tiny_llama_dir: Path) -> None:
    started = commands(told("up", "--model", str(tiny_llama_dir), "--port", "0"))
    assert set(started) == {"redis", "ray", "router", "prefill-0", "decode-0"}
    assert flag(started["decode-0"], "--kv-transfer") == "auto"
    assert all("--local-prefill" in started[name] for name in ("decode-0", "prefill-0")), "either may change its role"
    apart = commands(told("up", "--no-local-prefill", "--prefill", "2", "--model", str(tiny_llama_dir), "--port", "0"))
    assert "--no-local-prefill" in apart["decode-0"]
    assert "prefill-1" in apart


def test_a_demo_shows_the_hand_over_unless_told_otherwise() -> None:
    assert not told("demo").local_prefill
    aggregated = told("demo", "--aggregated")
    assert (aggregated.local_prefill, aggregated.num_prefill, aggregated.num_decode) == (True, 0, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--aggregated", "--prefill", "1"), "--prefill 1"),
        (("--aggregated", "--decode", "0"), "--decode of 1 or more"),
        (("--aggregated", "--no-local-prefill"), "--no-local-prefill"),
        (("--aggregated", "--kv-transfer", "ray"), "--kv-transfer"),
        (("--aggregated", "--ray-address", "here:1"), "--ray-address"),
        (("--prefill", "0"), "or --aggregated"),
        (("--kv-transfer", "none"), "give --aggregated"),
    ],
)
def test_what_contradicts_itself_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        told("up", *words)


def test_the_cores_go_to_the_workers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for options in (told("up", "--aggregated", "--decode", "2"), told("up")):
        assert options.threads_of_each(options.num_workers) == 4
