"""A kernel that is compiled while requests are served is named in the log."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from triton import knobs

from twostep.model.kernels.late_compiles import report_compiles


def test_a_late_compile_is_logged_with_its_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(knobs.compilation, "listener", None)
    report_compiles()
    assert knobs.runtime.jit_cache_hook is None, "a hook fails where a kernel's constant cannot be written as JSON"
    assert knobs.runtime.jit_post_compile_hook is None
    told = knobs.compilation.listener
    assert told is not None
    times = knobs.CompileTimes(ir_initialization=250_000, lowering_stages=[("ptx", 1_000_000)], store_results=0)
    about = {"src": SimpleNamespace(name="gather"), "metadata": {}, "metadata_group": {}, "times": times}
    with caplog.at_level(logging.WARNING):
        told(**about, cache_hit=True)
        assert not caplog.records, "it was compiled before"
        told(**about, cache_hit=False)
    assert "gather" in caplog.text
    assert "1.25" in caplog.text
