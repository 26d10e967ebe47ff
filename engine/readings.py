"""What is read off prompts while they are computed: log-probabilities of their tokens, sums of their hidden states.

A prompt is read chunk by chunk, in the steps that compute it. What a step has been launched to read is not read again, so
a preempted sequence goes on where it stood, and may take what it had already from the prefix cache. No torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.engine.plan import NO_READINGS, Ints, Readings
from headrace.engine.sequence import NOTHING, Sequence
from headrace.engine.slots import Slots


@dataclass(frozen=True, slots=True)
class ReadOff:
    """What a step has read, on the host. lines: [P, 1 + 2 W] as ``Sequence.prompt_logprobs`` has them. sums: [Q, H]."""

    lines: NDArray[np.int32]
    sums: NDArray[np.float32]


@dataclass(slots=True)
class _Readers:
    """Whose readings a step makes, in the order of its arrays: lines of how many tokens, and sums."""

    lines: list[tuple[Sequence, int]] = field(default_factory=list)
    sums: list[Sequence] = field(default_factory=list)


class PromptReader:
    """Plans each step's readings and hands what they brought to the sequences, wherever these are by then."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._launched: dict[int, _Readers] = {}

    def plan(self, step: int, slots: Ints, starts: Ints, ends: Ints) -> Readings:
        """The readings of a step whose rows compute these slots' positions from ``starts`` up to ``ends``."""
        s = self._slots
        rows = np.flatnonzero(s.need_from[slots] < ends)
        if not len(rows):
            return NO_READINGS
        readers = self._launched[step] = _Readers()
        at: list[Ints] = []
        targets: list[Ints] = []
        counts: list[Ints] = []
        runs: list[tuple[int, int]] = []
        row_at = (
            np.cumsum(ends - starts) - ends
        )  # where position 0 of each row would stand among the query tokens
        for row in rows.tolist():
            slot = slots[row]
            seq = s.sequence[slot]
            assert seq is not None, "an empty slot was scheduled"
            first, last = seq.need_from, min(int(ends[row]), seq.need_to)
            if seq.request.need_from is None:
                runs.append((int(row_at[row]) + first, last - first))
                readers.sums.append(seq)
            else:
                at.append(np.arange(first, last, dtype=np.int32) + np.int32(row_at[row]))
                targets.append(s.tokens[slot, first + 1 : last + 1])
                counts.append(np.full(last - first, seq.request.prompt_logprobs, np.int32))
                readers.lines.append((seq, last - first))
            seq.need_from = s.need_from[slot] = last if last < seq.need_to else NOTHING
        sums = np.array(runs, np.int32).reshape(-1, 2)
        return Readings(_joined(at), _joined(targets), _joined(counts), sums[:, 0].copy(), sums[:, 1].copy())

    def retire(self, step: int, read: ReadOff) -> list[Sequence]:
        """Hand on what a finished step has read. Returns whose is not all finite: one log-probability of a place tells."""
        readers = self._launched.pop(step)
        spoilt: list[Sequence] = []
        start = 0
        for seq, count in readers.lines:
            width = 1 + 2 * seq.request.prompt_logprobs
            seq.prompt_logprobs.append(lines := read.lines[start : start + count, :width].copy())
            start += count
            if np.isnan(lines[:, 0].view(np.float32)).any():
                spoilt.append(seq)
        for seq, total in zip(readers.sums, read.sums, strict=True):
            seq.sums.append(total.copy())
            if not np.isfinite(total).all():
                spoilt.append(seq)
        return spoilt


def _joined(parts: Iterable[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int32), *parts])
