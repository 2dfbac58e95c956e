"""Runs what public clients do against a small system: each client in an environment of its own, with its newest version.

    python tests/outside/run.py                       all of them; the environments stay in .venv-outside/
    python tests/outside/run.py --only openai lm_eval
    python tests/outside/run.py --url http://host:8000 --model NAME --model-dir DIR     against a system that runs already

Needs a package index for the first run of each client. Exits with 1 if a check failed.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / ".venv-outside"
# By the name of its script, the packages that a client needs.
CLIENTS = {
    "openai": ["openai"],
    "anthropic": ["anthropic"],
    "litellm": ["litellm", "mcp"],
    "langchain": ["langchain-openai", "langchain-anthropic"],
    "instructor": ["instructor", "anthropic"],
    "lm_eval": ["lm-eval[api]", "transformers"],
    "aiperf": ["aiperf"],
    "guidellm": ["guidellm"],
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
    pythons = {client: environment(client) for client in options.only}
    if options.url:
        return report(pythons, [options.url, options.model, options.model_dir])
    with system() as target:
        return report(pythons, target)


def environment(client: str) -> Path:
    """Returns the Python of a client's environment, which is made if there is none for the packages that it needs."""
    folder, wanted = ENVIRONMENTS / client, " ".join(CLIENTS[client])
    stamp, python = folder / "packages", folder / "bin/python"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {wanted}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *CLIENTS[client]], check=True)
        stamp.write_text(wanted)
    return python


@contextmanager
def system() -> Iterator[list[str]]:
    """Runs `twostep up` with the demo's model. Yields the URL of its HTTP port, the model's name and its directory."""
    sys.path.insert(0, str(ROOT))
    from twostep.local.ports import free_ports  # noqa: PLC0415  # not needed with --url

    port, http_port = free_ports(2)
    url = f"http://127.0.0.1:{http_port}"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    twostep = [sys.executable, "-m", "twostep.cli"]
    model_dir = subprocess.run([*twostep, "models", "fetch"], env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="ts-") as folder, Path(folder, "up.log").open("wb") as log:
        # In float32, as log probabilities are compared with those of `transformers`.
        words = [*twostep, "up", "--model", model_dir, "--dtype", "float32", "--tool-call-parser", "hermes"]
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


def report(pythons: dict[str, Path], target: list[str]) -> int:
    """Runs the clients one after the other, and says how each went in the end. Returns the exit status."""
    results = {}
    for client, python in pythons.items():
        print(f"\n== {client} {version(python, client)}", flush=True)
        began = time.monotonic()
        environ = os.environ | {"REFERENCE_PYTHON": sys.executable}
        environ.pop("PYTHONPATH", None)
        try:
            status = subprocess.run([str(python), str(HERE / f"check_{client}.py"), *target], env=environ, timeout=_CHECK_S).returncode
        except subprocess.TimeoutExpired:
            status = 1
        results[client] = status
        print(f"== {client}: {'all well' if status == 0 else 'FAILED'}, {time.monotonic() - began:.0f} s", flush=True)
    failed = [client for client, status in results.items() if status]
    print(
        f"\n{len(results) - len(failed)} of {len(results)} clients are served as they expect"
        + (f"; not: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def version(python: Path, client: str) -> str:
    package = CLIENTS[client][0].partition("[")[0]
    words = [str(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
