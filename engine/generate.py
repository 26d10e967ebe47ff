"""A JSON Lines file through an engine: prompts in, results out as they finish, in bounded memory.

The rule for resuming: a result belongs to the input's line of that number (``"line"``, from 1), so a run that is taken up
again skips the lines that have a result, good or bad. Ids are not used for this: nothing says that a file's ids are
unique, and a number costs one bit. Lines may have been added since, but those that have a result must be as they were,
which a digest in each result (``"input"``) tells.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from headrace.engine.answers import TextChoice
from headrace.engine.result_file import Inputs, LineDigest, LineSet, ResultFile
from headrace.engine.text import reason, refusal
from headrace.engine.text_engine import RequestError, TextCompletion, TextRequest
from headrace.engine.token_logprobs import TokenLogprob

MAX_LINE_BYTES = 16 * 1024 * 1024
POLL_S = 0.2
"""How long a stop, or a deadline, may go unnoticed while the engine has nothing to report."""
EXPIRED = RequestError("deadline_exceeded", "the deadline passed before the job ended")
"""What is told of a line whose deadline has passed; the worker's jobs say the same."""


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """What a line says: a request, or why it is none. ``job`` is handed to ``encode`` as it is (ids, metadata)."""

    request: TextRequest | RequestError
    job: Any = None


class Answering(Protocol):
    """What of a TextEngine a run needs."""

    def add_many(self, requests: Sequence[TextRequest]) -> None:
        """See TextEngine."""

    def poll(self, timeout: float) -> list[TextCompletion]:
        """See TextEngine."""

    def abort(self, ids: Sequence[str]) -> None:
        """See TextEngine."""


@dataclass(slots=True)
class Progress:
    """How far a run is. ``skipped``: lines that had a result already. Bytes are the input's."""

    bytes_total: int
    bytes_read: int = 0
    in_flight: int = 0
    succeeded: int = 0
    failed: int = 0
    expired: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    stopped: bool = False

    @property
    def done(self) -> int:
        """Lines that ended in this run."""
        return self.succeeded + self.failed + self.expired


Parse = Callable[[bytes, int], ParsedLine]
"""From a line and its number."""
Encode = Callable[[Any, TextCompletion], Mapping[str, Any]]
Line = tuple[int, str, bytes | None]
"""Number (from 1), digest, and the bytes: None for a line that is too long."""


def plain_result(job: Any, completion: TextCompletion) -> dict[str, Any]:
    """A completion as a plain object: the default ``encode``. A mapping given as ``job`` stands in front."""
    ids = dict(job) if isinstance(job, Mapping) else {}
    return (
        ids
        | {
            "state": _state(completion),
            "choices": [
                {
                    "index": choice.index,
                    "text": choice.text,
                    "finish_reason": choice.finish_reason.value,
                    "stop_reason": choice.stop_reason,
                }
                | _plain_chat(choice)
                | _plain_logprobs(choice)
                for choice in completion.choices
            ],
            "usage": {
                "prompt_tokens": completion.prompt_tokens,
                "cached_tokens": completion.cached_tokens,
                "completion_tokens": completion.completion_tokens,
            },
            "error": dataclasses.asdict(completion.error) if completion.error else None,
        }
        | _plain_looks(completion)
    )


def _state(completion: TextCompletion) -> str:
    if completion.error is None:
        return "succeeded"
    return "expired" if completion.error == EXPIRED else "failed"


def _plain_looks(completion: TextCompletion) -> dict[str, Any]:
    """What the model made of the prompt, where that was asked for."""
    looks: dict[str, Any] = {}
    if completion.prompt_logprobs is not None:
        looks["prompt_logprobs"] = _plain_tokens(completion.prompt_logprobs)
    if completion.scores is not None:
        looks["scores"] = [dataclasses.asdict(score) for score in completion.scores]
    if completion.vectors is not None:
        looks["vectors"] = [vector.tolist() for vector in completion.vectors]
    return looks


def _plain_chat(choice: TextChoice) -> dict[str, Any]:
    plain: dict[str, Any] = {} if choice.reasoning is None else {"reasoning_content": choice.reasoning}
    if choice.tool_calls:
        plain["tool_calls"] = [dataclasses.asdict(call) for call in choice.tool_calls]
    return plain


