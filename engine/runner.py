"""Runs steps on the device: the device's half of the slot table, forward, sampling.

The host sends what changed (block-table entries, sampling parameters of new sequences) and the step's shape; what a
decode feeds on (its slot's last token) never leaves the device. Forward and sampling are separate launches, so that
only sampling need wait for what the host adds to the logits.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.kv_cache import KVCache, StepContext
from headrace.engine.logit_edits import LogitEdits
from headrace.engine.masks import Masks
from headrace.engine.models.decoder import Model
from headrace.engine.plan import Ints, SamplingRows, StepPlan
from headrace.engine.prefix_tiles import prefix_tiles
from headrace.engine.prompt_reading import Read, pack_logprobs, read_prompts
from headrace.engine.staging import Staging
from headrace.kernels.logprobs import logprobs
from headrace.kernels.mask_logits import mask_logits
from headrace.kernels.sample import sample
from headrace.kernels.shared_prefix import SharedPrefixes, rows_per_tile
from headrace.kernels.step_inputs import step_inputs

EDITED_AT_ONCE = 256
"""Rows whose logits are edited together: their copies in fp32 are bounded so."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step chose. tokens: [K] int64, in the order of ``StepPlan.sample_rows``; -1 where logits are not finite.

    logprobs: [L, 1 + 2 W] int32, a line for each of ``StepPlan.logprob_rows`` (W: the most that one of them wants) as
    in ``pack_logprobs``. None where no row wants any. read: what ``StepPlan.readings`` asked for, if anything.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    read: Read | None = None


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the launchers must know of a step without asking the device."""

    num_decodes: int
    max_context_len: int


class ModelRunner:
    """Executes plans in the order given. S slots, M blocks a slot at most.

    The slot table has one line more than there are slots: padding rows of a captured graph work on that one.
    token_pages: the tokens whose keys and values the cache's blocks hold, for options that look at what was said.
    """

    def __init__(self, model: Model, kv: KVCache, max_slots: int, max_context: int) -> None:
        self.model = model
        self.kv = kv
        self.device = kv.arena.device
        self.max_slots = max_slots
        self.max_context = max_context
        self.rows_per_tile = rows_per_tile(model.config.num_heads // model.config.num_kv_heads)
        self.staging = Staging(self.device)
        max_blocks = -(-max_context // kv.block_size)

        def per_slot(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(max_slots + 1, *shape, dtype=dtype, device=self.device)

        self.block_tables = per_slot(torch.int32, max_blocks)
        self.last_tokens = per_slot(torch.int64)
        self.temperature = per_slot(torch.float32)
        self.top_k = per_slot(torch.int32)
        self.top_p = per_slot(torch.float32)
        self.min_p = per_slot(torch.float32)
        self.seeds = per_slot(torch.int64)
        self.token_pages = torch.zeros(kv.num_blocks, kv.block_size, dtype=torch.int32, device=self.device)
        self.masks = Masks(model.config.vocab_size, self.device)
        self._edits: LogitEdits | None = None

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Sampled:
        """What the step's sample rows chose, on the device."""
        self.update(plan)
        query_start = np.zeros(len(plan.slots) + 1, np.int32)
        np.cumsum(plan.query_lens, out=query_start[1:])
        token_ids, starts_of, slots, starts, context_lens = self.staging.upload(
            [plan.token_ids, query_start, plan.slots, plan.starts, plan.starts + plan.query_lens]
        )
        shared = None
        if len(plan.group_start):
            shared = SharedPrefixes(*self.staging.upload(prefix_tiles(plan, self.rows_per_tile)))
        shape = StepShape(plan.num_decodes, plan.max_context_len)
        hidden = self.forward(token_ids, starts_of, slots, starts, context_lens, shape, shared)
        return self.finish(hidden, query_start[plan.sample_rows + 1] - 1, plan)

    def update(self, plan: StepPlan) -> None:
        """Bring the slot table up to date: sampling parameters of new sequences, entries of block tables."""
        self.update_sampling(plan.sampling)
        if len(plan.table_slots):
            slots, index, blocks = self.staging.upload(
                [plan.table_slots, plan.table_index, plan.table_blocks]
            )
            self.block_tables[slots.long(), index.long()] = blocks

    def finish(self, hidden: Tensor, last: Ints, plan: StepPlan) -> Sampled:
        """Read off what the plan wants of its prompts, and sample.

        hidden: [T, H]. last: [K], where among them each sample row's last token is.
        """
        rows = plan.sample_rows
        read = read_prompts(self.model, hidden, plan.readings, self.staging) if plan.readings else None
        if not len(rows):
            return Sampled(torch.empty(0, dtype=torch.int64, device=self.device), read=read)
        at, lines, ends = self.staging.upload(
            [last, plan.slots[rows], plan.starts[rows] + plan.query_lens[rows]]
        )
        logits = self.model.logits(hidden[at.long()])
        return replace(self.sample(logits, lines.long(), ends.long(), plan), read=read)

    def forward(
        self,
        token_ids: Tensor,
        query_start: Tensor,
        slots: Tensor,
        starts: Tensor,
        context_lens: Tensor,
        shape: StepShape,
        shared: SharedPrefixes | None,
    ) -> Tensor:
        """Hidden states of every query token, [T, H]. Shapes as in StepPlan and StepContext; all int32."""
        ids, positions, slot_mapping = step_inputs(
            token_ids.long(),
            query_start,
            slots,
            starts,
            self.last_tokens,
            self.block_tables,
            self.kv.block_size,
            self.token_pages,
        )
        config = self.model.config
        context = StepContext(
            kv=self.kv,
            slot_mapping=slot_mapping,
            block_tables=self.block_tables,
            slots=slots,
            query_start=query_start,
            context_lens=context_lens,
            num_decodes=shape.num_decodes,
            max_context_len=shape.max_context_len,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            shared=shared,
            numerics=self.model.numerics,
        )
        return self.model.forward(ids, positions, context)

    def sample(self, logits: Tensor, lines: Tensor, positions: Tensor, plan: StepPlan) -> Sampled:
        """One token for each line of the slot table, remembered there.

        logits: [K, V]. lines, positions: [K] int64; positions are those that the new tokens will take.
        """
        if len(plan.edited) < len(lines):
            tokens = self._choose(logits, lines, positions, plan)
        else:
            tokens = torch.empty_like(lines)
        if len(plan.edited):
            self._choose_edited(logits, lines, positions, plan, tokens)
        return Sampled(tokens, self._logprobs(logits, tokens, plan) if len(plan.logprob_rows) else None)

    def _choose(self, logits: Tensor, lines: Tensor, positions: Tensor, plan: StepPlan) -> Tensor:
        # One kernel for rows with and without filters, where neighbours must not choose between two.
        no_filters = plan.no_filters and not self.model.numerics.batch_invariant
        return sample(
            logits, self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, positions,
            lines=lines, last_tokens=self.last_tokens, all_greedy=plan.all_greedy, no_filters=no_filters,
        )  # fmt: skip

    def _choose_edited(
        self, logits: Tensor, lines: Tensor, positions: Tensor, plan: StepPlan, tokens: Tensor
    ) -> None:
        """Choose the tokens of the rows that edit their logits, and put them among ``tokens``."""
        assert self._edits is not None, "a row edits its logits, but no sequence has brought edits"
        edited, lines_of_masks = self.staging.upload([plan.edited, _mask_lines(plan)])
        masks = self.masks.fill(plan.guided) if plan.guided else None
        for rows, mask_lines in zip(
            torch.split(edited, EDITED_AT_ONCE), torch.split(lines_of_masks, EDITED_AT_ONCE), strict=True
        ):
            at = rows.long()
            slots, lengths = lines[at], positions[at]
            changed = self._edits.apply(
                logits, rows, slots.int(), lengths.int(), self.token_pages, self.block_tables
            )
            if masks is not None:
                mask_logits(changed, masks, mask_lines)
            tokens[at] = self._choose(changed, slots, lengths, plan)

    def _logprobs(self, logits: Tensor, tokens: Tensor, plan: StepPlan) -> Tensor:
        rows, counts = self.staging.upload([plan.logprob_rows, plan.logprob_counts])
        width = int(plan.logprob_counts.max())
        return pack_logprobs(*logprobs(logits, rows, tokens, counts, width))

    def update_sampling(self, rows: SamplingRows) -> None:
        """Set the sampling parameters of slots that got a new sequence."""
        if not len(rows.slots):
            return
        as_int = [array.view(np.int32) for array in (rows.temperature, rows.top_p, rows.min_p, rows.seeds)]
        slots, top_k, temperature, top_p, min_p, seeds = self.staging.upload(
            [rows.slots, rows.top_k, *as_int]
        )
        lines = slots.long()
        self.temperature[lines] = temperature.view(torch.float32)
        self.top_k[lines] = top_k
        self.top_p[lines] = top_p.view(torch.float32)
        self.min_p[lines] = min_p.view(torch.float32)
        self.seeds[lines] = seeds.view(torch.int64)
        if rows.edits:
            if self._edits is None:
                vocab = self.model.config.vocab_size
                self._edits = LogitEdits(self.max_slots + 1, vocab, self.staging)
            self._edits.set(rows.edits)


def _mask_lines(plan: StepPlan) -> NDArray[np.int32]:
    """For each edited row its line of the step's masks, -1 where it has none."""
    lines = np.full(len(plan.edited), -1, np.int32)
    guided = np.array([row.row for row in plan.guided], np.int32)
    lines[np.searchsorted(plan.edited, guided)] = np.arange(len(guided), dtype=np.int32)
    return lines
