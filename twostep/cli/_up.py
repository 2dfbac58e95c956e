"""`twostep up`: a whole system on this machine until Ctrl-C."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from twostep.cli._extras import require_worker_extra

if TYPE_CHECKING:
    from twostep.local.options import LocalOptions
    from twostep.local.scaling import Scale
    from twostep.local.system import LocalSystem


def say(line: str) -> None:
    print(line, flush=True)


def options_of(args: argparse.Namespace) -> LocalOptions:
    """Flags that `up` and `demo` share; raises SetupError if the extra is missing or the flags make no system."""
    require_worker_extra(f"twostep {args.command}")
    options: type[LocalOptions] = importlib.import_module("twostep.local.options").LocalOptions
    return options(
        model=args.model,
        served_model_name=args.served_model_name,
        reasoning_parser=args.reasoning_parser,
        tool_call_parser=args.tool_call_parser,
        num_prefill=_num_prefill(args),
        num_decode=getattr(args, "decode", 1),
        aggregated=args.aggregated,
        autoscale=getattr(args, "autoscale", False),
        min_prefill=getattr(args, "min_prefill", 1),
        max_prefill=getattr(args, "max_prefill", None),
        min_decode=getattr(args, "min_decode", 1),
        max_decode=getattr(args, "max_decode", None),
        # What a demo is to show is the hand-over.
        local_prefill=getattr(args, "local_prefill", args.aggregated),
        host=getattr(args, "host", "127.0.0.1"),
        port=getattr(args, "port", 0),
        http_port=getattr(args, "http_port", None),
        api_keys_file=getattr(args, "api_keys_file", None),
        allowed_origins=getattr(args, "allowed_origins", ()),
        allowed_hosts=getattr(args, "allowed_hosts", ()),
        batch_dir=getattr(args, "batch_dir", None),
        redis_url=args.redis_url,
        ray_address=args.ray_address,
        kv_transfer=args.kv_transfer,
        kv_wire=args.kv_wire,
        runner=args.runner,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        tensor_parallel_size=args.tensor_parallel_size,
        device=args.device,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        cpu_threads=args.cpu_threads,
        object_store_bytes=args.object_store_bytes,
        start_timeout_s=args.start_timeout,
        drain_timeout_s=args.drain_timeout,
        otlp_endpoint=args.otlp_endpoint,
        verbose=args.verbose,
    )


def _num_prefill(args: argparse.Namespace) -> int:
    """As told; if not, one, and in an aggregated system none."""
    told: int | None = getattr(args, "prefill", None)
    return told if told is not None else 0 if args.aggregated else 1


def to_come(scale: Scale, num_workers: int) -> str:
    """What an autoscaler may make of the workers that start: no more than the machine has room for."""
    more, fewer = scale.total > num_workers, scale.prefill.least + scale.decode.least < num_workers
    if more:
        return f"{'More or fewer' if fewer else 'More'} of them as the load asks for it."
    if fewer:
        return "Fewer of them, or in other roles, as the load asks for it; for more of them there is no room."
    return "They stay as they are: there is no room for more of them, and no role may have fewer."


def admin_url(environ: Mapping[str, str]) -> str:
    """Where the router has its admin port, for which `up` has no flags; empty: it has none, or takes a free one."""
    port = environ.get("TWOSTEP_ADMIN_PORT", "")
    host = environ.get("TWOSTEP_ADMIN_HOST", "") or "127.0.0.1"
    if not port.isascii() or not port.isdecimal() or not int(port):
        return ""
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{host}:{int(port)}"


def run(args: argparse.Namespace) -> int:
    options = options_of(args)
    # As the user can type it: a virtual environment need not be on PATH.
    command = "twostep" if shutil.which("twostep") else os.path.relpath(sys.argv[0])

    async def work(system: LocalSystem) -> int:
        say("")
        workers = f"{options.num_prefill} prefill, {options.num_decode} decode"
        if options.aggregated:
            workers = f"aggregated, {options.num_decode} worker{'s' if options.num_decode > 1 else ''}"
        say(f"Serving {system.plan.model_name} at {system.target}: {workers}.")
        target = "" if system.plan.port == 50051 else f" --target {system.target}"
        say(f"  {command} chat{target}")
        say(f'  {command} generate "Once upon a time"{target}')
        say(f"OpenAI's API: {system.http_url}/v1, the page: {system.http_url}/ui")
        say(f"Workers: {', '.join(f'{worker.worker_id} {worker.address}' for worker in system.plan.workers)}")
        if system.plan.scale is not None:
            say(to_come(system.plan.scale, options.num_workers))
        if options.num_prefill:
            say(f"  {command} role HOST:PORT prefill|decode --secret-file {system.plan.secret_file}")
        if admin := admin_url(os.environ):
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

    run_system = importlib.import_module("twostep.local.run").run_system
    status: int = run_system(options, work, environ=os.environ, write=say)
    say("Stopped.")
    # Ending on request is what `up` is for.
    return 0 if status == importlib.import_module("twostep.local.run").INTERRUPTED else status
