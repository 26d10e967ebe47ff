"""The batch-invariant paths of the CPU: a row's bits are the same wherever it stands, whatever stands beside it."""

import pytest
import torch
from kernel_cases import paged_rows

from headrace.kernels.matmul import matmul
from headrace.kernels.prefill_attention import prefill_attention, prefill_attention_reference
from headrace.kernels.rms_norm import rms_norm
from headrace.kernels.silu_mul import silu_mul, silu_mul_reference

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@each_dtype
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 128), (100, 33), (576, 960), (1536, 576)])
def test_a_row_s_product_depends_neither_on_its_place_nor_on_other_rows(in_features, out_features, dtype):
    torch.manual_seed(0)
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype)
    x = torch.randn(45, in_features).to(dtype)
    alone = torch.cat([matmul(row, weight, bias) for row in x.split(1)])
    torch.testing.assert_close(alone, torch.nn.functional.linear(x, weight, bias), atol=0.3, rtol=2e-2)
    for start, end in ((0, 45), (0, 16), (7, 24), (44, 45), (3, 3)):
        assert torch.equal(matmul(x[start:end], weight, bias), alone[start:end])
    order = torch.randperm(45)
    assert torch.equal(matmul(x[order], weight, bias), alone[order])


@each_dtype
@pytest.mark.parametrize("width", [100, 1000, 14_336])
def test_a_row_s_norm_and_activation_depend_on_it_alone(width, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(41, 2 * width).to(dtype), torch.randn(2 * width).to(dtype)
    for operation in (lambda x: rms_norm(x, weight, 1e-5), lambda x: silu_mul(x, batch_invariant=True)):
        assert torch.equal(operation(x), torch.cat([operation(row) for row in x.split(1)]))
    assert torch.equal(silu_mul(x[:0], batch_invariant=True), silu_mul_reference(x[:0]))


@each_dtype
def test_a_query_s_attention_is_the_same_whether_decoded_or_prefilled_in_any_chunks(dtype):
    whole = paged_rows([(70, 70), (33, 33)], (6, 2, 64), block_size=16, dtype=dtype)
    whole.k_cache, whole.v_cache = whole.k_cache.contiguous(), whole.v_cache.contiguous()
    expected = prefill_attention(*whole.prefill_arguments(), batch_invariant=True)
    near = prefill_attention_reference(*whole.in_fp32().prefill_arguments())
    torch.testing.assert_close(expected.float(), near, atol=1e-2, rtol=1e-2)
    for chunk in (1, 7, 16, 69):
        for start in range(0, 70, chunk):
            end = min(start + chunk, 70)
            part = prefill_attention(
                whole.q[start:end], whole.k_cache, whole.v_cache, whole.block_tables, whole.slots[:1],
                torch.tensor([0, end - start]).int(), torch.tensor([end]).int(), whole.scale, batch_invariant=True,
            )  # fmt: skip
            assert torch.equal(part, expected[start:end])