def _plain_logprobs(choice: TextChoice) -> dict[str, Any]:
    return {} if choice.logprobs is None else {"logprobs": _plain_tokens(choice.logprobs)}


def _plain_tokens(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    def plain(token: TokenLogprob) -> dict[str, Any]:
        text = token.data.decode("utf-8", "replace")
        return {"token_id": token.token_id, "token": text, "logprob": token.logprob}

    return [plain(token) | {"top": [plain(other) for other in token.top]} for token in tokens]


def generate(
    in_path: Path,
    out_path: Path,
    engine: Answering,
    parse: Parse,
    *,
    encode: Encode = plain_result,
    resume: bool = False,
    max_in_flight: int = 4096,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    stop: threading.Event | None = None,
) -> Progress:
    """Run every line of ``in_path`` and append each result to ``out_path`` when it ends, in no particular order.

    At most ``max_in_flight`` lines are in memory. ``on_progress`` is called after each batch of results. ``stop``
    ends the run early: what is still running is aborted and left without a result, so that resuming runs it. Without
    a seed of its own, a line's sampling is seeded by its number. A line whose deadline passes before it has ended is not run,
    or aborted, and ends as EXPIRED. A line at which ``parse`` or ``encode`` raises ends with an
    ``internal_error``.

    Raises OSError for files that cannot be used (see ResultFile; FileExistsError when the results to go on with are
    another input's) and EngineDead; the output is valid in any case.
    """
    progress = Progress(bytes_total=in_path.stat().st_size)
    with (
        in_path.open("rb") as source,
        ResultFile(out_path, resume=resume, max_line=progress.bytes_total) as results,
    ):
        if _inputs(source, results.inputs) != results.inputs:
            raise FileExistsError(f"{out_path} holds results of another input than {in_path}")
        source.seek(0)
        run = _Run(
            engine, results, parse, encode, max_in_flight, on_progress, stop or threading.Event(), progress
        )
        run.all(_lines(source, results.done, progress))
    return progress


@dataclass(slots=True)
class _Run:
    """One call of ``generate``. jobs: of lines in flight, by number, the digest and what ``encode`` gets.

    deadlines: of lines in flight that have one, by number, in seconds since the epoch. overdue: lines that are aborted for
    theirs.
    """

    engine: Answering
    results: ResultFile
    parse: Parse
    encode: Encode
    max_in_flight: int
    on_progress: Callable[[Progress], None]
    stop: threading.Event
    progress: Progress
    jobs: dict[int, tuple[str, Any]] = field(default_factory=dict)
    deadlines: dict[int, float] = field(default_factory=dict)
    overdue: set[int] = field(default_factory=set)

    def all(self, lines: Iterator[Line]) -> None:
        """Keep the engine full until the lines are used up and the last has ended."""
        more = True
        while (more or self.jobs) and not self.stop.is_set():
            more = more and self._refill(lines)
            self._keep_deadlines()
            if self.jobs:
                self._write([self._ended(completion) for completion in self.engine.poll(POLL_S)])
        if self.stop.is_set():
            self.progress.stopped = True
            self._give_up()

    def _refill(self, lines: Iterator[Line]) -> bool:
        """Take in as many lines as there is room for. False when there are no more."""
        room = self.max_in_flight - len(self.jobs)
        taken = [line for _, line in zip(range(room), lines, strict=False)]
        requests: list[TextRequest] = []
        refused: list[TextCompletion] = []
        for number, digest, data in taken:
            parsed = self._parsed(number, data)
            self.jobs[number] = digest, parsed.job
            request = self._in_time(number, parsed.request)
            if isinstance(request, TextRequest):
                requests.append(dataclasses.replace(request, id=str(number)))
            else:
                refused.append(TextCompletion(str(number), [], error=request))
        if requests:
            self.engine.add_many(requests)
        self._write(refused)
        return len(taken) == room

    def _in_time(self, number: int, request: TextRequest | RequestError) -> TextRequest | RequestError:
        """What a line asks for, unless its deadline has passed already."""
        if isinstance(request, TextRequest) and request.deadline is not None:
            if request.deadline <= time.time():
                return EXPIRED
            self.deadlines[number] = request.deadline
        return request

    def _keep_deadlines(self) -> None:
        """Abort what is in flight past its deadline."""
        now = time.time()
        if due := [line for line, deadline in self.deadlines.items() if deadline <= now]:
            for line in due:
                del self.deadlines[line]
            self.overdue.update(due)
            self.engine.abort([str(line) for line in due])

    def _ended(self, completion: TextCompletion) -> TextCompletion:
        """What is told of a line that has ended; one that was quicker than its abort has its answer."""
        line = int(completion.id)
        if line not in self.overdue:
            return completion
        self.overdue.discard(line)
        return TextCompletion(completion.id, [], error=EXPIRED) if completion.aborted else completion

    def _parsed(self, number: int, data: bytes | None) -> ParsedLine:
        """What a line says. A defect of ours in reading it costs this line and no other."""
        if data is None:
            return ParsedLine(
                RequestError("message_too_large", f"the line has more than {MAX_LINE_BYTES:,} bytes")
            )
        try:
            return self.parse(data, number)
        except Exception as error:
            return ParsedLine(reason(refusal(f"line {number}", "reading the line", error)))

    def _write(self, completions: Sequence[TextCompletion]) -> None:
        if not completions:
            return
        results = []
        for completion in completions:
            line = int(completion.id)
            digest, job = self.jobs.pop(line)
            self.deadlines.pop(line, None)
            told, result = self._encoded(job, completion)
            results.append((line, digest, result))
            self._count(told)
        self.results.write(results)
        self.progress.in_flight = len(self.jobs)
        self.on_progress(self.progress)

    def _encoded(self, job: Any, completion: TextCompletion) -> tuple[TextCompletion, Mapping[str, Any]]:
        """What is told of a line, and its result. A defect of ours in writing it down costs this line and no other."""
        try:
            return completion, self.encode(job, completion)
        except Exception as error:
            why = reason(refusal(f"line {completion.id}", "writing down the answer", error))
            told = TextCompletion(completion.id, [], error=why)
            return told, self.encode(job, told)

    def _count(self, completion: TextCompletion) -> None:
        if completion.error == EXPIRED:
            self.progress.expired += 1
        elif completion.error:
            self.progress.failed += 1
        else:
            self.progress.succeeded += 1
        self.progress.prompt_tokens += completion.prompt_tokens
        self.progress.cached_tokens += completion.cached_tokens
        self.progress.completion_tokens += completion.completion_tokens

    def _give_up(self) -> None:
        """Abort what is running. What ended by itself meanwhile still counts."""
        self.engine.abort([str(line) for line in self.jobs])
        while self.jobs and (completions := self.engine.poll(POLL_S)):
            aborted = [c for c in completions if c.aborted]
            for completion in aborted:
                del self.jobs[int(completion.id)]
            self._write([c for c in completions if not c.aborted])
        self.progress.in_flight = len(self.jobs)


def _lines(source: BinaryIO, done: LineSet, progress: Progress) -> Iterator[Line]:
    """Each line to run. Empty lines and those in ``done`` are skipped."""
    for number, digest, whole in _all_lines(source, progress):
        if number in done:
            progress.skipped += 1
        elif whole is None or whole.strip():
            yield number, digest.hex(), whole


def _inputs(source: BinaryIO, among: Inputs) -> Inputs:
    """What the input says of the lines ``among`` the results."""
    found = Inputs()
    if len(among):
        for number, digest, _ in _all_lines(source, Progress(0)):
            if number in among:
                found.add(number, digest.hex())
    return found


def _all_lines(source: BinaryIO, progress: Progress) -> Iterator[tuple[int, LineDigest, bytes | None]]:
    number = 0
    while line := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        progress.bytes_read += len(line)
        digest = LineDigest().update(line)
        whole: bytes | None = line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            whole = None
            line = source.readline(MAX_LINE_BYTES + 1)
            progress.bytes_read += len(line)
            digest.update(line)
        yield number, digest, whole
