"""Between the wire and the engine: PromptJob to TextRequest, TextCompletion to JobResult.

The only place that knows both sides' words. ``headrace generate`` uses it too, without a worker.
"""

import json
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.engine.answers import TextChoice
from headrace.engine.chat import ChatOptions
from headrace.engine.chat import ToolChoice as EngineToolChoice
from headrace.engine.grammar import Grammar
from headrace.engine.request import Pooling, SamplingParams
from headrace.engine.text_engine import RequestError, TextCompletion, TextRequest
from headrace.engine.token_logprobs import TokenLogprob as EngineLogprob
from headrace.schemas import (
    Envelope,
    ErrorCode,
    InvalidJob,
    JobError,
    JobKind,
    JobResult,
    JobState,
    Message,
    PromptJob,
    Sampling,
    Source,
    Timings,
    Unparsable,
)
from headrace.schemas.chat import NamedTool, ToolCall
from headrace.schemas.envelope import read_record
from headrace.schemas.job import job_of
from headrace.schemas.looks import Embedding

DEFAULT_ANSWER_TOKENS = 256  # guessed for jobs that set no max_tokens, for admission's accounts only
CHARS_PER_TOKEN = 4
_ENGINES_NAMES = {"include_stop": "include_stop_str_in_output"}
_INDEX = re.compile(r"\[(\d+)\]")


def to_request(job: PromptJob, id: str, priority: int = 0, deadline_s: float | None = None) -> TextRequest:
    """The engine's view of a job. ``id`` also seeds its sampling, so a replay gives the same answer.

    deadline_s: seconds since the epoch, its batch's where the job has none.
    """
    return TextRequest(
        id=id,
        prompt=job.prompt,
        prompt_token_ids=job.prompt_token_ids,
        messages=None if job.messages is None else [_message(message) for message in job.messages],
        inputs=job.inputs,
        chat=_chat(job),
        sampling=_sampling(job.sampling),
        stop=tuple(job.sampling.stop),
        bad_words=tuple(job.sampling.bad_words),
        n=job.sampling.n,
        skip_special_tokens=job.sampling.skip_special_tokens,
        truncate_prompt_tokens=job.sampling.truncate_prompt_tokens,
        echo=job.sampling.echo,
        prompt_logprobs=job.sampling.prompt_logprobs,
        continuations=job.continuations,
        pooling=None if job.embedding is None else Pooling(job.embedding.pooling),
        normalize=job.embedding is None or job.embedding.normalize,
        grammar=_grammar(job),
        priority=priority,
        deadline=deadline_s,
        salt=job.tenant,  # prefixes are shared inside a tenant: timing must not tell one what another asks
    )


def cost(job: PromptJob) -> int:
    """Tokens a job is expected to take, prompt and answer: what admission charges its tier."""
    if job.inputs is not None:
        return 1 + _lengths(job.inputs, job.sampling.truncate_prompt_tokens)
    if job.prompt_token_ids is not None:
        prompt = len(job.prompt_token_ids)
    elif job.prompt is not None:
        prompt = len(job.prompt) // CHARS_PER_TOKEN
    else:
        prompt = sum(len(message.text) for message in job.messages or ()) // CHARS_PER_TOKEN
    if job.sampling.truncate_prompt_tokens is not None:
        prompt = min(prompt, job.sampling.truncate_prompt_tokens)
    if job.embedding is not None:
        return 1 + prompt
    if job.continuations is not None:
        return 1 + prompt + _lengths(job.continuations)
    return 1 + prompt + job.sampling.n * (job.sampling.max_tokens or DEFAULT_ANSWER_TOKENS)


