"""`twostep up --allowed-origins` and `--allowed-hosts` are the router's."""

from __future__ import annotations

from pathlib import Path

from test_local_aggregated import commands, told

from router.config import RouterConfig, parse_config


def router_of(*words: str, model: Path) -> RouterConfig:
    argv = commands(told("up", "--model", str(model), "--port", "0", *words))["router"]
    return parse_config(argv[argv.index("router") + 1 :])


def test_origins_reach_the_router(tiny_llama_dir: Path) -> None:
    given = router_of("--allowed-origins", "https://a.example,http://localhost:3000", model=tiny_llama_dir)
    assert given.allowed_origins == ("https://a.example", "http://localhost:3000")
    assert router_of(model=tiny_llama_dir).allowed_origins == ()


def test_names_reach_the_router(tiny_llama_dir: Path) -> None:
    assert router_of("--allowed-hosts", "a.example,b.example", model=tiny_llama_dir).allowed_hosts == ("a.example", "b.example")
    assert router_of(model=tiny_llama_dir).allowed_hosts == ()
