"""Runs what public clients do against a small system: each client in an environment of its own, with its newest version.

    python tests/outside/run.py                       all of them; the environments stay in .venv-outside/
    python tests/outside/run.py --only openai lm_eval
    python tests/outside/run.py --url http://host:8000 --model NAME --model-dir DIR     against a system that runs already

Needs PyPI, or npm and Node 20, for the first run of each client. Exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / ".venv-outside"


@dataclass(frozen=True)
class Client:
    """`packages`: of PyPI, or with `npm` of npm; then this Python runs the check. `agent`: prompts are too long for the demo's model."""

    packages: tuple[str, ...]
    npm: bool = False
    agent: bool = False


# By the name of its script.
CLIENTS = {
    "openai": Client(("openai",)),
    "anthropic": Client(("anthropic",)),
    "litellm": Client(("litellm", "mcp")),
    "langchain": Client(("langchain-openai", "langchain-anthropic")),
    "instructor": Client(("instructor", "anthropic")),
    "lm_eval": Client(("lm-eval[api]", "transformers")),
    "aiperf": Client(("aiperf",)),
    "guidellm": Client(("guidellm",)),
    "vercel": Client(("ai", "@ai-sdk/openai", "zod"), npm=True),
    "codex": Client(("@openai/codex",), npm=True, agent=True),
    "claude_code": Client(("@anthropic-ai/claude-code",), npm=True, agent=True),
    "opencode": Client(("opencode-ai",), npm=True, agent=True),
}
_START_S = 300.0
_CHECK_S = 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--only", nargs="*", choices=CLIENTS, default=list(CLIENTS), metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--url", help="of a system that runs already")
    parser.add_argument("--model", help="its model's name")
    parser.add_argument("--model-dir", help="where that model's tokenizer lies here")
    options = parser.parse_args()
    if options.url and not (options.model and options.model_dir):
        parser.error("--url needs --model and --model-dir")
    for client in options.only:
        install(client)
    if options.url:
        return report(options.only, lambda agent: nullcontext([options.url, options.model, options.model_dir]))
    return report(options.only, system)


def folder_of(client: str) -> Path:
    return ENVIRONMENTS / client


def install(client: str) -> None:
    """Makes a client's environment if there is none for the packages that it needs."""
    folder, packages = folder_of(client), CLIENTS[client].packages
    stamp, wanted = folder / "packages", " ".join(packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing {wanted}", flush=True)
    if CLIENTS[client].npm:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages], check=True)
    else:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        words = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
        subprocess.run(words, check=True)
    stamp.write_text(wanted)


def made_up(folder: Path, model_dir: str) -> list[str]:
    """Returns the flags of a model with the demo's tokenizer and made-up weights: it has a context for agents' prompts, and is fast."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = json.loads(Path(model_dir, "config.json").read_text()) | shape | {"head_dim": 32, "max_position_embeddings": 1 << 17}
    made = folder / "made-up"
    made.mkdir()
    for file in Path(model_dir).glob("*.json"):
        (made / file.name).write_bytes(file.read_bytes())
    (made / "config.json").write_text(json.dumps(config))
    template = ROOT / "twostep/model/loading/smollm2-135m-instruct.jinja"
    return ["--model", str(made), "--load-format", "dummy", "--aggregated", "--chat-template", str(template)]


@contextmanager
def system(agent: bool) -> Iterator[list[str]]:
    """Runs `twostep up` with the demo's model, or for agents one of made-up weights. Yields the URL of its HTTP port, the model's name and
    its directory."""
    sys.path.insert(0, str(ROOT))
    from twostep.local.ports import free_ports  # noqa: PLC0415  # not needed with --url

    port, http_port = free_ports(2)
    url = f"http://127.0.0.1:{http_port}"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    twostep = [sys.executable, "-m", "twostep.cli"]
    model_dir = subprocess.run([*twostep, "models", "fetch"], env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="ts-") as folder, Path(folder, "up.log").open("wb") as log:
        # In float32, as log probabilities are compared with those of `transformers`.
        words = [*twostep, "up", "--dtype", "float32", "--tool-call-parser", "hermes"]
        words += made_up(Path(folder), model_dir) if agent else ["--model", model_dir]
        words += ["--port", str(http_port), "--grpc-port", str(port)]
        process = subprocess.Popen(words, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + _START_S
            while (model := served(url)) is None:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the system did not start: {Path(log.name).read_text('utf-8', 'replace')[-2000:]}")
                time.sleep(0.5)
            yield [url, model, model_dir]
        finally:
            process.terminate()
            process.wait(60)


def served(url: str) -> str | None:
    """Returns the name of the model that is served, None while nothing is."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5), urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            models = json.load(answer)["data"]
    except OSError:
        return None
    return str(models[0]["id"]) if models else None


def report(clients: list[str], system: Callable[[bool], AbstractContextManager[list[str]]]) -> int:
    """Runs the clients one after the other, and says how each went in the end. Returns the exit status."""
    results = {}
    for agent in (False, True):
        chosen = [client for client in clients if CLIENTS[client].agent is agent]
        if chosen:
            with system(agent) as target:
                results |= {client: status_of(client, target) for client in chosen}
    failed = [client for client, status in results.items() if status]
    print(
        f"\n{len(results) - len(failed)} of {len(results)} clients are served as they expect"
        + (f"; not: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def status_of(client: str, target: list[str]) -> int:
    """Runs a client's check, and returns its exit status."""
    print(f"\n== {client} {version(client)}", flush=True)
    began = time.monotonic()
    environ = os.environ | {"REFERENCE_PYTHON": sys.executable, "CLIENT_FOLDER": str(folder_of(client))}
    environ.pop("PYTHONPATH", None)
    python = sys.executable if CLIENTS[client].npm else str(folder_of(client) / "bin/python")
    try:
        status = subprocess.run([python, str(HERE / f"check_{client}.py"), *target], env=environ, timeout=_CHECK_S).returncode
    except subprocess.TimeoutExpired:
        status = 1
    print(f"== {client}: {'all well' if status == 0 else 'FAILED'}, {time.monotonic() - began:.0f} s", flush=True)
    return status


def version(client: str) -> str:
    package = CLIENTS[client].packages[0].partition("[")[0]
    if CLIENTS[client].npm:
        return str(json.loads((folder_of(client) / "node_modules" / package / "package.json").read_text())["version"])
    words = [str(folder_of(client) / "bin/python"), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
