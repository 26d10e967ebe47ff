"""gate_up's product and SiLU-mul, one after the other and in one kernel: the product's rate.  python bench/kernels/swiglu.py"""

import torch
from timing import DEVICE, cases_for, copies_for, report_rate, seconds_per_call
from torch import Tensor
from torch.nn import functional as F

from headrace.kernels.dispatch import multiprocessors
from headrace.kernels.silu_mul import silu_mul
from headrace.kernels.swiglu import pays
from headrace.kernels.swiglu_hopper import suits, swiglu_hopper

# tokens, hidden, intermediate
CASES = [
    (tokens, *features)
    for features in ((4096, 14336), (2048, 8192), (1536, 8960), (1024, 3072))
    for tokens in (256, 512, 1024, 1536, 2048, 8192)
]
TINY = (3, 64, 64)


def one_after_the_other(x: Tensor, weight: Tensor) -> Tensor:
    return silu_mul(F.linear(x, weight))


def main() -> None:
    for tokens, hidden, intermediate in cases_for(CASES, TINY):
        num_bytes = 2 * (2 * intermediate * hidden + tokens * (hidden + intermediate))
        pairs = [
            (
                torch.randn(tokens, hidden, dtype=torch.bfloat16, device=DEVICE),
                torch.randn(2 * intermediate, hidden, dtype=torch.bfloat16, device=DEVICE) * 0.02,
            )
            for _ in range(copies_for(num_bytes))
        ]
        ways = {"one after the other": one_after_the_other}
        if suits(*pairs[0]):
            processors = multiprocessors(pairs[0][0].device)
            chosen = " (chosen)" if pays(tokens, hidden, intermediate, processors) else ""
            ways[f"in one{chosen}"] = swiglu_hopper
        for name, multiply in ways.items():
            seconds = seconds_per_call([lambda x=x, w=w, f=multiply: f(x, w) for x, w in pairs])
            flops = 4 * tokens * hidden * intermediate
            report_rate("swiglu", f"{tokens} x {hidden} -> {intermediate} {name}", flops, seconds)


if __name__ == "__main__":
    main()
