"""Inputs for the kernels' tests: paged caches with shuffled blocks, rows of given lengths."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from headrace.kernels.edit_logits import EditTable

# By how much a result may differ from the fp32 reference: rounding of inputs to the products, and of the output.
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 4e-3, "rtol": 4e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


def assert_near(actual: Tensor, reference: Tensor) -> None:
    """Compare with an fp32 reference within what the dtype of the result allows."""
    torch.testing.assert_close(actual.float(), reference.float(), **TOLERANCE[actual.dtype])


def strided_rows(x: Tensor) -> Tensor:
    """The same values with a gap after each row, filled with NaN: whoever reads it shows."""
    wide = torch.full((x.shape[0], x.shape[1] + 16), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


@dataclass
class PagedRows:
    """Rows of a step over a paged cache. Attributes as the attention launchers name their arguments."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    slots: Tensor
    query_start: Tensor
    context_lens: Tensor
    max_context_len: int
    scale: float

    def prefill_arguments(self) -> tuple:
        """What prefill_attention_reference takes."""
        return (
            self.q, self.k_cache, self.v_cache, self.block_tables, self.slots, self.query_start,
            self.context_lens, self.scale,
        )  # fmt: skip

    def decode_arguments(self) -> tuple:
        """What decode_attention_reference takes."""
        return (
            self.q, self.k_cache, self.v_cache, self.block_tables, self.slots, self.context_lens, self.scale
        )  # fmt: skip

    def in_fp32(self) -> "PagedRows":
        """The same values, widened."""
        wide = dict(self.__dict__)
        for name in ("q", "k_cache", "v_cache"):
            wide[name] = wide[name].float()
        return PagedRows(**wide)


def edit_table(slots: int, vocab: int, device: str = "cpu") -> EditTable:
    """Edits of every kind, a kind for each of six slots in turn; random otherwise. Words of one to three tokens."""
    kinds = torch.arange(slots) % 6
    words = torch.full((slots, 5, 4), -1, dtype=torch.int32)
    for word in range(5):
        length = 1 + word % 3
        words[:, word, -length:] = torch.randint(0, vocab, (slots, length)).int()
    neutral = torch.tensor([1.0, 0.0, 0.0])
    random = torch.rand(slots, 3) + 0.5
    table = {
        "prompt_lens": torch.randint(1, 20, (slots,)).int(),
        "only_listed": (kinds == 3).int(),
        "num_listed": torch.where((kinds == 2) | (kinds == 3) | (kinds == 5), 6, 0).int(),
        "num_words": torch.where(kinds >= 4, 5, 0).int(),
        "penalties": torch.where(((kinds == 1) | (kinds == 5))[:, None], random, neutral),
        "listed": torch.stack([torch.randperm(vocab)[:6] for _ in range(slots)]).int(),
        "until": torch.randint(0, 40, (slots, 6)).int(),
        "bias": torch.randn(slots, 6) * 5,
        "words": words,
    }
    return EditTable(**{name: tensor.to(device) for name, tensor in table.items()})


def paged_rows(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    *,
    block_size: int = 32,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> PagedRows:
    """Rows of (query tokens, keys in all) for heads (Hq, Hkv, D), their blocks shuffled over the cache.

    K and V share one arena, so that a cache's blocks are strided; slots are shuffled; table entries past a row's
    blocks are -1, as stale ones may be; one spare block holds NaN, so that a stray read shows.
    """
    torch.manual_seed(seed)
    num_heads, kv_heads, head_dim = heads
    pages = [-(-context // block_size) for _, context in lengths]
    num_slots = len(lengths) + 2
    arena = torch.randn(sum(pages) + 1, 2, kv_heads, block_size, head_dim).to(dtype)
    arena[-1] = float("nan")
    order = torch.randperm(sum(pages)).int()
    slots = torch.randperm(num_slots)[: len(lengths)].int()
    block_tables = torch.full((num_slots, max([*pages, 1]) + 1), -1, dtype=torch.int32)
    first = 0
    for slot, count in zip(slots.tolist(), pages, strict=True):
        block_tables[slot, :count] = order[first : first + count]
        first += count
    query_start = [0, *accumulate(query for query, _ in lengths)]
    arena = arena.to(device)
    return PagedRows(
        q=torch.randn(query_start[-1], num_heads, head_dim).to(dtype).to(device),
        k_cache=arena[:, 0],
        v_cache=arena[:, 1],
        block_tables=block_tables.to(device),
        slots=slots.to(device),
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
        max_context_len=max(context for _, context in lengths),
        scale=head_dim**-0.5,
    )
