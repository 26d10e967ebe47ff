"""The gate, the up projection and the activation of a Llama-style feed-forward layer in one.

    y = silu_mul(x W^T + b)        x: [T, H]; W: [2I, H], gate's rows first; b: [2I]; y: [T, I]

On a Hopper GPU one kernel does it all, where that is the quicker way: the sizes tell.
"""

from torch import Tensor
from torch.nn import functional as F

from headrace.kernels.dispatch import check, multiprocessors
from headrace.kernels.silu_mul import silu_mul
from headrace.kernels.swiglu_hopper import share_used, suits, swiglu_hopper

_ACTIVATION_TIMES_H = 150
"""What silu_mul takes of the product's time is this over H: 244 by count, 6I bytes a token at a copy's 4.3 TB/s against 4HI
operations at the 700 TFLOP/s of an H200 whose matrix units have been busy for a while; less where they come from the cache."""

_LEAST_TOKENS = 512
"""Below, the library cuts rows into smaller tiles, and wastes less on the last one."""


def pays(tokens: int, hidden: int, intermediate: int, programs: int) -> bool:
    """Whether swiglu_hopper is quicker than the library's product and silu_mul after it.

    Its own product is about as quick as the library's where all multiprocessors have work to the end.
    """
    if tokens < _LEAST_TOKENS:
        return False
    return share_used(tokens, intermediate, programs) * (1 + _ACTIVATION_TIMES_H / hidden) > 1


def swiglu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(gate) * up for x [T, H], weight [2I, H] and bias [2I], gate's half first. Returns [T, I].

    Rounded as the product and silu_mul one after the other are.
    """
    check(x.dim() == 2 and weight.shape[1:] == x.shape[1:], "x must be [T, H] and weight [2I, H]")
    tokens, hidden = x.shape
    if (
        bias is None
        and suits(x, weight)
        and pays(tokens, hidden, weight.shape[0] // 2, multiprocessors(x.device))
    ):
        return swiglu_hopper(x, weight)
    return silu_mul(F.linear(x, weight, bias))
