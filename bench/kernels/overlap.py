"""Whether decode attention gains from running beside the matrix products of another half batch.  python bench/kernels/overlap.py

A few layers of a decode step as a CUDA graph: one batch, kernel after kernel; then two halves on two streams, so that one
half's attention runs beside the other's products, over the whole chip, and with the multiprocessors parted between the two
(green contexts, for which the package cuda-bindings is needed; torch brings it).
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.kernels.decode_attention import decode_attention
from headrace.kernels.rms_norm import add_rms_norm
from headrace.kernels.rope_cache import rope_and_cache
from headrace.kernels.silu_mul import silu_mul

LAYERS, BLOCK_SIZE = 4, 32


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "llama3-8b": Shape(4096, 14336, 32, 8, 128),
    "qwen3-0.6b": Shape(1024, 3072, 16, 8, 128),
}
CASES = [
    ("llama3-8b", 1664, 640),
    ("llama3-8b", 704, 1800),
    ("qwen3-0.6b", 2048, 600),
    ("qwen3-0.6b", 1536, 1500),
]


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * scale


class Layers:
    """Weights and caches of some layers, and rows of 40% to 100% of a context length."""

    def __init__(self, shape: Shape, rows: int, context: int) -> None:
        self.shape, self.context = shape, context
        h, i, heads, kv_heads, d = shape
        pages = -(-context // BLOCK_SIZE)
        self.caches = [bf16(2, rows * pages, kv_heads, BLOCK_SIZE, d) for _ in range(LAYERS)]
        self.qkv = [bf16((heads + 2 * kv_heads) * d, h, scale=0.02) for _ in range(LAYERS)]
        self.out = [bf16(h, heads * d, scale=0.02) for _ in range(LAYERS)]
        self.gate_up = [bf16(2 * i, h, scale=0.02) for _ in range(LAYERS)]
        self.down = [bf16(h, i, scale=0.02) for _ in range(LAYERS)]
        self.norm = torch.ones(h, dtype=torch.bfloat16, device="cuda")
        self.tables = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
        self.lens = torch.randint(int(context * 0.4), context + 1, (rows,), device="cuda").int()
        self.positions = (self.lens - 1).long()
        block = self.tables.gather(1, (self.positions // BLOCK_SIZE)[:, None])[:, 0].long()
        self.mapping = block * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.cos_sin = torch.randn(8192, d, device="cuda")


class Rows:
    """Some of the batch's rows on their way through the layers."""

    def __init__(self, layers: Layers, first: int, end: int) -> None:
        self.layers, self.part = layers, slice(first, end)
        self.slots = torch.arange(first, end, device="cuda").int()
        self.x = bf16(end - first, layers.shape.hidden)
        self.residual = torch.randn_like(self.x)
        self.kept: list[Tensor] = []  # what another stream may still read
        self.before_attention(0)

    def before_attention(self, layer: int) -> None:
        w, part = self.layers, self.part
        qkv = self.x @ w.qkv[layer].T
        self.q = rope_and_cache(
            qkv, w.positions[part], w.cos_sin, *w.caches[layer], w.mapping[part], w.shape.heads, w.shape.kv_heads
        )  # fmt: skip
        self.attended = torch.empty_like(self.q)
        self.kept += [qkv, self.q, self.attended]

    def attention(self, layer: int) -> None:
        w = self.layers
        decode_attention(
            self.q, *w.caches[layer], w.tables, self.slots, w.lens[self.part], w.context,
            w.shape.head_dim**-0.5, out=self.attended,
        )  # fmt: skip

    def after_attention(self, layer: int) -> None:
        w = self.layers
        x = add_rms_norm(self.attended.flatten(1) @ w.out[layer].T, self.residual, w.norm, 1e-6)
        hidden = silu_mul(x @ w.gate_up[layer].T)
        self.x = add_rms_norm(hidden @ w.down[layer].T, self.residual, w.norm, 1e-6)
        self.kept += [x, hidden, self.x]


def one_after_the_other(rows: Rows) -> None:
    for layer in range(LAYERS):
        rows.before_attention(layer)
        rows.attention(layer)
        rows.after_attention(layer)


def side_by_side(halves: list[Rows], attention: torch.cuda.Stream, products: torch.cuda.Stream) -> None:
    main = torch.cuda.current_stream()
    attention.wait_stream(main)
    products.wait_stream(main)
    ready: list[torch.cuda.Event] = []
    with torch.cuda.stream(products):
        for half in halves:
            half.before_attention(0)
            ready.append(products.record_event())
    for layer in range(LAYERS):
        for i, half in enumerate(halves):
            attention.wait_event(ready[i])
            with torch.cuda.stream(attention):
                half.attention(layer)
            products.wait_event(attention.record_event())
            with torch.cuda.stream(products):
                half.after_attention(layer)
                if layer + 1 < LAYERS:
                    half.before_attention(layer + 1)
                ready[i] = products.record_event()
    main.wait_stream(attention)
    main.wait_stream(products)


def parted_streams(multiprocessors: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """A stream on so many multiprocessors, and one on the rest."""
    from cuda.bindings import driver

    def done(result: tuple) -> tuple:
        assert int(result[0]) == 0, result
        return result[1:]

    (device,) = done(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    (whole,) = done(driver.cuDeviceGetDevResource(device, kind))
    groups, _, rest = done(driver.cuDevSmResourceSplitByCount(1, whole, 0, multiprocessors))
    streams = []
    for resource in (groups[0], rest):
        (description,) = done(driver.cuDevResourceGenerateDesc([resource], 1))
        default = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        (context,) = done(driver.cuGreenCtxCreate(description, device, default))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        (stream,) = done(driver.cuGreenCtxStreamCreate(context, flags, 0))
        streams.append(torch.cuda.ExternalStream(int(stream)))
    return streams[0], streams[1]


def microseconds_a_layer(call: Callable[[], object], rows: list[Rows]) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAYERS)
    for some in rows:
        some.kept.clear()
    return statistics.median(times)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="24,32,40,48,64", help="multiprocessors for attention")
    args = parser.parse_args()
    for name, count, context in CASES:
        layers = Layers(SHAPES[name], count, context)
        whole, halves = Rows(layers, 0, count), [Rows(layers, 0, count // 2), Rows(layers, count // 2, count)]
        everybody = [whole, *halves]
        serial = microseconds_a_layer(partial(one_after_the_other, whole), everybody)
        print(f"{name}, {count} rows of up to {context} keys: one after the other {serial:.0f} us a layer")
        streams = {"the whole chip": (torch.cuda.Stream(), torch.cuda.Stream())}
        streams |= {
            f"{n} multiprocessors for attention": parted_streams(n) for n in map(int, args.parts.split(","))
        }
        for what, pair in streams.items():
            both = microseconds_a_layer(partial(side_by_side, halves, *pair), everybody)
            print(f"    side by side, {what}: {both:.0f} us ({both / serial:.2f})", flush=True)


if __name__ == "__main__":
    main()
