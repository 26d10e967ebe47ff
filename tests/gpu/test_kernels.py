"""Every Triton kernel against the fp32 reference: in bf16 on a GPU, or in fp32 and fp16 in Triton's interpreter.

tests/kernels/test_interpreted.py runs this file in the interpreter. (Its bf16 matrix products are wrong: not used.)
"""

from collections.abc import Sequence

import pytest
import torch
from kernel_cases import PagedRows, assert_near, edit_table, paged_rows, strided_rows
from torch import Tensor

from headrace.kernels import prefill_attention as prefill_module
from headrace.kernels.decode_attention import decode_attention, decode_attention_reference, split_keys
from headrace.kernels.dispatch import INTERPRETED, multiprocessors
from headrace.kernels.edit_logits import edit_logits, edit_logits_reference
from headrace.kernels.logprobs import logprobs, logprobs_reference
from headrace.kernels.mask_logits import mask_logits, mask_logits_reference
from headrace.kernels.matmul import matmul, matmul_reference
from headrace.kernels.prefill_attention import prefill_attention, prefill_attention_reference
from headrace.kernels.prefill_hopper import hopper_tiles
from headrace.kernels.query_tiles import tile_queries
from headrace.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from headrace.kernels.rope_cache import rope_and_cache, rope_and_cache_reference
from headrace.kernels.sample import NO_TOKEN, filtered_reference, sample, sample_reference
from headrace.kernels.segment_sum import segment_sum, segment_sum_reference
from headrace.kernels.shared_prefix import SharedPrefixes, rows_per_tile
from headrace.kernels.silu_mul import silu_mul, silu_mul_reference
from headrace.kernels.step_inputs import step_inputs, step_inputs_reference
from headrace.kernels.swiglu import swiglu
from headrace.kernels.swiglu_hopper import suits, swiglu_hopper

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs CUDA or TRITON_INTERPRET=1"),
]
on_gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs CUDA")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Query heads, key heads, head size: groups of 1 to 8, one that is no power of two, a head size that is none.
HEADS = [(9, 3, 64), (4, 4, 96), (8, 2, 128), (8, 1, 64), (10, 2, 128)]
# For attention, whose tiles hold whole groups: the other groups that models of head size 128 have.
GROUPED_HEADS = [*HEADS, (4, 2, 128), (6, 1, 128), (7, 1, 128)]


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit on a GPU; nearly so in the interpreter, where numpy's products depend on a row's place in a tile."""
    if ON_GPU:
        assert torch.equal(actual, expected)
    else:
        assert_near(actual, expected)


@each_dtype
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 576), (17, 1000), (5, 4096)])
def test_rms_norm_agrees_with_its_reference(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = randn(tokens, hidden, dtype=dtype), randn(hidden, dtype=dtype)
    expected = rms_norm_reference(x.float(), weight.float(), 1e-5)
    assert_near(rms_norm(x, weight, 1e-5), expected)
    assert_near(rms_norm(strided_rows(x), weight, 1e-5), expected)


@each_dtype
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 576), (17, 1000), (5, 4096)])
def test_add_rms_norm_agrees_with_its_reference(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = (
        randn(tokens, hidden, dtype=dtype),
        randn(tokens, hidden, dtype=dtype),
        randn(hidden),
    )
    summed = x + residual
    y = add_rms_norm(strided_rows(x), residual, weight.to(dtype), 1e-5)
    assert torch.equal(residual, summed)
    assert_near(y, rms_norm_reference(summed.float(), weight.to(dtype).float(), 1e-5))


@each_dtype
@pytest.mark.parametrize(("tokens", "intermediate"), [(1, 16), (3, 1536), (7, 1000), (2, 14336)])
def test_silu_mul_agrees_with_its_reference(tokens: int, intermediate: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = randn(tokens, 2 * intermediate, dtype=dtype)
    expected = silu_mul_reference(gate_up.float())
    assert_near(silu_mul(gate_up), expected)
    assert_near(silu_mul(strided_rows(gate_up)), expected)


@pytest.mark.parametrize(("tokens", "hidden", "intermediate"), [
    (1, 64, 8), (77, 256, 200), (300, 1024, 3072), (129, 192, 5504), (1500, 512, 14336), (2000, 128, 2048), (2300, 128, 1024),
], ids=str)  # fmt: skip
def test_swiglu_agrees_with_its_reference(tokens: int, hidden: int, intermediate: int) -> None:
    torch.manual_seed(0)
    x = randn(tokens, hidden, dtype=torch.bfloat16)
    weight = randn(2 * intermediate, hidden, dtype=torch.bfloat16) * hidden**-0.5
    bias = randn(2 * intermediate, dtype=torch.bfloat16)
    expected = silu_mul_reference(x.float() @ weight.float().T)
    assert_near(swiglu(x, weight), expected)
    assert_near(swiglu(x, weight, bias), silu_mul_reference(x.float() @ weight.float().T + bias.float()))
    if suits(x, weight):  # it is chosen where it is the quicker one; right it must be everywhere
        y = swiglu_hopper(x, weight)
        assert_near(y, expected)
        assert all(torch.equal(swiglu_hopper(x, weight), y) for _ in range(10))


@each_dtype
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("block_size", [16, 32])
def test_rope_and_cache_agrees_with_its_reference(
    heads: tuple[int, int, int], normed: bool, block_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    num_heads, kv_heads, head_dim = heads
    tokens = 11
    qkv = strided_rows(randn(tokens, (num_heads + 2 * kv_heads) * head_dim, dtype=dtype))
    qkv[1, -3], qkv[2, -1], qkv[3, -head_dim] = float("nan"), float("inf"), -float("inf")  # values, not keys
    positions = torch.randint(0, 50, (tokens,), device=DEVICE)
    cos_sin = randn(50, head_dim)
    mapping = torch.randperm(5 * block_size, device=DEVICE)[:tokens]
    mapping[::4] = -1
    norms = (randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)) if normed else (None, None)
    k_cache, v_cache = randn(5, 2, kv_heads, block_size, head_dim, dtype=dtype).unbind(1)
    k_expected, v_expected = k_cache.float(), v_cache.float()

    q = rope_and_cache(
        qkv, positions, cos_sin, k_cache, v_cache, mapping, num_heads, kv_heads, *norms, eps=1e-5
    )

    wide_norms = [norm.float() if norm is not None else None for norm in norms]
    expected = rope_and_cache_reference(
        qkv.float(),
        positions,
        cos_sin,
        k_expected,
        v_expected,
        mapping,
        num_heads,
        kv_heads,
        *wide_norms,
        1e-5,
    )
    assert_near(q, expected)
    assert k_expected.isnan().sum() == 3
    assert torch.equal(k_cache.isnan(), k_expected.isnan())
    assert_near(k_cache.nan_to_num(), k_expected.nan_to_num())
    assert torch.equal(v_cache.float(), v_expected)


# Rows, inputs, outputs: one of each tile's edges, sizes that are no multiples of a tile, a head's many outputs.
PRODUCTS = [(1, 64, 96), (3, 576, 960), (33, 100, 33), (64, 130, 129), (130, 256, 64)]


@each_dtype
@pytest.mark.parametrize(("tokens", "in_features", "out_features"), PRODUCTS)
@pytest.mark.parametrize("biased", [False, True])
def test_matmul_agrees_with_its_reference(
    tokens: int, in_features: int, out_features: int, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = randn(tokens, in_features, dtype=dtype)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(dtype).to(DEVICE)
    bias = randn(out_features, dtype=dtype) if biased else None
    expected = matmul_reference(x.float(), weight.float(), bias.float() if bias is not None else None)
    assert_near(matmul(x, weight, bias), expected)
    assert_near(matmul(strided_rows(x), weight, bias), expected)


@each_dtype
def test_a_row_s_matmul_depends_neither_on_its_place_nor_on_other_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = randn(150, 200, dtype=dtype), (torch.randn(140, 200) / 200**0.5).to(dtype).to(DEVICE)
    together = matmul(x, weight)
    for start, end in ((0, 1), (149, 150), (7, 90), (20, 21)):
        assert_same_bits(matmul(x[start:end], weight), together[start:end])


# (query tokens, keys in all): one token, a block's edges, a tile's edges, a chunk after cached keys, an empty row.
PREFILLS = {
    "one token": [(1, 1)],
    "block edges": [(31, 31), (32, 32), (33, 33), (15, 47), (1, 64)],
    "tile edges": [(127, 127), (129, 129), (42, 42), (43, 171)],
    "chunks": [(7, 300), (0, 0), (64, 257), (100, 100)],
}


@pytest.fixture(params=["any GPU", pytest.param("Hopper", marks=on_gpu_only)])
def prefill_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """prefill_attention with the kernel for any GPU, or with the one that it chooses on a Hopper GPU."""
    if request.param == "any GPU":
        monkeypatch.setattr(prefill_module, "hopper_tiles", lambda *_: None)


@each_dtype
@pytest.mark.parametrize("lengths", PREFILLS.values(), ids=PREFILLS.keys())
@pytest.mark.parametrize("heads", GROUPED_HEADS, ids=str)
@pytest.mark.usefixtures("prefill_kernel")
def test_prefill_attention_agrees_with_its_reference(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows = paged_rows(lengths, heads, dtype=dtype, device=DEVICE)
    out = torch.full_like(rows.q, float("nan"))
    prefill_attention(*rows.prefill_arguments(), out)
    assert_near(out, prefill_attention_reference(*rows.in_fp32().prefill_arguments()))


# Both edges of a tile of keys and of a tile of queries lie among the chunks' ends.
@each_dtype
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 96), (8, 2, 128), (6, 1, 128)], ids=str)
def test_batch_invariant_prefill_gives_a_query_the_same_bits_in_any_chunks(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    length = 2000 if ON_GPU else 150
    rows = paged_rows([(length, length), (0, 0)], heads, dtype=dtype, device=DEVICE)
    whole = prefill_attention(*rows.prefill_arguments(), batch_invariant=True)
    assert_near(whole, prefill_attention_reference(*rows.in_fp32().prefill_arguments()))
    for start, end in ((0, 1), (0, 31), (31, 32), (64, 65), (65, 149), (100, length), (length - 1, length)):
        part = prefill_attention(
            rows.q[start:end], rows.k_cache, rows.v_cache, rows.block_tables, rows.slots[:1],
            torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
            torch.tensor([end], dtype=torch.int32, device=DEVICE), rows.scale, batch_invariant=True,
        )  # fmt: skip
        assert_same_bits(part, whole[start:end])


def spoil(rows: PagedRows, row: int, position: int) -> None:
    """Make a row's key at this position NaN."""
    size = rows.k_cache.shape[2]
    block = int(rows.block_tables[rows.slots[row], position // size])
    rows.k_cache[block, :, position % size] = float("nan")


@each_dtype
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128)], ids=str)
@pytest.mark.usefixtures("prefill_kernel")
def test_a_key_that_is_nan_spoils_in_prefill_the_queries_that_see_it_and_no_others(
    heads: tuple[int, int, int], batch_invariant: bool, dtype: torch.dtype
) -> None:
    rows = paged_rows([(40, 70), (33, 33), (64, 300), (1, 5)], heads, dtype=dtype, device=DEVICE)
    sound = prefill_attention(*rows.prefill_arguments(), batch_invariant=batch_invariant)
    spoil(rows, 0, 50)  # the query at 30 is the row's first
    spoil(rows, 2, 299)
    out = prefill_attention(*rows.prefill_arguments(), batch_invariant=batch_invariant)
    sees = torch.zeros(len(out), dtype=torch.bool, device=DEVICE)
    sees[20:40] = sees[136] = True
    assert out[sees].isnan().all()
    assert_near(out[~sees], sound[~sees])


