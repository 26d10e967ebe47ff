"""Decode attention: bytes of K and V read, against the copy bandwidth.  python bench/kernels/decode_attention.py"""

import itertools

import torch
from timing import DEVICE, cases_for, copies_for, main_or_sweep, report_bandwidth, seconds_per_call

from headrace.kernels import decode_attention as module

BLOCK_SIZE = 32

# rows, keys a row (a pair: spread evenly between the two; a third: of one row more), query heads, key heads, head size
CASES = [
    (256, 1024, 32, 8, 128),
    (8, 32768, 32, 8, 128),
    (1024, 512, 16, 8, 128),
    (256, (64, 2048), 32, 8, 128),
    (1024, (16, 1024), 16, 8, 128),
    (64, 1024, 32, 8, 128),
    (1, 8192, 32, 8, 128),
    (256, 1024, 28, 4, 128),
    (512, 1024, 9, 3, 64),
    (256, 1024, 32, 32, 96),
    (100, (512, 512, 32768), 32, 8, 128),
    (2000, (256, 1024, 16384), 16, 8, 128),
]
TINY = (2, (10, 70), 4, 2, 64)
SWEPT = [
    module._Tile(keys, warps, stages)
    for keys, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5))
    if keys * stages <= 320 and keys >= warps * 8
]


def measure(case: tuple) -> tuple[float, int]:
    """Seconds a call and bytes of K and V that a call must read."""
    rows, keys, num_heads, kv_heads, head_dim = case
    least, most, *longer = keys if isinstance(keys, tuple) else (keys, keys)
    lens = torch.cat((torch.linspace(least, most, rows).int(), torch.tensor(longer, dtype=torch.int32)))
    rows += len(longer)
    lens = lens[torch.randperm(rows)]
    pages = (lens + BLOCK_SIZE - 1) // BLOCK_SIZE
    num_blocks = int(pages.sum())
    num_bytes = int(lens.sum()) * kv_heads * head_dim * 4
    tables = torch.zeros(rows, int(pages.max()), dtype=torch.int32)
    order, first = torch.randperm(num_blocks).int(), 0
    for row, count in enumerate(pages.tolist()):
        tables[row, :count] = order[first : first + count]
        first += count
    tables, lens, slots = (
        tables.to(DEVICE),
        lens.to(DEVICE),
        torch.arange(rows, dtype=torch.int32, device=DEVICE),
    )
    most = max(most, *longer, 1)
    splits = module.split_keys(slots, lens, most, kv_heads, 2)
    calls = []
    for _ in range(copies_for(num_bytes)):
        k, v = torch.randn(2, num_blocks, kv_heads, BLOCK_SIZE, head_dim, dtype=torch.bfloat16, device=DEVICE)
        q = torch.randn(rows, num_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
        arguments = (q, k, v, tables, slots, lens, most, head_dim**-0.5, torch.empty_like(q))
        calls.append(lambda arguments=arguments: module.decode_attention(*arguments, splits=splits))
    return seconds_per_call(calls), num_bytes


def report_case(case: tuple, tile: str = "") -> None:
    """Measure a case and report it. tile: what is swept, for its line."""
    seconds, num_bytes = measure(case)
    shape = "rows {} keys {} heads {}/{}/{}".format(*case)
    report_bandwidth("decode_attention", shape + tile, num_bytes, seconds)


def main() -> None:
    torch.manual_seed(0)
    for case in cases_for(CASES, TINY):
        report_case(case)


if __name__ == "__main__":
    main_or_sweep(main, report_case, CASES, module, SWEPT)
