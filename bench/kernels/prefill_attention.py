"""Prefill attention: FLOPs of the visible keys, against the bf16 matrix rate.  python bench/kernels/prefill_attention.py"""

import itertools

import torch
from timing import DEVICE, cases_for, main_or_sweep, report_rate, seconds_per_call

from headrace.kernels import prefill_attention as module
from headrace.kernels.prefill_hopper import hopper_tiles

BLOCK_SIZE = 32

# rows, query tokens, keys in all (cached ones included), query heads, key heads, head size
CASES = [
    (1, 8192, 8192, 32, 8, 128),
    (16, 512, 512, 32, 8, 128),
    (1, 1024, 1024, 32, 8, 128),
    (1, 4096, 4096, 32, 8, 128),
    (1, 16384, 16384, 32, 8, 128),
    (1, 2048, 16384, 32, 8, 128),
    (64, 128, 1024, 16, 8, 128),
    (8, 768, 768, 32, 8, 128),
    (8, 1024, 1024, 32, 8, 128),
    (8, 1024, 1024, 16, 8, 128),
    (8, 1024, 1024, 9, 3, 64),
    (4, 2048, 2048, 32, 32, 96),
]
TINY = (2, 20, 64, 4, 2, 64)
SWEPT = [
    module.Tile(pairs, keys, warps, stages, registers)
    for pairs, keys, warps, stages, registers in itertools.product(
        (64, 128), (32, 64, 128), (4, 8), (2, 3, 4), (None, 128)
    )
    if (pairs == 128) == (warps == 8) and keys * stages <= 256
]


def measure(case: tuple) -> tuple[float, float]:
    """Seconds a call and floating-point operations that a call must do."""
    rows, queries, keys, num_heads, kv_heads, head_dim = case
    pages = keys // BLOCK_SIZE
    tables = torch.randperm(rows * pages).int().view(rows, pages).to(DEVICE)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(0, rows * queries + 1, queries, dtype=torch.int32, device=DEVICE)
    lens = torch.full((rows,), keys, dtype=torch.int32, device=DEVICE)
    calls, tiles = [], None
    for _ in range(2):
        k, v = torch.randn(
            2, rows * pages, kv_heads, BLOCK_SIZE, head_dim, dtype=torch.bfloat16, device=DEVICE
        )
        q = torch.randn(rows * queries, num_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
        # Cut once: so are a step's, for all of its layers.
        tiles = tiles or hopper_tiles(slots, starts, lens, len(q), num_heads, k)
        arguments = (q, k, v, tables, slots, starts, lens, head_dim**-0.5, torch.empty_like(q), tiles)
        calls.append(lambda arguments=arguments: module.prefill_attention(*arguments))
    visible = rows * sum(range(keys - queries + 1, keys + 1))
    return seconds_per_call(calls), 4.0 * num_heads * head_dim * visible


def report_case(case: tuple, tile: str = "") -> None:
    """Measure a case and report it. tile: what is swept (no part of Hopper's kernel), for its line."""
    seconds, flops = measure(case)
    shape = "rows {} x {} of {} heads {}/{}/{}".format(*case)
    report_rate("prefill_attention", shape + tile, flops, seconds)


def main() -> None:
    torch.manual_seed(0)
    for case in cases_for(CASES, TINY):
        report_case(case)


if __name__ == "__main__":
    main_or_sweep(main, report_case, CASES, module, SWEPT)
