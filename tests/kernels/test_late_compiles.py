"""A kernel that is compiled while requests are served is named in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from triton import knobs

from twostep.model.kernels.late_compiles import report_compiles


def test_a_late_compile_is_logged_with_its_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    report_compiles()
    begins, ended = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    assert begins is not None
    assert ended is not None
    about = {
        "key": "k",
        "repr": "gather[num_warps=4](x: *fp16)",
        "fn": SimpleNamespace(name="gather"),
        "compile": {},
        "is_manual_warmup": False,
    }
    assert not begins(**about, already_compiled=False), "true would keep Triton from compiling"
    with caplog.at_level(logging.WARNING):
        ended(**about, already_compiled=False)
    assert "gather" in caplog.text
    assert "0.0" in caplog.text
