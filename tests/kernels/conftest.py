"""Mends Triton's interpreter, in which kernels run where there is no GPU (tests/conftest.py chooses it)."""

from __future__ import annotations

import functools
import os

import numpy as np
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


def _to_nearest(cast):
    """Triton 3.6 cuts a float32 off where it becomes a bfloat16; GPUs round to the nearest, ties to even."""

    def cast_impl(builder, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.bfloat16):
            return cast(builder, src, dst_type)
        bits = np.ascontiguousarray(src.data, np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return interpreter.TensorHandle(np.where(np.isnan(src.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)

    return cast_impl


interpreter.InterpreterBuilder.cast_impl = _to_nearest(interpreter.InterpreterBuilder.cast_impl)

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
