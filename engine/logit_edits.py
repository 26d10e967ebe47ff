"""The device's half of a step's edits of logits: a table with a line a slot, made when the first sequence needs it.

It takes some 30 KiB a slot, and a line of counts for each multiprocessor.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.engine.edits import MAX_LISTED, MAX_WORD_TOKENS, MAX_WORDS, Edits, Ints
from headrace.engine.slots import MAX_STOP_IDS
from headrace.engine.staging import Staging
from headrace.kernels.edit_logits import EditTable, edit_logits, programs


class LogitEdits:
    """Edits of S slots over a vocabulary of V tokens."""

    def __init__(self, slots: int, vocab_size: int, staging: Staging) -> None:
        device = staging.device

        def per_slot(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        listed = MAX_LISTED + MAX_STOP_IDS
        self.table = EditTable(
            prompt_lens=per_slot(),
            only_listed=per_slot(),
            num_listed=per_slot(),
            num_words=per_slot(),
            penalties=per_slot(3, dtype=torch.float32),
            listed=per_slot(listed),
            until=per_slot(listed),
            bias=per_slot(listed, dtype=torch.float32),
            words=per_slot(MAX_WORDS, MAX_WORD_TOKENS),
        )
        lines = programs(device) if device.type == "cuda" else 0
        self._counts = torch.zeros(lines, vocab_size, dtype=torch.int32, device=device)
        self._staging = staging

    def set(self, edits: Sequence[tuple[int, Edits]]) -> None:
        """Set the lines of slots that got a new sequence."""
        slots = np.array([slot for slot, _ in edits], np.int32)
        own = [edit for _, edit in edits]
        self._set_lines(slots, own)
        self._set_listed(slots, own)
        self._set_words(slots, own)

    def _set_lines(self, slots: Ints, own: list[Edits]) -> None:
        table = self.table
        counts = [(e.prompt_len, e.only_listed, len(e.listed), len(e.words)) for e in own]
        penalties = np.array([(e.repetition, e.frequency, e.presence) for e in own], np.float32)
        lines, prompt_lens, only_listed, num_listed, num_words, weights = self._staging.upload(
            [slots, *np.array(counts, np.int32).T.copy(), penalties.view(np.int32).ravel()]
        )
        at = lines.long()
        table.prompt_lens[at] = prompt_lens
        table.only_listed[at] = only_listed
        table.num_listed[at] = num_listed
        table.num_words[at] = num_words
        table.penalties[at] = weights.view(torch.float32).view(-1, 3)

    def _set_listed(self, slots: Ints, own: list[Edits]) -> None:
        lines, places = _places(slots, [len(e.listed) for e in own])
        if not len(lines):
            return
        ids, until = np.concatenate([e.listed for e in own]), np.concatenate([e.until for e in own])
        bias = np.concatenate([e.bias for e in own]).view(np.int32)
        line, place, *entries = self._staging.upload([lines, places, ids, until, bias])
        at = (line.long(), place.long())
        self.table.listed[at], self.table.until[at] = entries[:2]
        self.table.bias[at] = entries[2].view(torch.float32)

    def _set_words(self, slots: Ints, own: list[Edits]) -> None:
        lines, places = _places(slots, [len(e.words) for e in own])
        if not len(lines):
            return
        line, place, words = self._staging.upload(
            [lines, places, np.concatenate([e.words for e in own]).ravel()]
        )
        self.table.words[line.long(), place.long()] = words.view(-1, MAX_WORD_TOKENS)

    def apply(
        self,
        logits: Tensor,
        rows: Tensor,
        slots: Tensor,
        lengths: Tensor,
        pages: Tensor,
        block_tables: Tensor,
    ) -> Tensor:
        """Edited logits of these rows, [E, V] fp32. Shapes as in ``edit_logits``."""
        return edit_logits(logits, rows, slots, lengths, pages, block_tables, self.table, self._counts)


def _places(slots: Ints, counts: list[int]) -> tuple[Ints, Ints]:
    """Line and place in it of every entry, where each slot has so many."""
    places = [np.arange(count, dtype=np.int32) for count in counts]
    return np.repeat(slots, counts), np.concatenate(places)