def _lengths(items: Sequence[str | list[int]], longest: int | None = None) -> int:
    """Tokens that texts or lists of ids are expected to have together, of each no more than ``longest``."""
    sizes = [len(item) // (CHARS_PER_TOKEN if isinstance(item, str) else 1) for item in items]
    return sum(sizes if longest is None else (min(size, longest) for size in sizes))


def succeeded(
    job: PromptJob,
    done: TextCompletion,
    *,
    model: str,
    worker: str | None = None,
    run: int = 1,
    attempt: int = 1,
) -> JobResult:
    """The result of a job that the engine answered."""
    now, envelope = datetime.now(UTC), job.envelope
    # Plain values, validated at once: models inside would be validated by themselves first.
    result = {
        **_names(envelope),
        "model": model,
        "kind": job.kind,
        "run": run,
        "attempt": attempt,
        "state": JobState.SUCCEEDED,
        "choices": [_choice(choice) for choice in done.choices],
        "prompt_logprobs": _logprobs(done.prompt_logprobs),
        **_vectors(job, done),
        "scores": None
        if done.scores is None
        else [{"index": i, **asdict(score)} for i, score in enumerate(done.scores)],
        "usage": {
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
            "completion_tokens": done.completion_tokens,
        },
        "timings": {
            "submitted_at": envelope.submitted_at,
            "started_at": now - timedelta(seconds=done.total_s),
            "finished_at": now,
            "queued_s": done.queued_s,
            "first_token_s": done.first_token_s,
            "total_s": done.total_s,
        },
        "worker": worker,
        "metadata": job.metadata,
    }
    return JobResult.model_validate(result)


def unsuccessful(
    envelope: Envelope,
    state: JobState,
    error: JobError,
    *,
    job: PromptJob | None = None,
    worker: str | None = None,
    run: int = 1,
    attempt: int = 0,
) -> JobResult:
    """The result of a job that failed, expired or was cancelled; ``job`` is None where it could not be read."""
    return JobResult(
        **_names(envelope),
        model=envelope.model,
        kind=JobKind.COMPLETION if job is None else job.kind,
        run=run,
        attempt=attempt,
        state=state,
        timings=Timings(submitted_at=envelope.submitted_at, finished_at=datetime.now(UTC)),
        error=error,
        worker=worker,
        metadata={} if job is None else job.metadata,
    )


# --- for `headrace generate`: a line of a file in, a line of a file out ----------------------------------------------


def read_line(
    line: bytes, number: int, note: Callable[[dict[str, Any], int], object] = lambda body, number: None
) -> tuple[TextRequest | RequestError, PromptJob | Envelope | None]:
    """One line of a JSONL file as a request; a bad line is an error, with what could be read of its names.

    note: called with the line's JSON and its number.
    """
    source = Source("file", 0, number, timestamp_ms=-1)  # no time: ids of any age are fine
    try:
        record = read_record(line.rstrip(b"\r\n"), None, source)
        note(record.body, number)
        job = job_of(record)
    except InvalidJob as error:
        return RequestError(error.code, error.message, error.param), error.envelope
    except Unparsable as error:
        return RequestError(error.code, error.message), None
    deadline_s = None if job.deadline is None else job.deadline.timestamp()
    return to_request(job, str(number), deadline_s=deadline_s), job


def write_line(job: PromptJob | Envelope | None, done: TextCompletion, model: str) -> dict[str, Any]:
    """The line that answers ``read_line``'s: a JobResult, less what only a worker knows."""
    read = job if isinstance(job, PromptJob) else None
    error = None if done.error is None else to_error(done.error, read)
    if job is None:
        return {"state": JobState.FAILED, "error": error.model_dump(exclude_none=True) if error else None}
    if error is None and isinstance(job, PromptJob):
        result = succeeded(job, done, model=model)
    else:
        known = (job.envelope, job) if isinstance(job, PromptJob) else (job, None)
        error = error or _UNKNOWN
        state = JobState.EXPIRED if error.code == ErrorCode.DEADLINE_EXCEEDED else JobState.FAILED
        result = unsuccessful(known[0], state, error, job=known[1])
    dropped = {"timings", "worker", "run", "attempt", "id", "tenant"}
    return result.model_dump(mode="json", exclude_none=True, exclude=dropped)


_UNKNOWN = JobError(code=ErrorCode.INTERNAL_ERROR, message="the engine gave neither an answer nor an error")


def to_error(error: RequestError, job: PromptJob | None) -> JobError:
    """The engine's error, in the words of the wire: the field at fault is called as its producer wrote it."""
    if error.param is None:
        return JobError(code=error.code, message=error.message)
    param = _INDEX.sub(r".\1", _ENGINES_NAMES.get(error.param, error.param))
    param = param if job is None else job.path_of(param)
    message = (
        error.message.replace(error.param, param, 1)
        if error.message.startswith(error.param)
        else error.message
    )
    return JobError(code=error.code, message=message, param=param)


def _grammar(job: PromptJob) -> Grammar | None:
    if (form := job.answer_form) is None:
        return None
    match form.kind:
        case "json_schema":
            grammar = Grammar.json_schema(form.value, lenient=not form.strict)
        case "regex":
            grammar = Grammar.regex(form.value)
        case "choice":
            grammar = Grammar.choice(form.value)
        case "grammar":
            grammar = Grammar.lark(form.value)
    return grammar.named(form.path)


def _names(envelope: Envelope) -> dict[str, Any]:
    return {
        "id": envelope.id,
        "tenant": envelope.tenant,
        "job_id": envelope.job_id,
        "batch_id": envelope.batch_id,
        "custom_id": envelope.custom_id,
    }


def _choice(choice: TextChoice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": _logprobs(choice.logprobs),
        "reasoning_content": choice.reasoning,
        "tool_calls": [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ],
    }


def _logprobs(tokens: list[EngineLogprob] | None) -> list[dict[str, Any]] | None:
    if tokens is None:
        return None
    return [{**_likely(token), "top_logprobs": [_likely(other) for other in token.top]} for token in tokens]


def _vectors(job: PromptJob, done: TextCompletion) -> dict[str, Any]:
    if job.embedding is None or done.vectors is None:
        return {}
    vectors = [_vector(vector, job.embedding) for vector in done.vectors]
    return {"embedding": vectors[0]} if job.inputs is None else {"embeddings": vectors}


def _vector(vector: NDArray[np.float32], asked: Embedding) -> list[float] | str:
    if asked.encoding_format == "base64":
        return b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers


def _likely(token: EngineLogprob) -> dict[str, Any]:
    text = token.data.decode("utf-8", "replace")
    data = None if text.encode() == token.data else list(token.data)
    return {"token": text, "token_id": token.token_id, "logprob": token.logprob, "bytes": data}


def _message(message: Message) -> dict[str, Any]:
    """As chat templates expect it: what a message lacks is not there, and arguments of calls are objects."""
    plain: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
    named = {} if call.id is None else {"id": call.id}
    return {"type": "function", "function": function, **named}


def _chat(job: PromptJob) -> ChatOptions:
    named = job.tool_choice if isinstance(job.tool_choice, NamedTool) else None
    choice = "required" if isinstance(job.tool_choice, NamedTool) else job.tool_choice
    return ChatOptions(
        tools=[tool.model_dump(exclude_unset=True) for tool in job.tools],
        tool_choice=EngineToolChoice(choice),
        only_tool=named.function.name if named else None,
        parallel_tool_calls=job.parallel_tool_calls,
        add_generation_prompt=job.add_generation_prompt,
        continue_final_message=job.continue_final_message,
        template_kwargs=job.chat_template_kwargs,
    )


def _sampling(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        seed=sampling.seed,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        include_stop=sampling.include_stop_str_in_output,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in sampling.logit_bias.items()),
        allowed_token_ids=None if sampling.allowed_token_ids is None else tuple(sampling.allowed_token_ids),
        banned_token_ids=tuple(sampling.banned_token_ids),
        logprobs=sampling.num_logprobs,
    )