@each_dtype
def test_batch_invariant_prefill_gives_a_row_without_keys_zeros(dtype: torch.dtype) -> None:
    rows = paged_rows([(1, 40), (1, 0), (1, 7)], (8, 2, 64), dtype=dtype, device=DEVICE)
    rows.slots[1] = -1  # as padding rows of a captured graph have it
    out = torch.full_like(rows.q, float("nan"))
    prefill_attention(*rows.prefill_arguments(), out=out, batch_invariant=True)
    assert_near(out, decode_attention_reference(*rows.in_fp32().decode_arguments()))


@on_gpu_only
@pytest.mark.parametrize("heads", GROUPED_HEADS, ids=str)
def test_prefill_attention_agrees_with_its_reference_over_many_tiles_of_keys(
    heads: tuple[int, int, int],
) -> None:
    lengths = [(200, 2000), (1, 1), (513, 513), (1300, 1300), (33, 3000)]
    rows = paged_rows(lengths, heads, dtype=torch.bfloat16, device=DEVICE)
    out = torch.full_like(rows.q, float("nan"))
    prefill_attention(*rows.prefill_arguments(), out)
    assert_near(out, prefill_attention_reference(*rows.in_fp32().prefill_arguments()))


@on_gpu_only
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128), (7, 1, 128)], ids=str)
def test_a_step_s_tiles_of_many_prefill_rows_serve_one_layer_after_another(
    heads: tuple[int, int, int],
) -> None:
    lengths = [(queries, queries + 5 * row) for row, queries in enumerate([*range(1, 700, 7), 0, 3000])]
    rows = paged_rows(lengths, heads, dtype=torch.bfloat16, device=DEVICE)
    expected = prefill_attention_reference(*rows.in_fp32().prefill_arguments())
    tiles = hopper_tiles(rows.slots, rows.query_start, rows.context_lens, len(rows.q), heads[0], rows.k_cache)
    first = prefill_attention(*rows.prefill_arguments(), tiles=tiles)
    assert_near(first, expected)
    for _ in range(20):  # programs draw their work: it falls to others each time
        out = torch.full_like(rows.q, float("nan"))
        assert torch.equal(prefill_attention(*rows.prefill_arguments(), out, tiles), first)
        assert tiles is None or not tiles.progress[1]


