"""Every file that a page, a docstring, a comment or a proto names by its path is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = "benchmarks|decode_worker|deploy|docs|helm|kv_transfer|prefill_worker|protos|router|scripts|tests|twostep"
NAMED = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w/.-]*?\.(?:py|md|proto|json|yaml|toml))(?![\w*])")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
# They speak of other commits.
HISTORY = ("benchmarks/RESULTS.md", "CHANGELOG.md", "tests/mutation/")
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, check=False, capture_output=True, text=True).stdout.splitlines()
PAGES = [name for name in TRACKED if name.endswith((".md", ".py", ".proto")) and "_pb2" not in name and not name.startswith(HISTORY)]


def _is_there(name: str) -> bool:
    return (ROOT / name).exists() or (ROOT / "protos" / name).exists()


def test_paths_lead_somewhere() -> None:
    if not PAGES:
        pytest.skip("this is no checkout of git")
    lost = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        lost += [f"{page}: {name}" for name in NAMED.findall(text) if "NAME" not in name and not _is_there(name)]
        if page.endswith(".md"):
            lost += [f"{page}: link to {name}" for name in LINK.findall(text) if not ((ROOT / page).parent / name).exists()]
    assert not lost, "\n".join(lost)
