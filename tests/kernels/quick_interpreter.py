"""Makes Triton's interpreter quicker: most of its time goes into describing shapes and types that it has described before."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def quicken() -> None:
    """Patches Triton 3.6 for this process. What kernels compute stays the same."""
    # The checks for overflows are computed, with ten operations for each of the kernel's, and dropped where nothing is debugged.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    _remember_shapes()
    _compare_by_identity_first()
    _remember_numpy_types()
    _let_equal_types_pass()


def _remember_shapes() -> None:
    """Blocks of one shape share what describes it."""
    begin_type = core.block_type.__init__
    of_types: dict[tuple[int, ...], tuple[core.tuple, int]] = {}
    of_tensors: dict[tuple[int, ...], tuple[core.tuple, core.constexpr]] = {}

    def block_type(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if sizes not in of_types:
            begin_type(self, element_ty, shape)
            of_types[sizes] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = of_types[sizes]
        self.name = f"<{list(sizes)}, {element_ty}>"

    begin_tensor = core.tensor.__init__

    def tensor(self: core.tensor, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in of_tensors:
            begin_tensor(self, handle, type)
            of_tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[sizes]

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_if_they_differ(self: TritonSemantic, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    core.block_type.to_ir = lambda self, builder: self
    TritonSemantic.broadcast_impl_value = broadcast_if_they_differ


def _compare_by_identity_first() -> None:
    """Types and shapes are compared for each operation, and mostly the same object with itself."""
    for kind in (core.dtype, core.pointer_type, core.tuple):
        equal = kind.__eq__

        def same(self: Any, other: Any, equal: Any = equal) -> Any:
            return self is other or equal(self, other)

        kind.__eq__ = same


def _remember_numpy_types() -> None:
    """The interpreter makes a table of all types for each that it looks up."""
    found = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    @functools.wraps(found)
    def np_dtype(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = found(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = np_dtype


def _let_equal_types_pass() -> None:
    """Most operations have two tensors of one type, of which neither is cast."""
    checked = TritonSemantic.binary_op_type_checking_impl

    def operands(self: TritonSemantic, lhs: Any, rhs: Any, *options: bool) -> Any:
        alike = type(lhs) is type(rhs) is core.tensor and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr()
        # The fourth option is for divisions, before which numbers of 16 bits become wider.
        return self.broadcast_impl_value(lhs, rhs) if alike and len(options) < 4 else checked(self, lhs, rhs, *options)

    TritonSemantic.binary_op_type_checking_impl = operands
