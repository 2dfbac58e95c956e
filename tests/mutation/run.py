"""Plants the faults of faults.json one after the other in a copy of the tree and says which of them a command finds.

    python tests/mutation/run.py                                    the first tier: pytest -x
    python tests/mutation/run.py --only 3 7 -- make test-all

A fault whose code has moved since it was drawn has `path` and `before` as they stand now; `drawn` says where it stood.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="these faults, by their place in the list, from 0")
    parser.add_argument("command", nargs="*", default=["python", "-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider"])
    options = parser.parse_args()
    faults: list[dict[str, Any]] = json.loads(FAULTS.read_text())
    chosen = range(len(faults)) if options.only is None else options.only
    missed = 0
    with tempfile.TemporaryDirectory(prefix="ts-faults-") as folder:
        for i in chosen:
            began = time.monotonic()
            found = plant_and_look(faults[i], Path(folder) / "tree", options.command)
            missed += found is None
            print(f"{i:3} {time.monotonic() - began:5.0f} s  {faults[i]['path']}  {found or 'MISSED'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return 1 if missed else 0


def plant_and_look(fault: dict[str, Any], tree: Path, command: list[str]) -> str | None:
    """Returns the first test that failed, None where all passed."""
    shutil.rmtree(tree, ignore_errors=True)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, files):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    plant(fault, tree / fault["path"])
    path = f"{tree}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}"}
    result = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if result.returncode == 0:
        return None
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else (result.stdout + result.stderr).strip().splitlines()[-1]


def plant(fault: dict[str, Any], path: Path) -> None:
    lines = path.read_text().splitlines()
    places = [i for i, line in enumerate(lines) if line.strip() == fault["before"]]
    if not places:
        sys.exit(f"{path}: no line reads {fault['before']!r}: say in faults.json where it stands now")
    place = min(places, key=lambda i: abs(i + 1 - fault["line"]))
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    lines[place] = indent + fault["after"]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
