"""Where `twostep up` keeps files and batches: below its run directory, which goes with it, or where it is told."""

from __future__ import annotations

from pathlib import Path

from test_local_aggregated import commands, told


def batch_dir(*words: str, model: Path) -> Path:
    argv = commands(told("up", "--model", str(model), "--port", "0", *words))["router"]
    (found,) = (word.partition("=")[2] for word in argv if word.startswith("--batch-dir="))
    return Path(found)


def test_batches_are_kept_where_it_is_told(tmp_path: Path, tiny_llama_dir: Path) -> None:
    assert batch_dir("--batch-dir", str(tmp_path / "kept"), model=tiny_llama_dir) == tmp_path / "kept"


def test_untold_they_go_with_the_system(tiny_llama_dir: Path) -> None:
    found = batch_dir(model=tiny_llama_dir)
    assert found.name == "batches"
    assert not found.parent.exists(), "which is gone with its run directory"
