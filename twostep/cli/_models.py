"""`twostep models`: what is served; `twostep models fetch`: a model of the hub, or a known one, into its cache; `twostep models DIR|NAME`:
what a model holds."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from twostep.checkpoint.architectures import take_architecture
from twostep.checkpoint.config_file import read_config
from twostep.checkpoint.description import FormatShare, describe
from twostep.checkpoint.fields import Fields
from twostep.cli._connect import client_of
from twostep.cli._extras import require_worker_extra
from twostep.errors import SetupError


def run(args: argparse.Namespace) -> int:
    if args.action == "fetch":
        print(_resolve(args.name, args.model_revision))
        return 0
    if args.action != "list":
        return _describe(args.action, args.model_revision, args.architecture, as_json=args.json)
    with client_of(args) as client:
        models = client.models()
    if args.json:
        print(json.dumps([dataclasses.asdict(model) for model in models]))
        return 0
    if not models:
        print("no model is served yet: no worker has registered", file=sys.stderr)
        return 1
    width = max(len("model"), *(len(model.name) for model in models))
    print(f"{'model':<{width}}  context  prefill  decode")
    for model in models:
        print(f"{model.name:<{width}}  {model.max_model_len:>7}  {model.prefill_workers:>7}  {model.decode_workers:>6}")
    return 0


def _describe(name: str, revision: str, architecture: str, *, as_json: bool) -> int:
    model_dir = _resolve(name, revision)
    found, refused = describe(model_dir, architecture=architecture), _refusal(model_dir, architecture)
    if as_json:
        print(json.dumps(dataclasses.asdict(found) | {"refused": refused}))
        return 1 if refused else 0
    print(f"{found.architecture}, {found.num_weights / 1e6:,.1f} M weights, {found.dtype}, {found.method or 'not quantized'}")
    if (experts := found.experts) is not None:
        print(f"   a token goes to {experts.top_k} of {experts.num_experts} experts: {found.token_weights / 1e6:,.1f} M weights")
    for share in found.formats:
        print(f"{share.num_layers:>6} layers  {_megabytes(share.num_bytes)}  {share.format}")
    if found.formats:
        print(f"   unquantized  {', '.join(found.unquantized)}")
    if found.kv is not None:
        print(f"            KV  {found.kv} (--kv-cache-dtype exact: as --dtype)")
    print(f"      in files  {_megabytes(found.num_bytes)}")
    print(f"        served  {_megabytes(found.loaded_bytes)}  {_rest(found.dtype, found.formats)}; KV comes to it (twostep plan)")
    if found.cpu_bytes != found.loaded_bytes:
        print(f"      on a CPU  {_megabytes(found.cpu_bytes)}  which unpacks what it has no product for")
    if refused:
        print(f"it cannot be served: {refused}", file=sys.stderr)
    return 1 if refused else 0


def _refusal(model_dir: Path, architecture: str) -> str:
    """Returns why no worker would load it, as far as that is known without reading weights; empty: nothing is. Whoever has the client
    alone learns less."""
    try:
        take_architecture(Fields(model_dir / "config.json", read_config(model_dir, architecture)))
        if importlib.util.find_spec("torch") is not None:
            importlib.import_module("twostep.model.loading.weights").check_weights(model_dir, architecture)
    except SetupError as error:
        return error.message
    return ""


def _rest(dtype: str, formats: Sequence[FormatShare]) -> str:
    return f"in all, what is not quantized in {dtype}" if formats else f"in {dtype}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:>10,.1f} MB"


def _resolve(name: str, revision: str) -> Path:
    """Returns the directory of what --model may be; empty: the default. Says on standard error what it waits for."""
    store = importlib.import_module("twostep.model.loading.store")
    if not name or name.lower() in store.KNOWN_MODELS:
        # It is converted.
        require_worker_extra("twostep models fetch")
    directory: Path = store.resolve(
        name or store.DEFAULT_MODEL,
        revision=revision,
        cache_dir=store.default_cache_dir(os.environ),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return directory
