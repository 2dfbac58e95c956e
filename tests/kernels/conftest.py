"""Without a GPU, kernels run in Triton's interpreter, which must be chosen before anything imports triton."""

from __future__ import annotations

import os
import sys

import torch

if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    assert "triton" not in sys.modules, "something imported triton before its interpreter was chosen: set TRITON_INTERPRET=1"
    os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter


def _one_number_as_an_index(patch_tensor):
    """Triton 3.6 makes loop bounds of arrays of one number by int(), which numpy 2.4 refuses."""

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


interpreter._patch_lang_tensor = _one_number_as_an_index(interpreter._patch_lang_tensor)
