"""Steps that nobody asked for: they compile every kernel before the first request and measure the largest step's memory."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from headrace.engine.edits import edits_of
from headrace.engine.kv_cache import KVCache
from headrace.engine.models.decoder import Model
from headrace.engine.plan import NO_READINGS, Ints, Readings, SamplingRows, StepPlan
from headrace.engine.request import SamplingParams
from headrace.engine.runner import ModelRunner
from headrace.kernels.mask_logits import mask_logits
from headrace.kernels.swiglu_hopper import suits, swiglu_hopper


def peak_bytes(model: Model, block_size: int, max_slots: int, max_batched_tokens: int) -> int:
    """Device memory, in bytes, that the largest prefill step and the largest sampling need on top of weights and KV."""
    device = model.cos_sin.device
    blocks = max(-(-max_batched_tokens // block_size), 1)
    kv = KVCache(model.kv_specs(), blocks, block_size, model.norm.dtype, device)
    runner = ModelRunner(model, kv, max_slots, blocks * block_size)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for plan in (_plan([max_batched_tokens]), _plan([1] * max_slots), _plan([1] * max_slots, options=True)):
        runner.run(plan)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compile_kernels(runner: ModelRunner) -> None:
    """Run every kind of step once: prefill alone, decode alone, both; greedy, sampled, filtered; with and without options."""
    for plan in _kinds(runner):
        runner.run(plan)
    _compile_swiglu(runner.model)
    logits = torch.zeros(1, runner.model.config.vocab_size, device=runner.device)
    mask_logits(logits, runner.masks.everything(), torch.zeros(1, dtype=torch.int32, device=runner.device))
    torch.cuda.synchronize()


def _compile_swiglu(model: Model) -> None:
    """The number of tokens chooses its kernel, and none of the steps need have the right one."""
    tensors = model.layers[0].feed_forward.gate_up.scheme.tensors()
    weight = tensors["weight"]
    x = weight.new_zeros(1, weight.shape[1])
    if suits(x, weight) and "bias" not in tensors and not model.numerics.batch_invariant:
        swiglu_hopper(x, weight)


def run_large_steps(runner: ModelRunner, sizes: Sequence[int], max_batched_tokens: int) -> None:
    """Run steps that fill the token budget, and each size's logits, once.

    The allocator then holds what such steps take, and the device the matrix products of their sizes: both come on
    first use only, which costs the first seconds of work about half a second.
    """
    room = min(runner.max_context, runner.kv.num_blocks * runner.kv.block_size)
    for decodes in (0, min(runner.max_slots, max_batched_tokens) // 2):
        prefill = min(max_batched_tokens - decodes, room)
        runner.run(_plan([*[1] * decodes, prefill]))
    hidden = torch.zeros(
        max(sizes), runner.model.config.hidden_size, dtype=runner.model.norm.dtype, device=runner.device
    )
    for size in sizes:
        runner.model.logits(hidden[:size])
    torch.cuda.synchronize()


def _kinds(runner: ModelRunner) -> Iterator[StepPlan]:
    room = min(runner.max_context, runner.kv.num_blocks * runner.kv.block_size)
    long = min(300, room - 1)
    for lens in ([long], [1, long], [1, 1, 2], [2, 3], [1]):
        if len(lens) <= runner.max_slots:
            yield _plan(lens)
    block = runner.kv.block_size
    yield _plan([1] * min(4, runner.max_slots), starts=min(2 * block, room) - 1, shared=block)
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.9)):
        for options in (False, True):
            yield _plan([1], temperature=temperature, top_p=top_p, options=options)


def _plan(
    query_lens: Sequence[int],
    temperature: float = 1.0,
    top_p: float = 1.0,
    starts: int = 0,
    shared: int = 0,
    options: bool = False,
) -> StepPlan:
    """Rows of these lengths from position ``starts``, all in the first block, the first ``shared`` keys in common.

    options: the logits of all rows are edited, log-probabilities wanted of all, and all tokens read off.
    """
    edits = edits_of(SamplingParams(presence_penalty=1.0), 1, ()) if options else None
    lens = np.array(query_lens, np.int32)
    rows = np.arange(len(lens), dtype=np.int32)
    none = np.empty(0, np.int32)
    return StepPlan(
        number=0,
        slots=rows,
        query_lens=lens,
        starts=np.full(len(lens), starts, np.int32),
        num_decodes=int((lens == 1).sum()),
        token_ids=np.zeros(lens.sum(), np.int32),
        sample_rows=rows,
        epochs=rows,
        table_slots=none,
        table_index=none,
        table_blocks=none,
        group_start=rows[:1] if shared else none,
        group_rows=np.full(1, len(rows), np.int32) if shared else none,
        group_keys=np.full(1, shared, np.int32) if shared else none,
        sampling=SamplingRows(
            slots=rows[:1],
            temperature=np.full(1, temperature, np.float32),
            top_k=np.zeros(1, np.int32),
            top_p=np.full(1, top_p, np.float32),
            min_p=np.zeros(1, np.float32),
            seeds=np.zeros(1, np.int64),
            edits=[(slot, edits) for slot in rows.tolist()] if edits else (),
        ),
        all_greedy=temperature == 0,
        no_filters=top_p == 1,
        edited=rows if options else none,
        logprob_rows=rows if options else none,
        logprob_counts=np.ones(len(rows), np.int32) if options else none,
        readings=_all_of(lens) if options else NO_READINGS,
    )


def _all_of(query_lens: Ints) -> Readings:
    """The log-probabilities of every token, and a sum for each row."""
    tokens = np.arange(query_lens.sum(), dtype=np.int32)
    starts = (np.cumsum(query_lens) - query_lens).astype(np.int32)
    return Readings(tokens, np.zeros_like(tokens), np.ones_like(tokens), starts, query_lens)
