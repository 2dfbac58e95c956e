"""Files and folders of settings are tried before anything is started or loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from twostep.errors import SetupError
from twostep.process.files import check_files
from twostep.settings.known import TABLES
from twostep.settings.router import RouterSettings
from twostep.settings.table import FileKind, Settings, settings_of
from twostep.settings.tls import TlsFiles


@pytest.mark.parametrize("table", TABLES.values())
def test_every_path_of_a_setting_says_what_it_is_for(table: type[Settings]) -> None:
    paths = [each for each in settings_of(table) if each.read is Path and each.name != "model"]
    assert [each.name for each in paths if each.file is None] == []


def router(**options: Path) -> RouterSettings:
    return RouterSettings(model=Path(), **options)  # type: ignore[arg-type]


def test_all_that_cannot_be_used_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    for name, kind in (("api_keys_file", FileKind.READ), ("placement_log", FileKind.WRITTEN), ("batch_dir", FileKind.FOLDER)):
        assert next(each for each in settings_of(RouterSettings) if each.path == (name,)).file is kind
        with pytest.raises(SetupError, match=f"--{name.replace('_', '-')} {below}"):
            check_files(router(**{name: below}))
    wrong = router(api_keys_file=tmp_path, batch_dir=tmp_path / "file", placement_log=tmp_path)
    with pytest.raises(SetupError) as refused:
        check_files(wrong)
    assert [flag in refused.value.message for flag in ("--api-keys-file", "--batch-dir", "--placement-log")] == [True] * 3
    with pytest.raises(SetupError, match="--tls-cert"):
        check_files(RouterSettings(model=Path(), tls=TlsFiles(cert=below)))


def test_what_can_be_used_is_left_as_it_was(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "log").write_text("before")
    check_files(router(batch_dir=tmp_path / "new" / "folder", placement_log=tmp_path / "log", api_key_file=tmp_path / "pipe"))
    check_files(router(batch_dir=tmp_path, placement_log=tmp_path / "new"))
    assert sorted(os.listdir(tmp_path)) == ["log", "pipe"]
    assert (tmp_path / "log").read_text() == "before"
