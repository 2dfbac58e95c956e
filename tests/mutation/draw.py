"""Draws faults at random places of the code, the same ones for the same seed, and writes them down as small edits of one line.

    python tests/mutation/draw.py --seed 18 > tests/mutation/faults.json

`run.py` plants them one by one and sees whether the tests find them. Each area of AREAS gives as many faults as the others.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

AREAS = {
    "engine": ["twostep/engine/engine.py", "twostep/engine/block_pool.py", "twostep/engine/block_manager.py", "twostep/engine/reuse.py",
               "twostep/engine/batch.py", "twostep/engine/sequence.py", "twostep/engine/host_tier.py", "twostep/model/runner/sampler.py"],
    "hand-over": ["kv_transfer/lease.py", "kv_transfer/reader.py", "kv_transfer/chunking.py", "kv_transfer/wire_encoding.py",
                  "kv_transfer/object_book.py", "prefill_worker/hand_over.py", "decode_worker/pull.py", "decode_worker/paths.py",
                  "decode_worker/sequences.py", "decode_worker/outbox.py"],
    "router": ["router/placing/placement.py", "router/placing/replay.py", "router/serving/dispatch.py", "router/serving/attempt.py",
               "router/serving/inference.py", "router/waiting/fair_queue.py", "router/waiting/quota_share.py",
               "router/workers/prefix_index.py", "router/http/choices.py", "twostep/cluster/prediction.py"],
    "scheduler": ["twostep/engine/scheduler.py", "twostep/engine/step_plan.py", "twostep/engine/step_bound.py",
                  "twostep/engine/constrained.py", "twostep/engine/pacing.py", "twostep/engine/step_work.py"],
}  # fmt: skip
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One line of one function that says something else."""

    area: str
    path: str
    function: str
    line: int
    before: str
    after: str


def of_file(area: str, path: str) -> Iterator[Fault]:
    """Yields every fault that can be planted in a file."""
    source = (ROOT / path).read_text()
    lines = source.splitlines()
    for name, function in functions(ast.parse(source)):
        for node in ast.walk(function):
            edit = edit_of(node, lines)
            if edit is not None and edit[1] != (before := lines[edit[0] - 1]):
                yield Fault(area, path, name, edit[0], before.strip(), edit[1].strip())


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{x.name}", x) for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef))


def edit_of(node: ast.AST, lines: list[str]) -> tuple[int, str] | None:
    """Returns the number of the line that a node's fault changes, from 1, and how it reads then; None where a node has none."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return swapped(node.left, node.comparators[0], node.ops[0], lines)
    if isinstance(node, ast.BinOp):
        return swapped(node.left, node.right, node.op, lines)
    if isinstance(node, ast.BoolOp):
        return swapped(node.values[0], node.values[1], node.op, lines)
    if isinstance(node, ast.If | ast.While) and node.test.lineno == node.test.end_lineno:
        line, start, end = node.test.lineno, node.test.col_offset, node.test.end_col_offset
        text = lines[line - 1]
        return line, f"{text[:start]}not ({text[start:end]}){text[end:]}"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await) and node.lineno == node.end_lineno:
        text = lines[node.lineno - 1]
        return None if text.strip().startswith("log.") else (node.lineno, text[: node.col_offset] + "pass")
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value in {0, 1, 2}:
        text = lines[node.lineno - 1]
        return node.lineno, f"{text[: node.col_offset]}{node.value + 1}{text[node.end_col_offset :]}"
    return None


def swapped(left: ast.expr, right: ast.expr, operator: ast.AST, lines: list[str]) -> tuple[int, str] | None:
    other = SWAPS.get(type(operator))
    if other is None or left.end_lineno != right.lineno:
        return None
    text = lines[right.lineno - 1]
    assert left.end_col_offset is not None
    # Brackets around an operand are part of what is between the two.
    between = text[left.end_col_offset : right.col_offset]
    word = between.strip("() ")
    return right.lineno, f"{text[: left.end_col_offset]}{between.replace(word, other, 1)}{text[right.col_offset :]}" if word else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--per-area", type=int, default=5)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    faults = [x for area, paths in AREAS.items() for x in draw.sample([f for p in paths for f in of_file(area, p)], options.per_area)]
    json.dump([asdict(x) for x in faults], sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
