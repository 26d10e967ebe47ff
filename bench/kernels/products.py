"""A layer's four matrix products by number of rows, as the library does them: against the larger of arithmetic and traffic.

    python bench/kernels/products.py

The products of o and down add to the residual as they are written, as in the model.
"""

from functools import partial

import torch
from timing import (
    COPY_BANDWIDTH,
    DEVICE,
    MATRIX_RATE,
    cases_for,
    copies_for,
    report_bandwidth,
    report_rate,
    seconds_per_call,
)
from torch import Tensor
from torch.nn import functional as F

# name, outputs, inputs
LAYERS = {
    "llama3-8b": [("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336)],
    "qwen3-0.6b": [("qkv", 4096, 1024), ("o", 1024, 2048), ("gate_up", 6144, 1024), ("down", 1024, 3072)],
}
ROWS = (16, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 704, 832, 1088, 2048)
CASES = [
    (model, *product, rows) for model, products in LAYERS.items() for rows in ROWS for product in products
]
TINY = ("tiny", "o", 64, 32, 4)


def add_product(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return residual.addmm_(x, weight.t())


def main() -> None:
    for model, name, outputs, inputs, rows in cases_for(CASES, TINY):
        num_bytes = 2 * (outputs * inputs + rows * (outputs + inputs))
        x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=DEVICE)
        residual = torch.randn(rows, outputs, dtype=torch.bfloat16, device=DEVICE)
        calls = []
        for _ in range(copies_for(num_bytes)):
            weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE) * 0.02
            adds = name in ("o", "down")
            calls.append(partial(add_product, residual, x, weight) if adds else partial(F.linear, x, weight))
        seconds, flops = seconds_per_call(calls), 2 * rows * outputs * inputs
        shape = f"{model} {name} {rows} x {inputs} -> {outputs}"
        if flops / MATRIX_RATE > num_bytes / COPY_BANDWIDTH:
            report_rate("product", shape, flops, seconds)
        else:
            report_bandwidth("product", shape, num_bytes, seconds)


if __name__ == "__main__":
    main()
