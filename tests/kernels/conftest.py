"""Mends Triton's interpreter, in which kernels run where there is no GPU (tests/conftest.py chooses it)."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import triton.language as tl
from quick_interpreter import quicken
from triton.runtime import interpreter

assert torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", "there is no GPU: set TRITON_INTERPRET=1"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers whatever ran before."""
    torch.manual_seed(0)


def _one_number_as_an_index(patch_tensor):
    """Triton 3.6 makes loop bounds of arrays of one number by int(), which numpy 2.4 refuses."""

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


interpreter._patch_lang_tensor = _one_number_as_an_index(interpreter._patch_lang_tensor)


def _only_once(patch_lang):
    """Triton 3.6 prepares its language, which takes milliseconds, for each call of one kernel's function by another as well."""

    @functools.cache
    def seen_by(fn):
        return [module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())]

    def patch(fn):
        return patch_lang(fn) if any(tl.core.is_builtin(module.load) for module in seen_by(fn)) else interpreter._LangPatchScope()

    return patch


interpreter._patch_lang = _only_once(interpreter._patch_lang)

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
