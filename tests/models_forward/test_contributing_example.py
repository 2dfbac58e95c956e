"""The family that CONTRIBUTING.md adds is one."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forward_helpers import FAMILIES, make_batch, reference_logits, save_model, scattered_sequences

from twostep.checkpoint.architectures import MODEL_TYPES
from twostep.model.families.registry import ARCHITECTURES
from twostep.model.runner.model_runner import ModelRunner

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def test_its_logits_are_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    (code,) = re.findall(r"\n```python\n(\"\"\"StableLM.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"__name__": "stablelm"}
    exec("from __future__ import annotations\n" + code, names)
    line, known = re.search(r'`"(\w+)": (\w+)`', text), re.search(r'`"(\w+)": "(\w+)"`', text)
    assert line is not None
    assert known is not None
    monkeypatch.setitem(ARCHITECTURES, line[1], names[line[2]])
    monkeypatch.setitem(MODEL_TYPES, known[1], known[2])
    monkeypatch.setitem(FAMILIES, "stablelm", ("StableLmConfig", {"rms_norm_eps": ..., "use_qkv_bias": True}))
    oracle = save_model("stablelm", tmp_path)
    runner = ModelRunner(tmp_path, num_blocks=8, block_size=4)
    (sequence,) = scattered_sequences([19], 4, 8, random.Random(0))
    got = runner.forward(make_batch([(sequence, 19)], 4))
    torch.testing.assert_close(got, reference_logits(oracle, sequence.tokens), rtol=0, atol=1e-4)
