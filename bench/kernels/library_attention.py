"""Prefill attention beside torch's own: is the kernel the quicker one?

    python bench/kernels/library_attention.py

Torch's take q, k and v as they come from the projection, [B, H, T, D], all rows of equal length: they are spared the pages,
and rows of different lengths, which they would need padding for. Three questions:

- first chunks, whose keys and values also lie dense
- chunks behind cached keys: a library could take the dense part, in which every query sees every cached key. Beside ours for
  the whole chunk stand what would be left to ours, the dense part, and the gathering of its keys from their pages; to merge
  the two parts' outputs would come on top, and is not measured
- rows of different lengths, as steps have them: torch's nested tensors, by cuDNN
"""

import statistics
from collections.abc import Callable
from functools import partial

import prefill_attention
import torch
from timing import DEVICE, ON_GPU, cases_for, report_bandwidth, report_rate, seconds_per_call
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headrace.kernels import prefill_attention as module
from headrace.kernels.paged import gather_pages
from headrace.kernels.prefill_hopper import hopper_tiles

BACKENDS = (
    {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    if ON_GPU
    else {"math": SDPBackend.MATH}
)

# rows, query tokens (all keys there are), query heads, key heads, head size
FIRST_CHUNKS = [
    (16, 512, 32, 8, 128),
    (8, 1024, 32, 8, 128),
    (4, 2048, 32, 8, 128),
    (2, 4096, 32, 8, 128),
    (1, 8192, 32, 8, 128),
    (64, 128, 16, 8, 128),
    (32, 256, 16, 8, 128),
    (8, 1024, 16, 8, 128),
    (8, 1024, 12, 2, 128),
    (8, 1024, 32, 8, 64),
    (4, 2048, 32, 32, 96),
]  # fmt: skip
TINY = (2, 32, 4, 2, 64)

# rows, query tokens, cached keys, query heads, key heads, head size
LATER_CHUNKS = [
    (1, 2048, 14336, 32, 8, 128),
    (1, 8192, 8192, 32, 8, 128),
    (1, 8192, 24576, 32, 8, 128),
    (4, 2048, 6144, 32, 8, 128),
    (1, 2048, 6144, 16, 8, 128),
    (1, 4096, 12288, 32, 8, 64),
]  # fmt: skip
TINY_LATER = (2, 32, 64, 4, 2, 64)

MIXED = [30, 100, 230, 350, 470, 520, 640, 780, 990, 1200, 1500]
MIXED_HEADS = [(32, 8, 128), (32, 8, 64)]


def library(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def calls_of(
    rows: int, queries: int, keys: int, heads: tuple[int, int, int], backend: SDPBackend, *, causal: bool
) -> list[Callable[[], Tensor]]:
    num_heads, kv_heads, head_dim = heads
    calls = []
    for _ in range(2):
        q, k, v = (
            torch.randn(rows, tokens, of, head_dim, dtype=torch.bfloat16, device=DEVICE).transpose(1, 2)
            for tokens, of in ((queries, num_heads), (keys, kv_heads), (keys, kv_heads))
        )
        calls.append(partial(library, backend, q, k, v, causal=causal))
    return calls


def report_library(
    shape: str, flops: float, calls: Callable[[SDPBackend], list[Callable[[], Tensor]]]
) -> None:
    for name, backend in BACKENDS.items():
        try:
            report_rate(
                "prefill_attention", f"{shape} by torch's {name}", flops, seconds_per_call(calls(backend))
            )
        except RuntimeError as error:  # a backend need not know every head size
            print(f"library_attention {shape} {name}: {str(error).splitlines()[0]}")


def first_chunk(rows: int, tokens: int, *heads: int) -> None:
    seconds, flops = prefill_attention.measure((rows, tokens, tokens, *heads))
    shape = f"rows {rows} x {tokens} heads {'/'.join(map(str, heads))}"
    report_rate("prefill_attention", f"{shape} as a first chunk", flops, seconds)
    report_library(shape, flops, lambda backend: calls_of(rows, tokens, tokens, heads, backend, causal=True))


def later_chunk(rows: int, tokens: int, cached: int, *heads: int) -> None:
    num_heads, kv_heads, head_dim = heads
    shape = f"rows {rows} x {tokens} after {cached} heads {'/'.join(map(str, heads))}"
    seconds, flops = prefill_attention.measure((rows, tokens, tokens + cached, *heads))
    report_rate("prefill_attention", f"{shape} whole", flops, seconds)
    seconds, flops = prefill_attention.measure((rows, tokens, tokens, *heads))
    report_rate("prefill_attention", f"{shape} without the cached", flops, seconds)
    report_library(
        f"{shape} dense part",
        4.0 * rows * tokens * cached * num_heads * head_dim,
        lambda backend: calls_of(rows, tokens, cached, heads, backend, causal=False),
    )
    page = prefill_attention.BLOCK_SIZE
    caches = torch.randn(
        2, 2, rows * cached // page, kv_heads, page, head_dim, dtype=torch.bfloat16, device=DEVICE
    )
    blocks = torch.randperm(rows * cached // page, device=DEVICE).view(rows, -1)
    calls = [lambda k=k, v=v: (gather_pages(k, blocks), gather_pages(v, blocks)) for k, v in caches]
    report_bandwidth(
        "prefill_attention", f"{shape} gathering the cached", 2 * caches[0].nbytes, seconds_per_call(calls)
    )


def mixed_rows(num_heads: int, kv_heads: int, head_dim: int) -> None:
    lens = torch.tensor(MIXED, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(len(MIXED) + 1, dtype=torch.int32, device=DEVICE)
    starts[1:] = lens.cumsum(0)
    q, k, v = (
        torch.randn(sum(MIXED), heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
        for heads in (num_heads, kv_heads, kv_heads)
    )
    flops = 2.0 * num_heads * head_dim * sum(n * (n + 1) for n in MIXED)
    shape = f"{len(MIXED)} rows of {min(MIXED)} to {max(MIXED)} heads {num_heads}/{kv_heads}/{head_dim}"

    page, pages = prefill_attention.BLOCK_SIZE, [-(-n // prefill_attention.BLOCK_SIZE) for n in MIXED]
    cache = torch.randn(2, sum(pages), kv_heads, page, head_dim, dtype=torch.bfloat16, device=DEVICE)
    tables = torch.zeros(len(MIXED), max(pages), dtype=torch.int32, device=DEVICE)
    for row, (count, end) in enumerate(zip(pages, torch.tensor(pages).cumsum(0).tolist(), strict=True)):
        tables[row, :count] = torch.arange(end - count, end)
    slots = torch.arange(len(MIXED), dtype=torch.int32, device=DEVICE)
    tiles = hopper_tiles(slots, starts, lens, len(q), num_heads, cache[0])
    arguments = (q, *cache, tables, slots, starts, lens, head_dim**-0.5, torch.empty_like(q), tiles)
    ours = seconds_per_call([lambda: module.prefill_attention(*arguments)] * 2)
    report_rate("prefill_attention", shape, flops, ours)

    longest = max(MIXED)

    def nested() -> object:
        return torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, starts, starts, longest, longest, True, 0.0, True
        )

    report_rate("prefill_attention", f"{shape} by torch's cudnn, nested", flops, seconds_by_itself(nested))


def seconds_by_itself(call: Callable[[], object]) -> float:
    """Median seconds of a call that plans on the host each time, so that a graph would leave that out."""
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def main() -> None:
    torch.manual_seed(0)
    for case in cases_for(FIRST_CHUNKS, TINY):
        first_chunk(*case)
    for case in cases_for(LATER_CHUNKS, TINY_LATER):
        later_chunk(*case)
    for case in MIXED_HEADS if ON_GPU else []:
        mixed_rows(*case)


if __name__ == "__main__":
    main()
