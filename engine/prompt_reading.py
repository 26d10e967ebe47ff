"""The device's half of readings: logits of prompt tokens, a bounded number at once, and sums of hidden states."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.engine.models.decoder import Model
from headrace.engine.plan import Readings
from headrace.engine.staging import Staging
from headrace.kernels.logprobs import logprobs
from headrace.kernels.segment_sum import segment_sum

LOGITS_AT_ONCE = 512
"""Prompt tokens whose logits are in memory together, whatever the chunk's length: [512, V] and no more."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a step has read, on the device. lines: [P, 1 + 2 W] int32 as in ``pack_logprobs``; sums: [Q, H] fp32."""

    lines: Tensor
    sums: Tensor


def read_prompts(model: Model, hidden: Tensor, readings: Readings, staging: Staging) -> Read:
    """Read what is asked off a step's hidden states, [T, H]."""
    at, targets, counts, sums_from, sums_len = staging.upload(
        [readings.logits_at, readings.targets, readings.counts, readings.sums_from, readings.sums_len]
    )
    width = int(readings.counts.max(initial=0))
    lines = torch.empty(len(at), 1 + 2 * width, dtype=torch.int32, device=hidden.device)
    for start in range(0, len(at), LOGITS_AT_ONCE):
        part = slice(start, start + LOGITS_AT_ONCE)
        logits = model.logits(hidden[at[part].long()])
        rows = torch.arange(len(logits), dtype=torch.int32, device=hidden.device)
        values, ids = logprobs(logits, rows, targets[part].long(), counts[part], width)
        lines[part] = pack_logprobs(values, ids)
    return Read(lines, segment_sum(hidden, sums_from, sums_len))


def pack_logprobs(values: Tensor, ids: Tensor) -> Tensor:
    """[L, 1 + W] fp32 and [L, W] int32 of ``logprobs`` as [L, 1 + 2 W] int32, so that one copy takes them to the host.

    The bits of the chosen token's, then id and bits of each of the likeliest tokens.
    """
    bits = values.view(torch.int32)
    likeliest = torch.stack((ids, bits[:, 1:]), dim=2).flatten(1)
    return torch.cat((bits[:, :1], likeliest), dim=1)
