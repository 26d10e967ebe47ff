"""Compiles the kernels that a launcher would launch, for a GPU that is not there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HOPPER = GPUTarget("cuda", 90, 32)
ADA = GPUTarget("cuda", 89, 32)
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@contextmanager
def compiled_not_run(monkeypatch: pytest.MonkeyPatch, target: GPUTarget = HOPPER) -> Iterator[list[Any]]:
    """While open, launchers take their Triton path for CPU tensors, and a launch compiles for a GPU and runs nothing.

    Yields the list of compiled kernels.
    """
    compiled: list[Any] = []

    def run(self: triton.JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        compiled.append(triton.compile(_source(self, values), target=target, options=options))

    with monkeypatch.context() as patch:
        patch.setattr("headrace.kernels.dispatch.INTERPRETED", True)
        patch.setattr(triton.JITFunction, "run", run)
        yield compiled


@contextmanager
def specialisations_met(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """While open, launchers take their Triton path for CPU tensors, and a launch computes nothing: what it would write is
    zeros, as all memory is from the start. Yields what a GPU would have to have compiled for the launches so far.
    """
    met: set[str] = set()

    def run(self: triton.JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        met.add(f"{self.__name__}{_specialisation(self, values)}{options}")

    with monkeypatch.context() as patch:
        patch.setattr("headrace.kernels.dispatch.INTERPRETED", True)
        patch.setattr(triton.JITFunction, "run", run)
        patch.setattr(torch, "empty", torch.zeros)
        patch.setattr(torch, "empty_like", torch.zeros_like)
        patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        yield met


def _source(kernel: triton.JITFunction, values: dict[str, object]) -> ASTSource:
    signature, constants, attributes = _specialisation(kernel, values)
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return source(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)


def _specialisation(
    kernel: triton.JITFunction, values: dict[str, object]
) -> tuple[dict[str, str], dict[tuple[int], object], dict[tuple[int], list[list[object]]]]:
    """The kernel's signature, constants and attributes, as a launch specialises it: on ones and on multiples of 16."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], object] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for at, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        aligned = False
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[name], constants[at,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            aligned = value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
        elif isinstance(value, TensorDescriptor):
            element = TYPES[value.base.dtype].removeprefix("*")
            signature[name] = f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        else:
            signature[name] = "fp32"
        if aligned:
            attributes[at,] = [["tt.divisibility", 16]]
    return signature, constants, attributes
