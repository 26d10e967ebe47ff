"""Masks of the tokens that grammars allow, computed in threads on the host while the device runs the forward."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.engine.guide import Guide, GuidedRow
from headrace.engine.panics import LibraryPanic, panics_as_errors

FEW = 2
"""Threads for masks as they mostly are: of some microseconds a row, where more spend longer waking than working
(bench/LOG.md, engine 13)."""

MUCH_S = 0.2
"""A fill that took all its threads together so long is followed by one with a thread for each core."""

_RING = 2  # a buffer is filled while the copy of the one before may still run


class Masks:
    """Fills the masks of a step's guided rows. Nothing is made before the first of them.

    launched: for each step with guided rows whose tokens may not have been taken in, what waits for them and does so. Filled
    by who launches steps; all of them come before the next step's masks.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.launched: deque[Callable[[], object]] = deque()
        self._words = -(-vocab_size // 32)
        self._device = device
        self._executors: dict[int | None, Any] = {}
        self._work_s = 0.0
        self._ring: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def fill(self, rows: Sequence[GuidedRow]) -> Tensor:
        """What each row may choose from: [M, W] int32 on the device, bit v mod 32 of word v div 32 for token v."""
        while self.launched:
            self.launched.popleft()()
        buffer = self._buffer(len(rows))
        masks = buffer.numpy()[: len(rows)]
        free = [(row.guide, line) for line, row in enumerate(rows) if _is_free(row)]
        if free:
            threads = FEW if self._work_s < MUCH_S else None
            executor, began = self._executor(threads), time.perf_counter()
            _compute(executor, free, masks)
            self._work_s = (time.perf_counter() - began) * (threads or os.cpu_count() or 1)
        _finish(masks, rows)
        return self._send(buffer, len(rows))

    def everything(self) -> Tensor:
        """A mask that allows every token, [1, W] int32 on the device."""
        return torch.full((1, self._words), -1, dtype=torch.int32, device=self._device)

    def take(self, rows: Sequence[GuidedRow], tokens: NDArray[np.int64]) -> None:
        """Let the guides take in what their rows sampled. tokens: [K], of all the step's sample rows; -1: none was chosen."""
        wanted = [row for row in rows if row.guide.wants(row.position)]
        own = tokens[[row.row for row in wanted]].tolist()
        for row, token in zip(wanted, own, strict=True):
            if token < 0:
                row.guide.end_unchosen()
                continue
            try:
                with panics_as_errors:
                    row.guide.matcher.consume_token(token)  # takes a microsecond: less than to wake a thread
                    row.guide.took()
            except LibraryPanic:
                row.guide.fail()

    def _executor(self, threads: int | None) -> Any:
        """One with so many threads; None: one for each core."""
        if threads not in self._executors:
            import llguidance

            self._executors[threads] = llguidance.LLExecutor(num_threads=threads)
        return self._executors[threads]

    def _buffer(self, rows: int) -> Tensor:
        """A host buffer of at least so many lines, no copy of which is under way; the last one used comes last."""
        on_cuda = self._device.type == "cuda"
        if len(self._ring) == _RING:
            buffer, sent = self._ring.pop(0)
            if sent is not None:
                sent.synchronize()
            if len(buffer) >= rows:
                return buffer
        return torch.empty(2 * rows, self._words, dtype=torch.int32, pin_memory=on_cuda)

    def _send(self, buffer: Tensor, rows: int) -> Tensor:
        if self._device.type == "cpu":
            self._ring.append((buffer, None))
            return buffer[:rows]
        masks = buffer[:rows].to(self._device, non_blocking=True)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record()
        self._ring.append((buffer, sent))
        return masks


def _is_free(row: GuidedRow) -> bool:
    """Whether the mask is the matcher's to say. Rows of overshoot take any token: it is dropped."""
    return row.guide.outcome is None and not row.guide.forced


def _compute(executor: Any, guides: Sequence[tuple[Guide, int]], masks: NDArray[np.int32]) -> None:
    """Write each guide's mask to its line. After a panic one by one, so that it fails the guide that it is of alone."""
    matchers = [(guide.matcher, line) for guide, line in guides]
    try:
        with panics_as_errors:
            executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(masks))
    except LibraryPanic:
        if len(guides) > 1:
            for each in guides:
                _compute(executor, [each], masks)
        else:
            guides[0][0].fail()


def _finish(masks: NDArray[np.int32], rows: Sequence[GuidedRow]) -> None:
    """What the matchers do not know: forced tokens, and when the model may end its answer."""
    for mask, row in zip(masks, rows, strict=True):
        guide = row.guide
        if guide.outcome is None and guide.matcher.is_error():
            guide.fail()
        if guide.outcome is not None:
            mask[:] = -1
        elif guide.forced:
            mask[:] = 0
            _bits(mask)[guide.forced[0] // 32] = 1 << guide.forced[0] % 32
        elif row.position < guide.may_end_at:
            _keep_out(_bits(mask), guide.end_tokens)


def _keep_out(bits: NDArray[np.uint32], tokens: Sequence[int]) -> None:
    """Clear these tokens' bits, unless nothing else is allowed."""
    allowed = [token for token in tokens if int(bits[token // 32]) >> token % 32 & 1]
    if not allowed:
        return
    kept = bits.copy()
    for token in allowed:
        kept[token // 32] &= np.uint32(0xFFFFFFFF ^ 1 << token % 32)
    if kept.any():
        bits[:] = kept


def _bits(mask: NDArray[np.int32]) -> NDArray[np.uint32]:
    return mask.view(np.uint32)
