"""What a step does, as arrays that could be sent to several executors. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.engine.edits import Edits
from headrace.engine.guide import GuidedRow

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of slots that got a new sequence: one line each. edits: of those slots that have any."""

    slots: Ints
    temperature: NDArray[np.float32]
    top_k: Ints
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.int64]
    edits: Sequence[tuple[int, Edits]] = ()


@dataclass(frozen=True, slots=True)
class Readings:
    """What a step reads off its prompt tokens, beside the tokens that it samples.

    logits_at: [P] query tokens (indices into T) whose logits are wanted; targets: [P] the tokens that follow them, and
    counts: [P] how many of the likeliest are to be told beside those. sums_from, sums_len: [Q] runs of query tokens whose
    hidden states are summed up.
    """

    logits_at: Ints
    targets: Ints
    counts: Ints
    sums_from: Ints
    sums_len: Ints

    def __bool__(self) -> bool:
        return bool(len(self.logits_at) or len(self.sums_from))


_NONE: Ints = np.empty(0, np.int32)
NO_READINGS = Readings(_NONE, _NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: R rows (a sequence each) of T query tokens in all, K of them sampled.

    slots, query_lens, starts: [R] slot of each row, its number of query tokens, position of the first.
    num_decodes: rows with a single query token; they come first.
    token_ids: [T] input ids; -1 stands for the token that the row's slot sampled last, known on the device only.
    sample_rows: [K] rows whose last token's logits are sampled. epochs: [K] epoch of their slots, to tell a slot's
    tenants apart when the tokens come back.
    table_slots, table_index, table_blocks: [U] block-table entries to set before the step.
    group_start, group_rows, group_keys: [G] runs of decode rows that share their first ``group_keys`` keys (whole
    blocks): attention may read those once for the run.
    sampling: lines to set in the slot table before the step. all_greedy, no_filters: what the sampler may skip.
    edited: [E] of the sample rows (indices into them), those whose logits are edited. logprob_rows, logprob_counts: [L]
    those that want log-probabilities, and of how many of the likeliest tokens. readings: what prompts are asked.
    guided: those of the edited rows that choose from what a grammar allows.
    """

    number: int
    slots: Ints
    query_lens: Ints
    starts: Ints
    num_decodes: int
    token_ids: Ints
    sample_rows: Ints
    epochs: Ints
    table_slots: Ints
    table_index: Ints
    table_blocks: Ints
    group_start: Ints
    group_rows: Ints
    group_keys: Ints
    sampling: SamplingRows
    all_greedy: bool
    no_filters: bool
    edited: Ints
    logprob_rows: Ints
    logprob_counts: Ints
    readings: Readings = NO_READINGS
    guided: Sequence[GuidedRow] = ()

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return len(self.token_ids)

    @property
    def shared_keys(self) -> int:
        """How many keys decode rows share with others, each row's counted: what they read where none reads for all."""
        return int(self.group_rows @ self.group_keys.astype(np.int64))

    @property
    def max_context_len(self) -> int:
        """The most keys that any row attends to."""
        return int((self.starts + self.query_lens).max())
