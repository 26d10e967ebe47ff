"""Host to device: a step's small arrays travel as one copy from pinned memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 4  # 16 bytes, in int32: what vector loads and 64-bit views need
_DEPTH = 32  # buffers in turn: more than the uploads of a step and of those in flight


@dataclass(slots=True)
class _Buffer:
    pinned: Tensor
    sent: torch.cuda.Event | None = None


class Staging:
    """A ring of pinned buffers. A buffer is written again only after its copy has left it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = [_Buffer(torch.empty(0, dtype=torch.int32)) for _ in range(_DEPTH)]
        self._next = 0

    def upload(self, arrays: Sequence[NDArray[np.int32]]) -> list[Tensor]:
        """Each array on the device, int32, one copy for all. On the CPU the arrays themselves."""
        if self.device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        starts, total = [], 0
        for array in arrays:
            starts.append(total)
            total += -(-len(array) // _ALIGN) * _ALIGN
        on_device = torch.empty(max(total, 1), dtype=torch.int32, device=self.device)
        self._send(zip(starts, arrays, strict=True), total, on_device)
        return [on_device[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]

    def upload_into(self, destination: Tensor, array: NDArray[np.int32]) -> None:
        """Overwrite the beginning of a device buffer that others (a captured graph) hold on to."""
        if self.device.type == "cpu":
            destination[: len(array)] = torch.from_numpy(array)
            return
        self._send([(0, array)], len(array), destination)

    def _send(self, parts: object, total: int, destination: Tensor) -> None:
        buffer = self._ring[self._next]
        self._next = (self._next + 1) % _DEPTH
        if buffer.sent is not None:
            buffer.sent.synchronize()
        if len(buffer.pinned) < total:
            buffer.pinned = torch.empty(max(2 * total, 1 << 16), dtype=torch.int32, pin_memory=True)
        host = buffer.pinned.numpy()
        for start, array in parts:  # type: ignore[attr-defined]
            host[start : start + len(array)] = array
        destination[:total].copy_(buffer.pinned[:total], non_blocking=True)
        buffer.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        buffer.sent.record()
