"""A TokenEngine that says what it is told to, for tests of the text side."""

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np

from headrace.engine.errors import EngineDead, InvalidRequest
from headrace.engine.request import (
    Completion,
    EngineStats,
    FinishReason,
    Logprobs,
    ModelInfo,
    Request,
    StepOutput,
)


class ScriptedEngine:
    """Each poll gives every running request its next ``burst`` tokens; the newest request is served first.

    script: from a request to the tokens it will say. overshoot: polls that pass before ``finish`` is heeded.
    """

    def __init__(
        self,
        script: Callable[[Request], list[int]],
        vocab_size: int,
        *,
        max_context: int = 512,
        burst: int = 1,
        overshoot: int = 0,
    ) -> None:
        self.info = ModelInfo(
            path="scripted",
            vocab_size=vocab_size,
            max_context=max_context,
            max_slots=64,
            bos_id=0,
            eos_ids=(1,),
            sampling={},
        )
        self.seen: list[Request] = []
        self.finished: list[tuple[str, int]] = []
        self.most_running = 0
        self.dead = False
        self.remember = True
        self._script = script
        self._burst = burst
        self._overshoot = overshoot
        self._running: dict[str, tuple[Request, list[int], int]] = {}
        self._finishing: dict[str, tuple[int, int]] = {}
        self._ended: list[Completion] = []

    def add_many(self, requests: Sequence[Request]) -> None:
        """Take all, or refuse all when one has priority 13."""
        if any(request.priority == 13 for request in requests):
            raise InvalidRequest("13 is not liked here", param="priority")
        for request in requests:
            if self.remember:
                self.seen.append(request)
            self._running[request.id] = (request, self._script(request), 0)
        self.most_running = max(self.most_running, len(self._running))

    def finish(self, request_id: str, at_token: int) -> None:
        """Note it; act on it ``overshoot`` polls later."""
        self.finished.append((request_id, at_token))
        self._finishing[request_id] = (at_token, self._overshoot)

    def abort(self, request_id: str) -> None:
        """End it with what it has said."""
        if request_id in self._running:
            self._end(request_id, self._running[request_id][2], FinishReason.ABORT)

    def poll(self, timeout: float) -> StepOutput:
        """One step."""
        if self.dead:
            raise EngineDead("the scripted engine was told to die")
        output = StepOutput()
        for request_id, (request, tokens, said) in reversed(list(self._running.items())):
            at_token, polls = self._finishing.get(request_id, (0, -1))
            if polls == 0:
                self._end(request_id, at_token, FinishReason.STOP)
                continue
            self._finishing[request_id] = (at_token, polls - 1)
            limit = request.sampling.max_tokens or len(tokens) + 1
            now = min(said + self._burst, len(tokens), limit)
            if request.stream:
                output.tokens.append((request_id, tokens[said:now]))
            self._running[request_id] = (request, tokens, now)
            if now in (len(tokens), limit):
                self._end(request_id, now, FinishReason.LENGTH if now == limit else FinishReason.STOP)
        output.completions, self._ended = self._ended, []
        return output

    def stats(self) -> EngineStats:
        """Mostly zeros."""
        return EngineStats(**{f.name: 0 for f in fields(EngineStats)} | {"running": len(self._running)})

    def close(self) -> None:
        """Nothing to release."""

    def _end(self, request_id: str, kept: int, reason: FinishReason) -> None:
        request, tokens, _ = self._running.pop(request_id)
        self._finishing.pop(request_id, None)
        self._ended.append(
            Completion(
                id=request_id,
                token_ids=tokens[:kept],
                finish_reason=reason,
                stop_reason=None,
                prompt_tokens=len(request.prompt),
                cached_tokens=0,
                preemptions=0,
                queued_s=0.0,
                first_token_s=0.0,
                total_s=0.0,
                logprobs=_logprobs(tokens[:kept], request.sampling.logprobs),
            )
        )


def _logprobs(tokens: list[int], wanted: int | None) -> Logprobs | None:
    """Each chosen token's is minus its id; the likeliest are the ids from 0."""
    if wanted is None:
        return None
    likeliest = np.tile(np.arange(wanted, dtype=np.int32), (len(tokens), 1))
    return Logprobs(-np.array(tokens, np.float32), likeliest, -likeliest.astype(np.float32))