@pytest.mark.parametrize("tile_tokens", [32, 18, 128])
@pytest.mark.parametrize("lengths", [
    [(1, 1)], [(0, 0), (128, 128), (129, 1000), (0, 0)], [(0, 0)], [(n % 80, n % 80 + n) for n in range(300)], [(9000, 70_000)],
], ids=["one token", "edges", "nothing", "many rows", "many tiles"])  # fmt: skip
def test_prefill_s_tiles_have_every_query_token_once(
    lengths: list[tuple[int, int]], tile_tokens: int
) -> None:
    queries, contexts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE).T.contiguous()
    starts = torch.cat((queries.new_zeros(1), queries.cumsum(0))).int()
    slots = torch.randperm(len(lengths)).int().to(DEVICE)
    tiles = tile_queries(slots, starts, contexts, int(starts[-1]), tile_tokens)
    expected = [
        [start + at, query_len - at, context - query_len + at, slot]
        for start, (query_len, context), slot in zip(starts.tolist(), lengths, slots.tolist(), strict=False)
        for at in range(0, query_len, tile_tokens)
    ]
    assert tiles.progress.tolist() == [len(expected), 0]
    assert tiles.table[: len(expected)].tolist() == expected


@each_dtype
@pytest.mark.parametrize("block_size", [16, 48, 64, 128])
def test_attention_reads_blocks_of_any_size(block_size: int, dtype: torch.dtype) -> None:
    rows = paged_rows([(5, 150), (70, 70)], (4, 2, 64), block_size=block_size, dtype=dtype, device=DEVICE)
    out = prefill_attention(*rows.prefill_arguments())
    assert_near(out, prefill_attention_reference(*rows.in_fp32().prefill_arguments()))

    rows = paged_rows([(1, 150), (1, 70)], (4, 2, 64), block_size=block_size, dtype=dtype, device=DEVICE)
    out = decode_attention(*rows.decode_arguments()[:-1], rows.max_context_len, rows.scale)
    assert_near(out, decode_attention_reference(*rows.in_fp32().decode_arguments()))


# Keys of each row: none, one, a block's edges, a tile's edges.
DECODES = [0, 1, 31, 32, 33, 64, 65, 255, 256, 257, 400, 0]


# A bound far above the lengths makes room for splits that nobody needs, as a captured graph does.
@each_dtype
@pytest.mark.parametrize(
    ("lengths", "max_context_len"),
    [([1], 1), ([0, 400], 20_000), ([30, 2600, 0, 257], 2600), (DECODES, 400), (DECODES, 20_000)],
    ids=["one key", "room to spare", "a long one", "short ones", "short ones and room to spare"],
)
@pytest.mark.parametrize("heads", GROUPED_HEADS, ids=str)
def test_decode_attention_agrees_with_its_reference(
    lengths: list[int], heads: tuple[int, int, int], max_context_len: int, dtype: torch.dtype
) -> None:
    rows = paged_rows([(1, length) for length in lengths], heads, dtype=dtype, device=DEVICE)
    out = torch.full_like(rows.q, float("nan"))
    decode_attention(*rows.decode_arguments()[:-1], max_context_len, rows.scale, out=out)
    assert_near(out, decode_attention_reference(*rows.in_fp32().decode_arguments()))


