"""Every kernel compiles for Hopper: the interpreter, which runs them elsewhere, forgives what the compiler does not.

The largest compile for Ada too, whose programs have the least shared memory.
"""

from types import SimpleNamespace

import pytest
import torch
from kernel_cases import edit_table, paged_rows
from offline_compile import ADA, compiled_not_run

from headrace.kernels.decode_attention import decode_attention
from headrace.kernels.edit_logits import edit_logits
from headrace.kernels.hopper import is_hopper
from headrace.kernels.logprobs import logprobs
from headrace.kernels.mask_logits import mask_logits
from headrace.kernels.matmul import matmul
from headrace.kernels.prefill_attention import prefill_attention
from headrace.kernels.prefill_hopper import prefill_hopper, suits
from headrace.kernels.query_tiles import tile_queries
from headrace.kernels.rms_norm import add_rms_norm, rms_norm
from headrace.kernels.rope_cache import rope_and_cache
from headrace.kernels.sample import sample
from headrace.kernels.segment_sum import segment_sum
from headrace.kernels.shared_prefix import SharedPrefixes
from headrace.kernels.silu_mul import silu_mul
from headrace.kernels.step_inputs import step_inputs
from headrace.kernels.swiglu_hopper import suits as swiglu_suits
from headrace.kernels.swiglu_hopper import swiglu_hopper

BF16 = torch.bfloat16
ADA_SHARED_BYTES = 99 * 1024
HOPPER_SHARED_BYTES = 227 * 1024


def test_norms_and_activation_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(3, 576, dtype=BF16), torch.ones(576, dtype=BF16)
    with compiled_not_run(monkeypatch) as compiled:
        rms_norm(x, weight, 1e-5)
        add_rms_norm(x, x.clone(), weight, 1e-5)
        silu_mul(torch.ones(3, 3072, dtype=BF16))
        segment_sum(x, torch.tensor([0, 2]).int(), torch.tensor([2, 1]).int())
    assert len(compiled) == 4


def test_swiglu_compiles_with_whole_and_half_tiles_and_a_product_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with compiled_not_run(monkeypatch) as compiled:
        swiglu_hopper(torch.ones(300, 1024, dtype=BF16), torch.ones(2 * 3072, 1024, dtype=BF16))
    assert len(compiled) == 1
    ptx = compiled[0].asm["ptx"]
    assert "m64n256k16" in ptx
    assert "m64n128k16" in ptx
    assert "wgmma.wait_group.sync.aligned 1" in ptx
    assert compiled[0].metadata.shared <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache_compiles(monkeypatch: pytest.MonkeyPatch, normed: bool) -> None:
    norms = (torch.ones(128, dtype=BF16),) * 2 if normed else (None, None)
    caches = torch.zeros(2, 4, 2, 32, 128, dtype=BF16)
    positions = torch.zeros(3, dtype=torch.int64)
    with compiled_not_run(monkeypatch) as compiled:
        rope_and_cache(
            torch.ones(3, 12 * 128, dtype=BF16),
            positions,
            torch.ones(9, 128),
            *caches,
            positions,
            8,
            2,
            *norms,
        )
    assert len(compiled) == 1


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 96), (8, 2, 128), (28, 4, 128), (8, 1, 64)], ids=str)
def test_prefill_attention_compiles_to_hopper_s_matrix_products(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int]
) -> None:
    rows = paged_rows([(70, 100), (5, 5)], heads, dtype=BF16)
    with compiled_not_run(monkeypatch) as compiled:
        prefill_attention(*rows.prefill_arguments())
    assert len(compiled) == 1
    assert "wgmma" in compiled[0].asm["ptx"]


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128)], ids=str)
def test_batch_invariant_products_and_attention_compile_to_hopper_s_matrix_products(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int]
) -> None:
    x, weight = torch.ones(1, 576, dtype=BF16), torch.ones(960, 576, dtype=BF16)
    rows = paged_rows([(70, 100), (5, 5)], heads, dtype=BF16)
    with compiled_not_run(monkeypatch) as compiled:
        matmul(x, weight)
        matmul(x, weight, weight[:, 0].contiguous())
        prefill_attention(*rows.prefill_arguments(), batch_invariant=True)
    assert len(compiled) == 3
    assert all("wgmma" in kernel.asm["ptx"] for kernel in compiled)


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128)], ids=str)
def test_hopper_s_prefill_attention_compiles_with_its_products_in_flight(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int]
) -> None:
    rows = paged_rows([(70, 100), (5, 5)], heads, dtype=BF16)
    with compiled_not_run(monkeypatch) as compiled:
        tiles = tile_queries(rows.slots, rows.query_start, rows.context_lens, len(rows.q), 32)
        prefill_hopper(
            rows.q, rows.k_cache, rows.v_cache, rows.block_tables, tiles, rows.scale, torch.empty_like(rows.q)
        )
    assert len(compiled) == 2
    # The products with V are still running while the scores before them are weighed.
    assert "wgmma.wait_group.sync.aligned 4" in compiled[1].asm["ptx"]


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128)], ids=str)
@pytest.mark.parametrize("prefixed", [False, True])
def test_decode_attention_compiles(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int], prefixed: bool
) -> None:
    rows = paged_rows([(1, 40), (1, 40)], heads, dtype=BF16)
    none = torch.zeros(8, dtype=torch.int32)
    shared = SharedPrefixes(none[:2], none[:1], none, none, none) if prefixed else None
    with compiled_not_run(monkeypatch) as compiled:
        decode_attention(*rows.decode_arguments()[:-1], 8192, rows.scale, shared=shared)
    assert len(compiled) == 2 + prefixed


