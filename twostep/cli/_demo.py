"""`twostep demo`: a system, one question, what happened, and the end of it."""

from __future__ import annotations

import argparse
import asyncio
import os
import time

from twostep.cli._up import options_of, say
from twostep.client import AsyncClient, Completion, Phases
from twostep.local.run import run_system
from twostep.local.system import LocalSystem
from twostep.process.printable import harmless

# Longer than a lease, which a busy machine may let run out.
_SETTLE_S = 60.0
_PHASES = {
    "route": ("route_s", "tokenize, hash, choose and reserve"),
    "queue": ("queue_s", "wait for the worker that computes the prompt"),
    "prefill": ("prefill_s", "prompt to KV and first token"),
    "publish": ("publish_s", "rest of the KV into the transport"),
    "fetch": ("fetch_s", "decode worker pulls and verifies"),
    "first decode": ("first_decode_s", "to the decode worker's first token"),
    "decode": ("decode_s", "the other tokens"),
}


def run(args: argparse.Namespace) -> int:
    options = options_of(args)
    begun = time.monotonic()

    async def work(system: LocalSystem) -> int:
        return await _ask(system, args.prompt, args.max_tokens, aggregated=options.aggregated)

    status = run_system(options, work, environ=os.environ, write=say)
    say(
        f"Everything stopped after {time.monotonic() - begun:.1f} s. "
        + ("All is well." if status == 0 else "Something went wrong, see above.")
    )
    return status


async def _ask(system: LocalSystem, prompt: str, max_tokens: int, *, aggregated: bool) -> int:
    pids = {name: system.supervisor.pid_of(name) for name in ("router", *(worker.worker_id for worker in system.plan.workers))}
    say(f"\nServing {system.plan.model_name}: " + ", ".join(f"{name} is process {pid}" for name, pid in pids.items()))
    say(f"\n  you    {prompt}")
    print("  model  ", end="", flush=True)
    async with AsyncClient(system.target, api_key=system.key()) as client:
        answer = client.chat([{"role": "user", "content": prompt}], max_tokens=max_tokens, temperature=0.0)
        try:
            async for piece in answer:
                print(harmless(piece.text).replace("\n", "\n         "), end="", flush=True)
        finally:
            say("\n")
        completion = await answer.result()
    for line in describe(completion, pids):
        say(line)
    problems = [*wrong_with(completion, aggregated=aggregated), *await _kept(system)]
    for problem in problems:
        say(f"  WRONG: {problem}")
    if not problems:
        say("  The workers hold nothing any more: every block, lease and object is free again.")
    if again := system.supervisor.num_restarts:
        # A busy machine may not give Ray the time it allows itself to start; that says nothing of the answer.
        say(f"  {again} of the processes had to be started again; the answer is none the worse for it.")
    say("")
    return 1 if problems else 0


def describe(completion: Completion, pids: dict[str, int | None]) -> list[str]:
    usage, phases, transfer = completion.usage, completion.phases, completion.transfer
    lines = ["  latency          ms"]
    lines += [f"    {name:<13}{1000 * getattr(phases, field):8.1f}  {what}" for name, (field, what) in _PHASES.items()]
    lines.append(f"    first token  {1000 * phases.ttft_s:8.1f}  as the router saw it")
    lines.append(f"    in all       {1000 * phases.total_s:8.1f}  {_rate(completion, phases)}")
    lines.append("  tokens")
    cached = f", {usage.cached_tokens} of them from the prefix cache" if usage.cached_tokens else ""
    lines.append(f"    {usage.prompt_tokens} in{cached}; {usage.completion_tokens} out, ended by {completion.finish_reason}")
    lines.append("  KV cache")
    if transfer.transport == "none":
        worker = transfer.decode_worker
        lines.append(f"    stayed where it was: {worker} (process {pids.get(worker)}) computed the prompt itself")
    elif transfer.transport:
        source, sink = transfer.prefill_worker, transfer.decode_worker
        lines.append(f"    {transfer.bytes / 1e6:.2f} MB in {_count(transfer.chunks, 'chunk')} over {transfer.transport}")
        lines.append(f"    {_count(transfer.blocks_moved, 'block')} moved, {transfer.blocks_reused} already there")
        lines.append(f"    from {source} (process {pids.get(source)}) to {sink} (process {pids.get(sink)})")
    else:
        lines.append("    stayed where it was: the first token ended the answer")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _rate(completion: Completion, phases: Phases) -> str:
    decoded = completion.usage.completion_tokens - 2
    return f"{decoded / phases.decode_s:.1f} tokens/s while decoding" if decoded > 0 and phases.decode_s > 0 else ""


def wrong_with(completion: Completion, *, aggregated: bool) -> list[str]:
    """Returns what is wrong with an answer, and with how it came about; of the machine's troubles nothing."""
    problems = []
    if not (completion.text + completion.reasoning).strip():
        problems.append("the answer is empty")
    if completion.usage.completion_tokens > 1 and (completion.transfer.transport in ("", "none")) != aggregated:
        problems.append("a KV cache travelled" if aggregated else "no KV cache travelled")
    return problems


async def _kept(system: LocalSystem) -> list[str]:
    """Returns what workers hold that they should have given back."""
    deadline = time.monotonic() + _SETTLE_S
    # The last lease ends a moment after the answer.
    while (held := await system.held()) and time.monotonic() < deadline:  # noqa: ASYNC110  other processes set no events
        await asyncio.sleep(0.1)
    return [f"{name}, after {_SETTLE_S:g} s: {what}" for name, what in held.items()]
