"""One request on its way through the engine."""

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from headrace.engine.edits import Edits
from headrace.engine.errors import InvalidRequest
from headrace.engine.guide import Guide
from headrace.engine.prefix_tree import Node
from headrace.engine.request import Completion, FinishReason, Logprobs, Outputs, Pooling, Request

NOTHING = np.iinfo(np.int32).max
"""A position that no sequence reaches: nothing (more) is to be read off its prompt."""

Urgency = tuple[int, float, int]
"""Priority, deadline, arrival: what sorts waiting sequences. No two are alike, for no two arrive together."""


class SequenceStatus(Enum):
    """Where a sequence stands. A preempted one waits again; its tokens are kept, its blocks are not."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and what has become of it. While it runs, counts that change each step live in the slot arrays.

    tokens: prompt and generated ids known on the host, when not running (the slot's line holds them while it runs).
    limit: the most tokens it may ever have, prompt included. in_flight: samples launched but not read back yet when
    it left its slot. displaced: preemptions that made room for a more urgent newcomer. nodes: the prefix tree's node of
    each full block so far, None where the block is another's; tail: number of the last one. edits: what it changes about
    its logits. guide: leads it through its grammar, once that is compiled. logprobs: for each token read back, [chosen, id,
    logprob, id, logprob...] as int32 bits, where asked for.
    need_from, need_to: the prompt's positions that are still to be read off by steps not yet launched (``readings.py``).
    prompt_logprobs: lines like those of ``logprobs``, [P, 1 + 2 W] for each step that gave some. sums: [H] each, of the
    hidden states to be pooled.
    """

    request: Request
    arrival: int
    limit: int
    seed: int
    added_at: float
    tokens: NDArray[np.int32]
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    in_flight: int = 0
    preemptions: int = 0
    displaced: int = 0
    cached_tokens: int = 0
    nodes: list[Node | None] = field(default_factory=list)
    tail: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    stop_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    edits: Edits | None = None
    guide: Guide | None = None
    logprobs: list[NDArray[np.int32]] = field(default_factory=list)
    need_from: int = NOTHING
    need_to: int = NOTHING
    prompt_logprobs: list[NDArray[np.int32]] = field(default_factory=list)
    sums: list[NDArray[np.float32]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.need_from, self.need_to = positions_needed(self.request)

    @property
    def id(self) -> str:
        """The caller's id."""
        return self.request.id

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt, whatever has been generated since."""
        return len(self.request.prompt)

    @property
    def no_stop_before(self) -> int:
        """No stop token counts before it has this many tokens, prompt included. A guide sees to that itself."""
        return self.prompt_len + (0 if self.guide else self.request.sampling.min_tokens)

    @property
    def urgency(self) -> Urgency:
        """Sorts waiting sequences: priority, then deadline, then arrival."""
        deadline = self.request.deadline
        return (self.request.priority, float("inf") if deadline is None else deadline, self.arrival)

    def completion(
        self,
        reason: FinishReason,
        now: float,
        stop_token: int | None,
        keep: int | None,
        error: InvalidRequest | None = None,
    ) -> Completion:
        """How it ended: at ``stop_token``, if one ended it, with the first ``keep`` tokens (prompt included) or all."""
        params = self.request.sampling
        generated = self.tokens[self.prompt_len : keep].tolist()
        if stop_token is not None and not params.include_stop:
            generated = generated[:-1]
        if self.request.outputs is not Outputs.TOKENS:
            generated = []
        return Completion(
            id=self.id,
            token_ids=generated,
            finish_reason=reason,
            stop_reason=stop_token if stop_token in params.stop_token_ids else None,
            prompt_tokens=self.prompt_len,
            cached_tokens=min(self.cached_tokens, self.prompt_len),
            preemptions=self.preemptions,
            queued_s=(self.scheduled_at or now) - self.added_at,
            first_token_s=(self.first_token_at or now) - self.added_at,
            total_s=now - self.added_at,
            logprobs=self._logprobs(len(generated)),
            prompt_logprobs=None if reason is FinishReason.ABORT else self._prompt_logprobs(),
            vector=None if reason is FinishReason.ABORT else self._vector(),
            error=error,
        )

    def _logprobs(self, count: int) -> Logprobs | None:
        """The first ``count`` lines of the log-probabilities, unpacked."""
        wanted = self.request.sampling.logprobs
        if wanted is None:
            return None
        width = 1 + 2 * wanted
        lines = np.array([line[:width] for line in self.logprobs[:count]], np.int32).reshape(count, width)
        return _unpacked(lines)

    def _prompt_logprobs(self) -> Logprobs | None:
        request = self.request
        if request.need_from is None:
            return None
        width = 1 + 2 * request.prompt_logprobs
        return _unpacked(np.concatenate([np.empty((0, width), np.int32), *self.prompt_logprobs]))

    def _vector(self) -> NDArray[np.float32] | None:
        if self.request.outputs is not Outputs.VECTOR:
            return None
        pooled: NDArray[np.float32] = np.sum(self.sums, axis=0, dtype=np.float32)
        return pooled / np.float32(self.prompt_len) if self.request.pooling is Pooling.MEAN else pooled


def positions_needed(request: Request) -> tuple[int, int]:
    """The positions of the prompt, first and one past the last, of which more is wanted than keys and values."""
    length = len(request.prompt)
    if request.outputs is Outputs.VECTOR:
        ranges = {Pooling.MEAN: (0, length), Pooling.LAST: (length - 1, length), Pooling.CLS: (0, 1)}
        return ranges[request.pooling]
    if (
        request.need_from is None or request.need_from >= length - 1
    ):  # what follows the last is not the prompt's
        return NOTHING, NOTHING
    return request.need_from, length - 1


def _unpacked(lines: NDArray[np.int32]) -> Logprobs:
    """[T, 1 + 2 W] lines as log-probabilities."""
    values = lines.view(np.float32)
    return Logprobs(values[:, 0].copy(), lines[:, 1::2].copy(), values[:, 2::2].copy())
