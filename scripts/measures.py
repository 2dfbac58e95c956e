"""Measures of how much there is to read: `python scripts/measures.py [TREE]`, for two trees alike.

Lines are all lines of .py files that git knows, without generated code. A class name counts as used twice where two public classes
outside the tests have it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

PACKAGES = ("twostep/", "router/", "prefill_worker/", "decode_worker/", "kv_transfer/", "deploy/", "helm/")
FIRST_WORDS = ("Of", "What")


def main() -> None:
    tree = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    names = subprocess.run(["git", "ls-files"], cwd=tree, check=True, capture_output=True, text=True).stdout.split()
    code = [x for x in names if x.endswith(".py") and "_pb2" not in x]
    text = {x: (tree / x).read_text() for x in (*code, *(y for y in names if y.endswith(".md")))}

    def lines(*roots: str) -> int:
        return sum(text[x].count("\n") for x in code if x.startswith(roots))

    def words(files: list[str]) -> int:
        return sum(len(text[x].split()) for x in files)

    packages = [x for x in code if x.startswith(PACKAGES)]
    classes: Counter[str] = Counter()
    openings: Counter[str] = Counter()
    for name in packages:
        for node in ast.walk(ast.parse(text[name])):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name] += 1
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                openings[(ast.get_docstring(node) or "").split(" ", 1)[0]] += 1
    flags = {flag for name in packages for flag in re.findall(r'"(--[a-z][a-z0-9-]+)"', text[name])}
    docs = [x for x in text if x.startswith("docs/") and x.endswith(".md")]
    rows = {
        "lines of packages": lines(*PACKAGES),
        "lines of tests": lines("tests/"),
        "lines of benchmarks": lines("benchmarks/"),
        "words of docs": words(docs),
        "lines of docs over 140 characters": sum(len(line) > 140 for x in docs for line in text[x].splitlines()),
        "lines of README": text["README.md"].count("\n"),
        "flags": len(flags),
        "public class names used twice": sum(count > 1 for count in classes.values()),
        **{f'docstrings that begin with "{word}"': openings[word] for word in FIRST_WORDS},
        "files of packages": len(packages),
    }
    for what, value in rows.items():
        print(f"{what:40} {value:8}")


if __name__ == "__main__":
    main()
