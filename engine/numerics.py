"""Fast numbers, or numbers that depend on nothing but the sequence: the operations whose bits may differ with the batch.

A row's result may depend on its neighbours where a library chooses its tiles by the number of rows (matrix products),
where the kernel is chosen by what is computed together (attention: decode or prefill, split keys, shared prefixes), and
on the CPU where a row begins among threads (exponentials). All else works row by row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from headrace.kernels.matmul import matmul
from headrace.kernels.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class Numerics:
    """The variants that a model computes with.

    batch_invariant: one attention for every row, whatever stands beside it and wherever its keys came from.
    linear: ([T, in], weight [out, in], bias [out] or None) -> [T, out]. silu_mul: [T, 2 I] -> [T, I].
    """

    batch_invariant: bool
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    silu_mul: Callable[[Tensor], Tensor]


FAST = Numerics(batch_invariant=False, linear=F.linear, silu_mul=silu_mul)
BATCH_INVARIANT = Numerics(
    batch_invariant=True, linear=matmul, silu_mul=partial(silu_mul, batch_invariant=True)
)
