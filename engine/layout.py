"""Lays the next step out as the arrays of a StepPlan. No torch."""

import numpy as np

from headrace.engine.guide import GuidedRow
from headrace.engine.plan import Ints, SamplingRows, StepPlan
from headrace.engine.readings import PromptReader
from headrace.engine.sequence import Sequence
from headrace.engine.sharers import NO_GROUPS, Sharers
from headrace.engine.slots import Slots


class StepLayout:
    """Collects what changed since the last plan, and makes the next one."""

    def __init__(self, slots: Slots, sharers: Sharers | None) -> None:
        self.steps = 0
        self.reader = PromptReader(slots)
        self._slots = slots
        self._sharers = sharers
        self._grown: list[tuple[Ints, Ints, Ints]] = []
        self._seated: list[Sequence] = []

    def grow(self, slots: Ints, index: Ints, blocks: Ints) -> None:
        """The block tables of running sequences got these entries."""
        self._grown.append((slots, index, blocks))

    def seat(self, seq: Sequence) -> None:
        """A slot got a new sequence, whose block table and sampling parameters the device must know."""
        self._seated.append(seq)

    def plan(self, decodes: Ints, slots: Ints, lens: Ints) -> StepPlan:
        """Lay the step out as arrays, single-token rows first, and move the slots' counters past it."""
        s = self._slots
        groups = NO_GROUPS
        if self._sharers is not None:
            decodes, groups = self._sharers.group(decodes)
        slots = np.concatenate([decodes, slots[lens == 1], slots[lens > 1]])
        num_decodes = len(decodes) + int(np.count_nonzero(lens == 1))
        lens = np.concatenate([np.ones(num_decodes, np.int32), lens[lens > 1]])
        starts = s.computed[slots]
        heads = slots[:num_decodes]
        ids = np.full(num_decodes, -1, np.int32)
        on_host = np.flatnonzero(starts[:num_decodes] < s.retired[heads])
        ids[on_host] = s.tokens[heads[on_host], starts[on_host]]
        ends = starts + lens
        chunks = zip(*(a[num_decodes:].tolist() for a in (slots, starts, ends)), strict=True)
        parts = [s.tokens[slot, start:end] for slot, start, end in chunks]
        s.computed[slots] += lens
        readings = self.reader.plan(self.steps + 1, slots, starts, ends)
        sample_rows = np.flatnonzero(s.computed[slots] == s.known[slots]).astype(np.int32)
        sampled = slots[sample_rows]
        wanted = s.logprobs[sampled]
        logprob_rows = np.flatnonzero(wanted >= 0).astype(np.int32)
        edited = np.flatnonzero(s.known[sampled] < s.edited_before[sampled]).astype(np.int32)
        guided = self._guided(sampled)
        s.known[sampled] += 1
        s.in_flight[sampled] += 1
        self.steps += 1
        grown, self._grown = self._grown, []
        seated = [seq for seq in self._seated if seq.slot >= 0]  # some have been pushed back since
        self._seated = []
        tables = [*grown, self._tables(seated)]
        table_slots, table_index, table_blocks = map(np.concatenate, zip(*tables, strict=True))
        return StepPlan(
            number=self.steps,
            slots=slots,
            query_lens=lens,
            starts=starts,
            num_decodes=num_decodes,
            token_ids=np.concatenate([ids, *parts]),
            sample_rows=sample_rows,
            epochs=s.epoch[sampled],
            table_slots=table_slots,
            table_index=table_index,
            table_blocks=table_blocks,
            group_start=groups.start,
            group_rows=groups.rows,
            group_keys=groups.keys,
            sampling=_sampling_rows(seated),
            all_greedy=bool(s.greedy[sampled].all()),
            no_filters=not s.filtered[sampled].any(),
            edited=edited,
            logprob_rows=logprob_rows,
            logprob_counts=wanted[logprob_rows],
            readings=readings,
            guided=guided,
        )

    def _tables(self, seated: list[Sequence]) -> tuple[Ints, Ints, Ints]:
        """Slot, index and block of all entries of these sequences' block tables."""
        s = self._slots
        slots = np.array([seq.slot for seq in seated], np.int32)
        counts = s.num_blocks[slots]
        firsts = np.cumsum(counts, dtype=np.int32) - counts
        entries = np.repeat(slots, counts)
        index = np.arange(len(entries), dtype=np.int32) - np.repeat(firsts, counts)
        return entries, index, s.block_tables[entries, index]

    def _guided(self, sampled: Ints) -> list[GuidedRow]:
        """Those of the sampled slots whose sequences have a grammar."""
        s = self._slots
        at = np.flatnonzero(s.guided[sampled])
        slots = sampled[at]
        rows = []
        for row, slot, position in zip(at.tolist(), slots.tolist(), s.known[slots].tolist(), strict=True):
            seq = s.sequence[slot]
            assert seq is not None
            assert seq.guide is not None
            rows.append(GuidedRow(row, seq.guide, position))
        return rows


def _sampling_rows(sequences: list[Sequence]) -> SamplingRows:
    params = [seq.request.sampling for seq in sequences]
    return SamplingRows(
        slots=np.array([seq.slot for seq in sequences], np.int32),
        temperature=np.array([1.0 if p.temperature is None else p.temperature for p in params], np.float32),
        top_k=np.array([p.top_k or 0 for p in params], np.int32),
        top_p=np.array([1.0 if p.top_p is None else p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p or 0.0 for p in params], np.float32),
        seeds=np.array([seq.seed for seq in sequences], np.int64),
        edits=[(seq.slot, seq.edits) for seq in sequences if seq.edits],
    )