# Batch-invariant steps have one kernel for rows with and without filters: also where all are greedy.
@pytest.mark.parametrize(
    ("all_greedy", "no_filters"), [(True, True), (False, True), (False, False), (True, False)]
)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_sampling_compiles(
    monkeypatch: pytest.MonkeyPatch, all_greedy: bool, no_filters: bool, dtype: torch.dtype
) -> None:
    floats, ints = torch.ones(2), torch.ones(2, dtype=torch.int64)
    with compiled_not_run(monkeypatch) as compiled:
        sample(
            torch.zeros(2, 49_152, dtype=dtype), floats, ints.int(), floats, floats, ints, ints,
            all_greedy=all_greedy, no_filters=no_filters,
        )  # fmt: skip
    assert len(compiled) == 1


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_edits_masks_and_logprobs_compile(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    logits, ints = torch.zeros(2, 49_152, dtype=dtype), torch.ones(2, dtype=torch.int32)
    pages, counts = torch.zeros(4, 32, dtype=torch.int32), torch.zeros(2, 49_152, dtype=torch.int32)
    with compiled_not_run(monkeypatch) as compiled:
        edit_logits(logits, ints, ints, ints, pages, ints[:, None], edit_table(2, 49_152), counts)
        logprobs(logits, ints, ints.long(), ints, 20)
        mask_logits(logits, torch.zeros(1, 1536, dtype=torch.int32), ints)
    assert len(compiled) == 3


def test_step_inputs_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    ints, longs = torch.ones(4, dtype=torch.int32), torch.ones(4, dtype=torch.int64)
    with compiled_not_run(monkeypatch) as compiled:
        for pages in (None, torch.zeros(8, 32, dtype=torch.int32)):
            step_inputs(
                longs, ints, ints[:3], ints[:3], longs, torch.ones(4, 8, dtype=torch.int32), 32, pages
            )
    assert len(compiled) == 2


# In fp32 it takes the compiler half a minute.
@pytest.mark.parametrize("dtype", [BF16, pytest.param(torch.float32, marks=pytest.mark.stress)], ids=str)
def test_the_largest_tiles_fit_an_ada_card_and_need_no_hopper_instructions(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    chunk = paged_rows([(70, 100), (5, 5)], (8, 2, 128), dtype=dtype)
    decodes = paged_rows([(1, 40), (1, 40)], (8, 2, 128), dtype=dtype)
    x, none = torch.ones(3, 1024, dtype=dtype), torch.zeros(8, dtype=torch.int32)
    shared = SharedPrefixes(none[:2], none[:1], none, none, none)
    with compiled_not_run(monkeypatch, ADA) as compiled:
        prefill_attention(*chunk.prefill_arguments())
        prefill_attention(*chunk.prefill_arguments(), batch_invariant=True)
        decode_attention(*decodes.decode_arguments()[:-1], 8192, decodes.scale, shared=shared)
        matmul(x, x)
    assert len(compiled) == 6
    assert all(kernel.metadata.shared <= ADA_SHARED_BYTES for kernel in compiled)
    assert not any("wgmma" in kernel.asm["ptx"] for kernel in compiled)


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)],
)
def test_only_hopper_gets_the_kernels_that_are_written_for_it(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, capability: tuple[int, int], chosen: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    request.addfinalizer(is_hopper.cache_clear)
    is_hopper.cache_clear()

    def on_gpu(*shape: int, dtype: torch.dtype = BF16, **methods: object) -> SimpleNamespace:
        return SimpleNamespace(device=torch.device("cuda:0"), shape=shape, dtype=dtype, **methods)

    assert suits(on_gpu(2, 8, 32, 128)) == chosen
    assert not suits(on_gpu(2, 8, 16, 128))
    assert not suits(on_gpu(2, 8, 32, 96))
    assert not suits(on_gpu(2, 8, 32, 128, dtype=torch.float32))

    def rows_of(width: int, stride: tuple[int, int], offset: int = 0) -> SimpleNamespace:
        return on_gpu(3, width, stride=lambda dim: stride[dim], storage_offset=lambda: offset)

    x, weight = rows_of(128, (128, 1)), torch.empty(32, 128, dtype=BF16)
    assert swiglu_suits(x, weight) == chosen
    assert swiglu_suits(rows_of(128, (136, 1), 8), weight) == chosen
    assert not swiglu_suits(x, weight[:-8])
    assert not swiglu_suits(x, weight.float())
    assert not swiglu_suits(x, torch.empty(128, 32, dtype=BF16).T)
    assert not swiglu_suits(rows_of(96, (96, 1)), weight[:, :96])
    for stride, offset in (((1, 128), 0), ((129, 1), 0), ((136, 1), 4)):
        assert not swiglu_suits(rows_of(128, stride, offset), weight)
