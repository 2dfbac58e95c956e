"""`twostep up`: a whole system on this machine until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import sys
from pathlib import Path

from twostep.local.autoscale import Scale
from twostep.local.plan import LocalOptions
from twostep.local.run import INTERRUPTED, run_system
from twostep.local.system import LocalSystem
from twostep.settings.reading import Given, gather
from twostep.settings.router import DEFAULT_GRPC_PORT
from twostep.settings.table import switched
from twostep.settings.up import ALL
from twostep.text.model_card import ModelCard


def say(line: str) -> None:
    print(line, flush=True)


def typed_command() -> str:
    """Returns what a user types for `twostep` in any folder: a virtual environment need not be on PATH."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return shlex.join([sys.executable, "-P", "-m", "twostep.cli"])
    on_path = shutil.which(program.name)
    return program.name if on_path and Path(on_path).samefile(program) else shlex.quote(str(program.absolute()))


def options_of(args: argparse.Namespace) -> LocalOptions:
    """Returns what `up` and `demo` were told; raises SetupError for flags that make no system."""
    texts = gather(ALL, vars(args), os.environ)
    if args.command == "demo":
        # On free ports. What it is to show is the hand-over.
        for name in ("grpc-port", "autoscale"):
            texts.pop(name, None)
        texts["port"] = Given("demo", "0")
        aggregated = "aggregated" in texts and switched(texts["aggregated"].text)
        texts.setdefault("local-prefill", Given("demo", str(int(aggregated))))
    return LocalOptions.of(texts)


def to_come(scale: Scale, num_workers: int) -> str:
    """Says what an autoscaler may make of the workers that start: no more than the machine has room for."""
    more, fewer = scale.total > num_workers, scale.prefill.least + scale.decode.least < num_workers
    if more:
        return f"{'More or fewer' if fewer else 'More'} of them as the load asks for it."
    if fewer:
        return "Fewer of them, or in other roles, as the load asks for it; for more of them there is no room."
    return "They stay as they are: there is no room for more of them, and no role may have fewer."


def admin_url(options: LocalOptions) -> str:
    """Returns where the router has its admin port; empty: it has none, or takes a free one."""
    host, port = options.router.admin_host, options.router.admin_port
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}" if port > 0 else ""


def run(args: argparse.Namespace) -> int:
    options = options_of(args)
    command = typed_command()

    async def work(system: LocalSystem) -> int:
        say("")
        workers = f"{options.num_prefill} prefill, {options.decode} decode"
        if options.aggregated:
            workers = f"aggregated, {options.decode} worker{'s' if options.decode > 1 else ''}"
        say(f"Serving {system.plan.model_name} at {system.target}: {workers}.")
        # A large tokenizer takes a while to read; Ctrl-C has to work meanwhile.
        card = await asyncio.to_thread(ModelCard.load, system.plan.model_dir, options.worker.architecture)
        say(f"Answers end with {card.described_ends}.")
        target = "" if system.plan.grpc_port == DEFAULT_GRPC_PORT else f" --target {system.target}"
        if options.asks_for_keys:
            say("The router asks for an API key; give the commands below one of yours: export TWOSTEP_API_KEY=...")
        say(f"  {command} chat{target}")
        say(f'  {command} generate "Once upon a time"{target}')
        say(f"OpenAI's API: {system.http_url}/v1, the page: {system.http_url}/ui")
        pids = {worker.worker_id: system.supervisor.pid_of(worker.worker_id) for worker in system.plan.workers}
        say(f"Workers: {', '.join(f'{each.worker_id} {each.address} (process {pids[each.worker_id]})' for each in system.plan.workers)}")
        if system.plan.scale is not None:
            say(to_come(system.plan.scale, options.num_workers))
        if options.num_prefill:
            say(f"  {command} role HOST:PORT prefill|decode --secret-file {system.plan.secret_file}{target}")
        if admin := admin_url(options):
            say(f"Admin: {admin}")
            say(f"  {command} keys list --admin {admin} --secret-file {system.plan.secret_file}")
        say(f"Metrics: {', '.join(f'{name} {url}' for name, url in system.metrics_urls.items())}")
        say(f"Logs: {system.plan.run_dir / 'logs'}. Ctrl-C drains and stops.")
        if warning := system.open_door:
            say("")
            say(warning)
        say("")
        await system.wait()
        return 0

    status = run_system(options, work, environ=os.environ, write=say)
    say("Stopped.")
    # Ending on request is what `up` is for.
    return 0 if status == INTERRUPTED else status