@pytest.mark.parametrize(
    ("lengths", "kv_heads"),
    [
        ([0], 8), ([1], 1), ([511, 512, 513], 1), ([0, 0, 5000, 3, 0], 2), ([50_000] + [100] * 40, 8),
        ([700] * 1100, 3), (list(range(0, 4000, 70)), 8), ([9000] * 3, 3000),
    ],
    ids=lambda case: f"{len(case)} rows of {max(case)}" if isinstance(case, list) else f"{case} heads",
)  # fmt: skip
def test_splits_have_every_key_once_are_about_equal_and_the_longest_come_first(
    lengths: list[int], kv_heads: int
) -> None:
    contexts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    slots = torch.randperm(len(lengths)).int().to(DEVICE)
    splits = split_keys(slots, contexts, max(max(lengths), 1), kv_heads, itemsize=2)
    assert splits is not None
    assert not splits.arrived.any()
    row, slot, start, end, split, count = splits.table[:, splits.table[0] >= 0].tolist()
    assert sorted(set(row)) == list(range(len(lengths)))
    for i, (length, own_slot) in enumerate(zip(lengths, slots.tolist(), strict=True)):
        own = range(row.index(i), row.index(i) + row.count(i))  # side by side
        assert [(row[j], slot[j], split[j], count[j]) for j in own] == [
            (i, own_slot, number, len(own)) for number in range(len(own))
        ]
        assert [start[j] for j in own] == [0, *(end[j] for j in own[:-1])]
        assert end[own[-1]] == length
    tiles = [-(-(end[j] - start[j]) // 64) for j in range(len(row)) if split[j] == 0]
    assert tiles == sorted(tiles, reverse=True), "a row with longer splits comes first"
    a_program = sum(lengths) * kv_heads / (12 * multiprocessors(contexts.device))
    assert max(a - b for a, b in zip(end, start, strict=True)) < 2 * max(512, a_program) + 64


@each_dtype
def test_a_step_s_splits_serve_one_layer_after_another(dtype: torch.dtype) -> None:
    rows = paged_rows([(1, 900), (1, 40), (1, 2000)], (8, 2, 64), dtype=dtype, device=DEVICE)
    splits = split_keys(rows.slots, rows.context_lens, 2000, 2, rows.q.itemsize)
    expected = decode_attention_reference(*rows.in_fp32().decode_arguments())
    for _ in range(3):
        out = decode_attention(*rows.decode_arguments()[:-1], 2000, rows.scale, splits=splits)
        assert_near(out, expected)


def share(
    rows: PagedRows, groups: list[tuple[int, int]], most: int, spare: Sequence[tuple[int, int, int]] = ()
) -> SharedPrefixes:
    """Let the first rows share prefixes: groups of (rows, shared keys), cut into tiles of ``most`` rows.

    spare: tiles beyond those, which are not to be looked at.
    """
    prefix_lens, tiles, first = torch.zeros(len(rows.slots), dtype=torch.int32), [], 0
    for count, shared in groups:
        members = rows.slots[first : first + count].long()
        rows.block_tables[members, : shared // 32] = rows.block_tables[members[0], : shared // 32].clone()
        prefix_lens[first : first + count] = shared
        if shared:
            tiles += [(first + at, min(most, count - at), shared) for at in range(0, count, most)]
        first += count
    num_tiles = torch.tensor([len(tiles)], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([*tiles, *spare], dtype=torch.int32, device=DEVICE).T.contiguous()
    return SharedPrefixes(prefix_lens.to(DEVICE), num_tiles, *table)


def assert_sharing_changes_nothing(rows: PagedRows, max_context_len: int, shared: SharedPrefixes) -> None:
    out = torch.full_like(rows.q, float("nan"))
    decode_attention(*rows.decode_arguments()[:-1], max_context_len, rows.scale, out=out, shared=shared)
    assert_near(out, decode_attention_reference(*rows.in_fp32().decode_arguments()))


@each_dtype
@pytest.mark.parametrize("max_context_len", [1950, 20_000], ids=["tight", "room to spare"])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 96), (8, 1, 128), (7, 1, 128)], ids=str)
def test_rows_that_share_a_prefix_decode_as_if_they_did_not(
    heads: tuple[int, int, int], max_context_len: int, dtype: torch.dtype
) -> None:
    most = rows_per_tile(heads[0] // heads[1])
    big = most + 3 if most < 64 else 5  # a group of more than one tile, where that is quick
    # (rows, shared keys): alone, a group, alone, one that ends within a tile of keys, a group of several tiles
    groups = [(1, 0), (5, 320), (2, 0), (2, 96), (big, 32)]
    lengths = [shared + 1 + (7 * row) % 50 for count, shared in groups for row in range(count)] + [0]
    # several splits, of which the first goes on from the prefix
    lengths[2], lengths[4] = 320 + 1100, 320 + 1600
    rows = paged_rows([(1, length) for length in lengths], heads, dtype=dtype, device=DEVICE)
    shared_prefixes = share(rows, groups, most, spare=[(1, 5, 32)] * 3)
    assert_sharing_changes_nothing(rows, max_context_len, shared_prefixes)


# Programs for all 24 pieces in turn; for splits of which the last is missing where keys are few; for all splits.
@pytest.mark.parametrize("processors", [1, 40, 60])
@each_dtype
def test_rows_that_share_a_prefix_in_many_small_groups_decode_as_if_they_did_not(
    dtype: torch.dtype, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.kernels.shared_prefix.multiprocessors", lambda device: processors)
    groups = [(2, 32 * (1 + group % 9)) for group in range(12)]
    lengths = [(1, shared + 1 + row) for count, shared in groups for row in range(count)]
    rows = paged_rows(lengths, (4, 2, 64), dtype=dtype, device=DEVICE)
    assert_sharing_changes_nothing(rows, 300, share(rows, groups, most=64))


@each_dtype
@pytest.mark.parametrize("max_context_len", [400, 20_000], ids=["tight", "room to spare"])
def test_a_key_that_is_nan_spoils_the_rows_that_decode_over_it_and_no_others(
    max_context_len: int, dtype: torch.dtype
) -> None:
    groups = [(1, 0), (4, 128), (4, 96), (1, 0)]
    lengths = [(1, shared + 30 + row) for count, shared in groups for row in range(count)]
    rows = paged_rows(lengths, (4, 2, 64), dtype=dtype, device=DEVICE)
    shared = share(rows, groups, most=64)
    arguments = (*rows.decode_arguments()[:-1], max_context_len, rows.scale)
    sound = decode_attention(*arguments, shared=shared)
    spoil(rows, 1, 100)  # of the first group's prefix
    spoil(rows, 5, 110)  # behind that of the second, a row's own
    out = decode_attention(*arguments, shared=shared)
    sees = torch.zeros(len(out), dtype=torch.bool, device=DEVICE)
    sees[1:6] = True
    assert out[sees].isnan().all()
    assert_near(out[~sees], sound[~sees])
    alone = decode_attention(*arguments)
    assert torch.equal(alone.isnan(), out.isnan())


@each_dtype
def test_rows_that_share_a_prefix_no_more_decode_in_a_step_with_room_for_tiles(dtype: torch.dtype) -> None:
    rows = paged_rows([(1, 40), (1, 100)], (4, 2, 64), dtype=dtype, device=DEVICE)
    assert_sharing_changes_nothing(rows, 100, share(rows, [(2, 0)], most=64, spare=[(0, 2, 32)] * 2))


@pytest.mark.parametrize("filtered", [False, True])
def test_sampling_by_lines_takes_their_parameters_and_keeps_the_tokens_there(*, filtered: bool) -> None:
    torch.manual_seed(0)
    logits, lines = randn(6, 500) * 3, torch.tensor([7, 0, 3, 9, 4, 1], device=DEVICE)
    number = torch.arange(10, device=DEVICE)
    table = (
        number % 3 / 2.0,
        (number % 4 * filtered).int(),
        torch.where(number % 2 == 0, 0.8 if filtered else 1.0, 1.0),
        number * 0.0,
        number * 11,
    )
    positions = torch.arange(6, device=DEVICE) + 40
    last_tokens = torch.full((10,), -7, device=DEVICE)
    given = {"no_filters": not filtered}
    tokens = sample(logits, *table, positions, lines=lines, last_tokens=last_tokens, **given)
    assert torch.equal(tokens, sample(logits, *(of_all[lines] for of_all in table), positions, **given))
    assert torch.equal(last_tokens[lines], tokens)
    assert last_tokens[[2, 5, 6, 8]].tolist() == [-7] * 4


@each_dtype
@pytest.mark.parametrize("vocab", [5, 1000, 4097, 9000])
def test_sampling_chooses_the_reference_s_tokens(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = 24
    logits = strided_rows(randn(rows, vocab, dtype=dtype) * 3)
    logits[0] = 1.0  # all equal
    logits[1, vocab // 2 :] = float("-inf")
    kinds = torch.arange(rows, device=DEVICE)
    arguments = (
        torch.where(kinds % 4 == 0, 0.0, 0.3 + kinds / rows).float(),
        torch.where(kinds % 3 == 1, kinds % 7 + 1, 0).int(),
        torch.where(kinds % 5 == 2, 0.7, 1.0).float(),
        torch.where(kinds % 7 == 3, 0.1, 0.0).float(),
        kinds * (1 << 33) - 7,
        kinds + 100,
    )
    assert torch.equal(sample(logits, *arguments), sample_reference(logits, *arguments))

    unfiltered = (arguments[0], arguments[1] * 0, arguments[2] * 0 + 1, arguments[3] * 0, *arguments[4:])
    chosen = sample(logits, *unfiltered, no_filters=True)
    assert torch.equal(chosen, sample_reference(logits, *unfiltered))
    assert torch.equal(chosen, sample(logits, *unfiltered))

    greedy = sample(logits, arguments[0] * 0, *arguments[1:], all_greedy=True)
    assert torch.equal(greedy, logits.float().argmax(dim=-1))


@each_dtype
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0], ids=["equal", "flat", "peaked"])
def test_sampling_with_top_p_draws_until_a_token_passes(spread: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    rows, vocab = 32, 3000
    logits = randn(rows, vocab, dtype=dtype) * spread
    kinds = torch.arange(rows, device=DEVICE)
    arguments = (
        torch.full((rows,), 0.8, device=DEVICE),
        torch.where(kinds % 8 == 5, 700, 0).int(),
        torch.tensor([0.0, 0.01, 0.2, 0.6], device=DEVICE).repeat(rows // 4),
        torch.where(kinds % 8 == 7, 0.01, 0.0).float(),
        kinds,
        kinds * 3,
    )
    assert torch.equal(sample(logits, *arguments), sample_reference(logits, *arguments))


@pytest.mark.parametrize("logit", [-1e30, float("-inf")])
def test_sampling_ends_where_no_score_is_finite(logit: float) -> None:
    rows = torch.full((2, 3000), logit, device=DEVICE)
    rows[:, :1000] *= 1.5
    ones = torch.ones(2, device=DEVICE)
    tokens = sample(rows, ones * 1e-30, (ones * 0).int(), ones * 0.5, ones * 0, ones.long(), ones.long())
    assert ((tokens >= 0) & (tokens < 3000)).all()


@pytest.mark.parametrize("temperature", [1e-15, 1e-30, 1e-45])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_sampling_chooses_the_largest_of_edited_logits_at_the_lowest_temperatures(
    temperature: float, filters: dict[str, float]
) -> None:
    rows = randn(4, 3000) * 1e18  # as the smallest penalty makes of what was said
    rows[1, 7:] = float("-inf")
    ones, kinds = torch.ones(4, device=DEVICE), torch.arange(4, device=DEVICE)
    given = [
        ones * filters.get(name, default) for name, default in (("top_k", 0), ("top_p", 1), ("min_p", 0))
    ]
    tokens = sample(rows, ones * temperature, given[0].int(), *given[1:], kinds, kinds)
    assert torch.equal(tokens, rows.argmax(dim=-1))


# Of either sign: by its bits one NaN is above all numbers, and one below.
@each_dtype
@pytest.mark.parametrize("logit", [float("nan"), -float("nan"), float("inf")], ids=["nan", "-nan", "inf"])
@pytest.mark.parametrize("places", [slice(None), slice(None, None, 2), 0, 4500], ids=str)
def test_sampling_chooses_no_token_where_a_logit_is_no_finite_number(
    places: int | slice, logit: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows, vocab = 14, 4501
    logits = strided_rows(randn(rows, vocab, dtype=dtype) * 3)
    logits[:, 1000:2000] = float("-inf")  # kept out, which spoils nothing
    logits[::2, places] = logit
    kinds = torch.arange(rows, device=DEVICE) // 2
    arguments = (
        torch.where(kinds == 0, 0.0, 0.7).float(),
        torch.where((kinds == 1) | (kinds == 6), 5, 0).int(),
        torch.where(kinds == 2, 0.5, torch.where(kinds == 6, 0.9, 1.0)).float(),
        torch.where((kinds == 3) | (kinds == 6), 0.05, 0.0).float(),
        kinds,
        kinds + 7,
    )
    unfiltered = (arguments[0], arguments[1] * 0, arguments[2] * 0 + 1, arguments[3] * 0, *arguments[4:])
    greedy = (arguments[0] * 0, *arguments[1:])
    for chosen, given in (
        (sample(logits, *arguments), arguments),
        (sample(logits, *unfiltered), unfiltered),
        (sample(logits, *unfiltered, no_filters=True), unfiltered),
        (sample(logits, *greedy), greedy),
        (sample(logits, *greedy, all_greedy=True), greedy),
    ):
        assert (chosen[::2] == NO_TOKEN).all()
        assert torch.equal(chosen, sample_reference(logits, *given))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_p": 0.85},
        {"min_p": 0.2},
        {"temperature": 1.5, "min_p": 0.02, "top_k": 4, "top_p": 0.9},
    ],
    ids=str,
)
def test_sampling_draws_tokens_as_often_as_their_probability_says(options: dict[str, float]) -> None:
    logits = torch.tensor([0.1, 1.2, 0.9, -0.4, 0.4])
    vocab, draws = len(logits), 10_000 if ON_GPU else 40  # the interpreter takes some 50 ms a draw
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    dtypes = {"top_k": torch.int32}
    parameters = [
        torch.full((draws,), value, dtype=dtypes.get(name, torch.float32), device=DEVICE)
        for name, value in (defaults | options).items()
    ]
    seeds, positions = torch.arange(draws, device=DEVICE) // 8, torch.arange(draws, device=DEVICE) % 8
    tokens = sample(logits.expand(draws, -1).to(DEVICE), *parameters, seeds, positions)
    one = [parameter[:1].cpu() for parameter in parameters]
    expected = draws * filtered_reference(logits[None], *one)[0].softmax(-1)
    counts = torch.bincount(tokens.cpu(), minlength=vocab)
    kept = expected > 0
    assert not counts[~kept].any()
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert freedom > 0
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


@each_dtype
def test_the_edges_of_the_filters_keep_the_most_likely_token(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = randn(6, 777, dtype=dtype)
    kinds = torch.arange(6, device=DEVICE)
    arguments = (
        torch.full((6,), 1.5, device=DEVICE),
        torch.where(kinds == 0, 1, 0).int(),
        torch.where(kinds == 1, 0.0, torch.where(kinds == 2, 1e-6, 1.0)).float(),
        torch.where(kinds == 3, 1.0, 0.0).float(),
        kinds,
        kinds,
    )
    assert torch.equal(sample(logits, *arguments)[:4], logits[:4].argmax(dim=-1))


@each_dtype
def test_edits_of_logits_agree_with_their_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    slots, vocab = 14, 1500
    logits = strided_rows(randn(20, vocab, dtype=dtype) * 3)
    table = edit_table(slots, vocab, DEVICE)
    lengths = torch.randint(1, 60, (slots,)).int()
    pages = torch.randint(0, 40, (slots * 4, 16)).int().to(DEVICE)  # few tokens, so that many are repeated
    block_tables = torch.randperm(slots * 4).view(slots, 4).int()
    for slot, length in enumerate(lengths.tolist()):  # let each slot's second word be nearly said
        said = pages[block_tables[slot].long()].flatten()[:length]
        if length > 1:
            table.words[slot, 1, -2] = said[-1]
            table.words[slot, 2, -3:-1] = said[-2:]
    arguments = [
        logits, torch.randperm(20)[:slots].int().to(DEVICE), torch.randperm(slots).int().to(DEVICE),
        lengths.to(DEVICE), pages, block_tables.to(DEVICE), table,
    ]  # fmt: skip
    arguments[3] = arguments[3][arguments[2].long()]
    counts = torch.zeros(4, vocab, dtype=torch.int32, device=DEVICE)
    edited = edit_logits(*arguments, counts)
    torch.testing.assert_close(edited, edit_logits_reference(*arguments), atol=1e-5, rtol=1e-5)
    assert not counts.any(), "what was counted must be put back"
    assert (edited != logits[arguments[1].long()].float()).any(dim=1).sum() >= slots // 2


@each_dtype
def test_logprobs_agree_with_their_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = strided_rows(randn(7, 4100, dtype=dtype) * 3)
    logits[3, 4:] = float("-inf")
    rows = torch.tensor([6, 3, 0], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([20, 4, 0], dtype=torch.int32, device=DEVICE)
    tokens = torch.randint(0, 4, (7,)).to(DEVICE)
    assert_logprobs(*logprobs(logits, rows, tokens, counts, 20), logits, rows, tokens, counts)


# One token alone, all of the vocabulary, a tile of 2,048 and one token less or more, several tiles.
@each_dtype
@pytest.mark.parametrize(
    ("lines", "vocab", "width"),
    [(1, 1, 1), (1, 31, 31), (1, 2048, 3), (2, 2047, 2), (5, 2049, 7), (4, 6145, 20)],
)
def test_logprobs_agree_with_their_reference_at_odd_sizes(
    lines: int, vocab: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits = strided_rows(randn(lines, vocab, dtype=dtype) * 3)
    rows = torch.randperm(lines).int().to(DEVICE)
    counts = torch.arange(width, width - lines, -1).clamp(min=0).int().to(DEVICE)
    tokens = torch.randint(0, vocab, (lines,)).to(DEVICE)
    assert_logprobs(*logprobs(logits, rows, tokens, counts, width), logits, rows, tokens, counts)


@each_dtype
@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
def test_logprobs_are_nan_where_a_logit_is_no_finite_number_also_where_no_token_was_chosen(
    logit: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits = randn(5, 4100, dtype=dtype)
    logits[1, 4000] = logits[3] = logit
    rows = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE)
    tokens = torch.tensor([3, -1, 5, -1, 7], device=DEVICE)
    values, _ = logprobs(logits, rows, tokens, torch.full_like(rows, 2), 2)
    assert values[:, 0].isnan().tolist() == [False, True, False, True]
    expected, _ = logprobs_reference(logits, rows, tokens, 2)
    assert torch.equal(expected[:, 0].isnan(), values[:, 0].isnan())
    torch.testing.assert_close(values[::2], expected[::2], atol=1e-4, rtol=1e-4)


def assert_logprobs(
    values: Tensor, ids: Tensor, logits: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor
) -> None:
    """values, ids: what logprobs gave for rows of logits, and the likeliest tokens that each of them wants."""
    expected, _ = logprobs_reference(logits, rows, tokens, ids.shape[1])
    torch.testing.assert_close(values[:, 0], expected[:, 0], atol=1e-4, rtol=1e-4)
    for row, count in enumerate(counts.tolist()):
        torch.testing.assert_close(
            values[row, 1 : count + 1], expected[row, 1 : count + 1], atol=1e-4, rtol=1e-4
        )
        chosen = ids[row, :count].long()
        assert len(set(chosen.tolist())) == count
        by_id = logits[rows[row]].float().log_softmax(-1)[chosen]
        torch.testing.assert_close(values[row, 1 : count + 1], by_id, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("vocab", [31, 4096, 9001])
def test_masks_keep_the_same_tokens_out_as_their_reference(vocab: int) -> None:
    torch.manual_seed(0)
    logits = strided_rows(randn(5, vocab))
    masks = torch.randint(-(2**31), 2**31, (4, -(-vocab // 32))).int().to(DEVICE)
    masks[3] = -1
    lines = torch.tensor([2, -1, 0, 3, 2], dtype=torch.int32, device=DEVICE)
    expected = logits.clone()
    mask_logits_reference(expected, masks, lines)
    before = logits.clone()
    mask_logits(logits, masks, lines)
    torch.testing.assert_close(logits, expected, atol=0, rtol=0)
    torch.testing.assert_close(logits[[1, 3]], before[[1, 3]], atol=0, rtol=0)
    for row, line in ((0, 2), (2, 0), (4, 2)):
        allowed = [masks[line, token // 32].item() >> token % 32 & 1 for token in range(vocab)]
        assert logits[row].isfinite().tolist() == [bool(bit) for bit in allowed]


def test_step_inputs_agree_with_their_reference() -> None:
    torch.manual_seed(0)
    lengths = torch.randint(0, 9, (300,))
    query_start = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    tokens = int(query_start[-1])
    slots = torch.randperm(310)[:300].int()
    slots[::17] = -1
    token_ids = torch.randint(-1, 50, (tokens + 13,))
    arguments = [
        token_ids.clamp(min=-1), query_start, slots, torch.randint(0, 100, (300,)).int(),
        torch.randint(-1, 1000, (310,)), torch.randint(0, 1 << 26, (310, 8)).int(),
    ]  # fmt: skip
    arguments[5] = (
        torch.randperm(310 * 16).view(310, 16).int()
    )  # no block twice, so that one token writes each place
    pages, expected_pages = (torch.full((310 * 16, 16), -9, dtype=torch.int32) for _ in range(2))
    pages = pages.to(DEVICE)
    step_inputs(*[argument.to(DEVICE) for argument in arguments], 16, pages)
    step_inputs_reference(*arguments, 16, expected_pages)
    assert torch.equal(pages.cpu(), expected_pages)
    arguments[5] = torch.randint(0, 1 << 26, (310, 8)).int()
    actual = step_inputs(*[argument.to(DEVICE) for argument in arguments], 16)
    for ours, expected in zip(actual, step_inputs_reference(*arguments, 16), strict=True):
        assert torch.equal(ours.cpu(), expected)


@each_dtype
@pytest.mark.parametrize("width", [1, 576, 1000])
def test_sums_of_runs_of_rows_agree_with_their_reference(dtype: torch.dtype, width: int) -> None:
    x = strided_rows(randn(70, width, dtype=dtype))
    start, length = (torch.tensor(n, device=DEVICE).int() for n in ([5, 0, 69, 3], [40, 1, 1, 0]))
    expected = segment_sum_reference(x.double().float(), start, length)
    torch.testing.assert_close(segment_sum(x, start, length), expected, atol=1e-4, rtol=1e-5)
    assert segment_sum(x, start[:0], length[:0]).shape == (0, width)


# How many values stand before those that a test looks at: on a GPU more than 32 bits count, too.
each_distance = pytest.mark.parametrize(
    "distance", [2**12, pytest.param(2**31, marks=on_gpu_only)], ids=["2^12", "2^31"]
)


def skip_without_room_for(num_bytes: int) -> None:
    """Skip the test where a GPU has less memory left than that, and 1 GiB for all else."""
    if ON_GPU:
        torch.cuda.empty_cache()
        if torch.cuda.mem_get_info()[0] < num_bytes + 2**30:
            pytest.skip(f"needs {num_bytes / 2**30 + 1:.0f} GiB of GPU memory")


def behind(count: int, rows: Tensor) -> Tensor:
    """The rows with so many rows of zeros before them."""
    x = torch.zeros(count + len(rows), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    x[count:] = rows
    return x


def move_blocks_behind(distance: int, rows: PagedRows) -> None:
    """Move the rows' blocks to the end of a larger cache, so many values from its beginning."""
    count = distance // rows.k_cache.stride(0) + 1
    arena = behind(count, torch.stack((rows.k_cache, rows.v_cache), dim=1))
    rows.k_cache, rows.v_cache = arena.unbind(1)
    rows.block_tables = torch.where(rows.block_tables >= 0, rows.block_tables + count, rows.block_tables)


@each_distance
def test_attention_reads_distant_blocks_and_new_keys_and_values_get_there(distance: int) -> None:
    skip_without_room_for(2 * distance)
    rows = paged_rows([(1, 100), (1, 40)], (8, 8, 128), dtype=DTYPES[0], device=DEVICE)
    expected = decode_attention_reference(*rows.in_fp32().decode_arguments())
    move_blocks_behind(distance, rows)
    assert_near(decode_attention(*rows.decode_arguments()[:-1], 100, rows.scale), expected)
    for batch_invariant in (False, True):
        attended = prefill_attention(*rows.prefill_arguments(), batch_invariant=batch_invariant)
        assert_near(attended, expected)

    qkv = randn(1, 24 * 128, dtype=DTYPES[0])
    mapping = torch.tensor([len(rows.k_cache) * 32 - 1], device=DEVICE)
    position = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    cos_sin = torch.tensor([[1.0] * 64 + [0.0] * 64], device=DEVICE)  # turns nothing
    rope_and_cache(qkv, position, cos_sin, rows.k_cache, rows.v_cache, mapping, 8, 8)
    assert_near(rows.k_cache[-1, :, -1].flatten(), qkv[0, 8 * 128 : 16 * 128])
    assert torch.equal(rows.v_cache[-1, :, -1].flatten(), qkv[0, 16 * 128 :])


@each_distance
def test_rows_decode_over_a_distant_shared_prefix(distance: int) -> None:
    skip_without_room_for(2 * distance)
    groups = [(5, 320), (1, 0), (2, 96)]
    lengths = [(1, keys + 1 + 7 * row) for count, keys in groups for row in range(count)]
    rows = paged_rows(lengths, (8, 2, 128), dtype=DTYPES[0], device=DEVICE)
    shared = share(rows, groups, rows_per_tile(4))
    expected = decode_attention_reference(*rows.in_fp32().decode_arguments())
    move_blocks_behind(distance, rows)
    assert_near(decode_attention(*rows.decode_arguments()[:-1], 400, rows.scale, shared=shared), expected)


@each_distance
def test_distant_rows_are_normalised(distance: int) -> None:
    skip_without_room_for(8 * distance)  # x, the residual, and a result twice
    torch.manual_seed(0)
    hidden = 4096
    count = distance // hidden + 1
    last, weight = randn(4, hidden, dtype=DTYPES[0]), randn(hidden, dtype=DTYPES[0])
    x = behind(count, last)
    assert_near(rms_norm(x, weight, 1e-5)[count:], rms_norm_reference(last.float(), weight.float(), 1e-5))

    last_residual = randn(4, hidden, dtype=DTYPES[0])
    residual, summed = behind(count, last_residual), last + last_residual
    y = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual[count:], summed)
    assert_near(y[count:], rms_norm_reference(summed.float(), weight.float(), 1e-5))


@each_distance
def test_distant_rows_go_through_silu_mul(distance: int) -> None:
    skip_without_room_for(6 * distance)  # twice as many values go in as come out
    torch.manual_seed(0)
    intermediate = 2048
    count = distance // intermediate + 1
    last = randn(4, 2 * intermediate, dtype=DTYPES[0])
    assert_near(silu_mul(behind(count, last))[count:], silu_mul_reference(last.float()))


@each_distance
@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(4096, 64), (64, 2048)], ids=["far into x", "far into y"]
)
def test_distant_rows_go_through_a_product_and_silu_mul(
    hidden: int, intermediate: int, distance: int
) -> None:
    skip_without_room_for(8 * distance)
    torch.manual_seed(0)
    count = distance // max(hidden, intermediate) + 1
    last = randn(4, hidden, dtype=DTYPES[0])
    weight = randn(2 * intermediate, hidden, dtype=DTYPES[0]) * hidden**-0.5
    x, expected = behind(count, last), silu_mul_reference(last.float() @ weight.float().T)
    assert_near(swiglu(x, weight)[count:], expected)
    if suits(x, weight):
        assert_near(swiglu_hopper(x, weight)[count:], expected)


@each_distance
def test_sampling_reads_distant_rows(distance: int) -> None:
    skip_without_room_for(2 * distance)
    torch.manual_seed(0)
    vocab = 32_000
    count = distance // vocab + 1
    last = randn(5, vocab, dtype=DTYPES[0]) * 3
    logits = behind(count, last)
    kinds = torch.arange(
        -count, len(last), device=DEVICE
    )  # of the last rows: greedy, unfiltered, and each filter
    arguments = (
        torch.where(kinds > 0, 0.8, 0.0).float(),
        torch.where(kinds == 2, 50, 0).int(),
        torch.where(kinds == 3, 0.7, 1.0).float(),
        torch.where(kinds == 4, 0.05, 0.0).float(),
        kinds,
        kinds + 100,
    )
    expected = sample_reference(last, *(argument[count:] for argument in arguments))
    assert torch.equal(sample(logits, *arguments)[count:], expected)
    greedy = sample(logits, arguments[0] * 0, *arguments[1:], all_greedy=True)
    assert torch.equal(greedy[count:], last.float().argmax(dim=-1))


@each_distance
def test_distant_rows_have_logprobs(distance: int) -> None:
    skip_without_room_for(2 * distance)
    torch.manual_seed(0)
    vocab = 32_000
    count = distance // vocab + 1
    last = randn(4, vocab, dtype=DTYPES[0]) * 3
    rows, counts = (torch.tensor(n, device=DEVICE).int() for n in ([3, 0], [5, 2]))
    tokens = torch.randint(0, vocab, (count + len(last),)).to(DEVICE)
    values, ids = logprobs(behind(count, last), rows + count, tokens, counts, 5)
    assert_logprobs(values, ids, last, rows, tokens[count:], counts)


@on_gpu_only
@pytest.mark.parametrize("lengths", [[5, 900, 0, 33], [300] * 200], ids=["split", "whole"])
def test_a_captured_decode_follows_the_lengths_it_is_replayed_with(lengths: list[int]) -> None:
    rows = paged_rows([(1, length) for length in lengths], (8, 2, 128), dtype=torch.bfloat16, device=DEVICE)
    captured_lens = rows.context_lens.clone()
    rows.context_lens.fill_(1)
    rows.context_lens[captured_lens == 0] = 0
    out = torch.empty_like(rows.q)
    decode_attention(*rows.decode_arguments()[:-1], 4096, rows.scale, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(*rows.decode_arguments()[:-1], 4096, rows.scale, out=out)
    rows.context_lens.copy_(captured_lens)
    graph.replay()
    assert_near(out, decode_attention_reference(*rows.in_fp32().decode_arguments()))
