"""Decode over shared prefixes: bytes that reading every row's keys apart would take, against the copy bandwidth.

Above 100% is what sharing saves.  python bench/kernels/shared_prefix.py
"""

from functools import partial

import torch
from timing import DEVICE, cases_for, report_bandwidth, seconds_per_call

from headrace.kernels.decode_attention import decode_attention, split_keys
from headrace.kernels.shared_prefix import SharedPrefixes, rows_per_tile

BLOCK_SIZE = 32

# groups, rows a group, shared keys, own keys, query heads, key heads, head size
CASES = [
    (1, 2048, 2560, 128, 16, 8, 128),
    (1, 1024, 2560, 128, 32, 8, 128),
    (16, 64, 2560, 128, 32, 8, 128),
    (1, 64, 8192, 256, 32, 8, 128),
    (8, 8, 1024, 256, 32, 8, 128),
    # many answers to each of many prompts, and the least group there is
    (256, 8, 1024, 128, 32, 8, 128),
    (256, 8, 1024, 128, 16, 8, 128),
    (500, 4, 1024, 128, 32, 8, 128),
    (500, 4, 1024, 128, 16, 8, 128),
    (1, 4, 256, 256, 32, 8, 128),
]
TINY = (2, 2, 64, 32, 4, 2, 64)


def main() -> None:
    for groups, members, shared_keys, own_keys, num_heads, kv_heads, head_dim in cases_for(CASES, TINY):
        torch.manual_seed(0)
        rows, most = groups * members, rows_per_tile(num_heads // kv_heads)
        shared_pages, own_pages = shared_keys // BLOCK_SIZE, own_keys // BLOCK_SIZE
        num_blocks = groups * shared_pages + rows * own_pages
        order = torch.randperm(num_blocks).int()
        shared_blocks = order[: groups * shared_pages].view(groups, 1, shared_pages).expand(-1, members, -1)
        own = order[groups * shared_pages :].view(rows, own_pages)
        tables = torch.cat((shared_blocks.reshape(rows, -1), own), dim=1).to(DEVICE)
        tiles = [
            (group * members + at, min(most, members - at), shared_keys)
            for group in range(groups)
            for at in range(0, members, most)
        ]
        start, count, keys = torch.tensor(tiles, dtype=torch.int32).T.contiguous().to(DEVICE)
        ints = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
        num_tiles = torch.tensor([len(tiles)], dtype=torch.int32, device=DEVICE)
        shared = SharedPrefixes(ints + shared_keys, num_tiles, start, count, keys)
        calls: dict[str, list] = {"apart": [], "shared": []}
        for _ in range(2):
            k, v = torch.randn(
                2, num_blocks, kv_heads, BLOCK_SIZE, head_dim, dtype=torch.bfloat16, device=DEVICE
            )
            q = torch.randn(rows, num_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
            slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
            context = shared_keys + own_keys
            arguments = (q, k, v, tables, slots, ints + context, context, head_dim**-0.5, torch.empty_like(q))
            for kind, prefixes in (("apart", None), ("shared", shared)):
                splits = split_keys(slots, ints + context, context, kv_heads, 2, prefixes)
                calls[kind].append(partial(decode_attention, *arguments, shared=prefixes, splits=splits))
        num_bytes = rows * (shared_keys + own_keys) * kv_heads * head_dim * 4
        for kind in calls:
            shape = f"{groups} x {members} rows {shared_keys} + {own_keys} keys {num_heads}/{kv_heads}/{head_dim} {kind}"
            report_bandwidth("shared_prefix", shape, num_bytes, seconds_per_call(calls[kind]))


if __name__ == "__main__":
    main()
