"""Fast numbers, or numbers that depend on nothing but the sequence: the operations whose bits may differ with the batch.

A row's result may depend on its neighbours where a library chooses its tiles by the number of rows (matrix products),
where the kernel is chosen by what is computed together (attention: decode or prefill, split keys, shared prefixes), and
on the CPU where a row begins among threads (exponentials). All else works row by row.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from headrace.kernels.matmul import matmul
from headrace.kernels.rms_norm import add_rms_norm, rms_norm
from headrace.kernels.silu_mul import silu_mul
from headrace.kernels.swiglu import swiglu


@dataclass(frozen=True, slots=True)
class Numerics:
    """The variants that a model computes with.

    batch_invariant: one attention for every row, whatever stands beside it and wherever its keys came from.
    linear: ([T, in], weight [out, in], bias [out] or None) -> [T, out]. swiglu: as linear, with weights of a gate and, after
    it, of what it lets through: silu of the product's first half times the second, [T, out / 2]. add_linear: as linear, with
    a residual [T, out] that the product is added to in place, a norm's weight [out] and its epsilon; returns the residual's
    RMS norm, [T, out].
    """

    batch_invariant: bool
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    swiglu: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    add_linear: Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, float], Tensor]


def _add_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
) -> Tensor:
    """The library's product adds to the residual as it is written: a fifth less for the memory than to add it after."""
    residual.addmm_(x, weight.t())
    if bias is not None:
        residual.add_(bias)
    return rms_norm(residual, norm, eps)


def _add_linear_invariant(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
) -> Tensor:
    return add_rms_norm(matmul(x, weight, bias), residual, norm, eps)


def _swiglu_invariant(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return silu_mul(matmul(x, weight, bias), batch_invariant=True)


FAST = Numerics(batch_invariant=False, linear=F.linear, swiglu=swiglu, add_linear=_add_linear)
BATCH_INVARIANT = Numerics(
    batch_invariant=True, linear=matmul, swiglu=_swiglu_invariant, add_linear=_add_linear_invariant
)
