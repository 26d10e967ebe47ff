import math

import pytest
import torch
from kernel_cases import PagedRows, assert_near, paged_rows

from headrace.kernels.decode_attention import decode_attention, decode_attention_reference
from headrace.kernels.prefill_attention import prefill_attention, prefill_attention_reference

HEADS = [(9, 3, 64), (4, 4, 96), (8, 1, 16)]
CONTEXTS = [0, 1, 15, 16, 17, 31, 32, 33, 64, 100, 500, 520, 3]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def contiguous(rows: PagedRows) -> PagedRows:
    """Caches as the engine has them on the CPU."""
    rows.k_cache, rows.v_cache = rows.k_cache.contiguous(), rows.v_cache.contiguous()
    return rows


def attend_by_hand(rows: PagedRows, row: int, token: int, head: int, num_keys: int) -> list[float]:
    """softmax(scale q k) v for one query and head over the row's first keys, in Python floats."""
    block_size = rows.k_cache.shape[2]
    kv_head = head // (rows.q.shape[1] // rows.k_cache.shape[1])
    table = rows.block_tables[rows.slots[row]].tolist()
    where = [(table[key // block_size], kv_head, key % block_size) for key in range(num_keys)]
    query = rows.q[token, head].tolist()
    scores = [
        rows.scale * sum(a * b for a, b in zip(query, rows.k_cache[at].tolist(), strict=True)) for at in where
    ]
    weights = [math.exp(score - max(scores)) for score in scores]
    values = [rows.v_cache[at].tolist() for at in where]
    total = sum(weights)
    return [
        sum(w * value[i] for w, value in zip(weights, values, strict=True)) / total for i in range(len(query))
    ]


def test_the_prefill_reference_is_causal_softmax_attention() -> None:
    rows = paged_rows([(3, 20), (0, 0), (2, 2)], (4, 2, 8), block_size=16)
    out = prefill_attention_reference(*rows.prefill_arguments())
    queries = [(0, 0, 18), (0, 1, 19), (0, 2, 20), (2, 3, 1), (2, 4, 2)]  # (row, token, keys it sees)
    for row, token, num_keys in queries:
        for head in range(4):
            expected = attend_by_hand(rows, row, token, head, num_keys)
            assert out[token, head].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_decode_reference_is_softmax_attention_over_all_keys() -> None:
    rows = paged_rows([(1, 20), (1, 0), (1, 33)], (4, 2, 8), block_size=16)
    out = decode_attention_reference(*rows.decode_arguments())
    assert torch.equal(out[1], torch.zeros(4, 8))
    for row, num_keys in ((0, 20), (2, 33)):
        for head in range(4):
            expected = attend_by_hand(rows, row, row, head, num_keys)
            assert out[row, head].tolist() == pytest.approx(expected, abs=1e-5)


@each_dtype
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prefill_on_the_cpu_agrees_with_the_reference(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    lengths = [(1, 1), (31, 31), (32, 32), (33, 33), (0, 0), (17, 100), (1, 64), (64, 65), (5, 300)]
    rows = contiguous(paged_rows(lengths, heads, dtype=dtype))
    out = prefill_attention(*rows.prefill_arguments())
    assert_near(out, prefill_attention_reference(*rows.in_fp32().prefill_arguments()))


@each_dtype
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_on_the_cpu_agrees_with_the_reference(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows = contiguous(paged_rows([(1, context) for context in CONTEXTS], heads, dtype=dtype))
    out = torch.full_like(rows.q, float("nan"))
    returned = decode_attention(*rows.decode_arguments()[:-1], rows.max_context_len, rows.scale, out=out)
    assert returned is out
    assert_near(out, decode_attention_reference(*rows.in_fp32().decode_arguments()))


@pytest.mark.parametrize("length", [(70, 70), (40, 70)], ids=["whole", "chunk"])
def test_a_key_that_is_nan_spoils_the_queries_that_see_it_and_no_others(length: tuple[int, int]) -> None:
    rows = contiguous(paged_rows([length, (33, 33)], (9, 3, 64)))
    sound = prefill_attention(*rows.prefill_arguments())
    block = rows.block_tables[rows.slots[0], 1]
    rows.k_cache[block, :, 50 - 32] = float("nan")
    out = prefill_attention(*rows.prefill_arguments())
    sees = torch.zeros(len(out), dtype=torch.bool)
    sees[length[0] - 20 : length[0]] = True
    assert out[sees].isnan().all()
    assert_near(out[~sees], sound[~sees])


@pytest.mark.parametrize("length", [(1, 1), (9, 9), (4, 9), (40, 40)], ids=str)
@pytest.mark.parametrize("spoilt", ["keys", "queries"])
def test_queries_that_see_nothing_but_nan_are_spoilt(length: tuple[int, int], spoilt: str) -> None:
    rows = contiguous(paged_rows([length], (9, 3, 64)))
    if spoilt == "keys":
        rows.k_cache[..., 5] = float("nan")
    else:
        rows.q[..., 5] = float("nan")
    assert prefill_attention(*rows.prefill_arguments()).isnan().all()


def test_a_row_s_result_does_not_depend_on_its_neighbours() -> None:
    rows = contiguous(paged_rows([(1, context) for context in CONTEXTS], (9, 3, 64)))
    together = decode_attention(*rows.decode_arguments()[:-1], rows.max_context_len, rows.scale)
    for row in range(len(CONTEXTS)):
        one = slice(row, row + 1)
        alone = decode_attention(
            rows.q[one], rows.k_cache, rows.v_cache, rows.block_tables, rows.slots[one], rows.context_lens[one],
            CONTEXTS[row], rows.scale,
        )  # fmt: skip
        torch.testing.assert_close(alone, together[one], atol=1e-6, rtol=1e-5)


def test_decode_is_prefill_with_one_query_token_a_row() -> None:
    rows = contiguous(paged_rows([(1, context) for context in CONTEXTS[1:]], (9, 3, 64)))
    decoded = decode_attention(*rows.decode_arguments()[:-1], rows.max_context_len, rows.scale)
    prefilled = prefill_attention(*rows.prefill_arguments())
    torch.testing.assert_close(decoded, prefilled, atol=1e-6, rtol=1e-5)


def test_query_heads_that_do_not_share_key_heads_evenly_are_refused() -> None:
    rows = paged_rows([(1, 4)], (3, 2, 16))
    with pytest.raises(ValueError, match="multiple of Hkv"):
        decode_attention(*rows.decode_arguments()[:-1], 4, rows.scale)
    with pytest.raises(ValueError, match="multiple of Hkv"):
        prefill_attention(*rows.prefill_arguments())
