"""What came of a job: one JobResult for each run that ended."""

from collections.abc import Sequence, Sized
from datetime import datetime
from itertools import accumulate
from typing import Any, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.schemas import topics
from headrace.schemas.chat import ToolCall
from headrace.schemas.errors import ErrorCode, SchemaError
from headrace.schemas.job import SCHEMA_VERSION, JobKind
from headrace.schemas.states import JobState
from headrace.schemas.wire import dump


class UnreadableResult(SchemaError):
    """Bytes that are no JobResult."""


def _is_empty(value: Sized) -> bool:
    return not value


class Usage(BaseModel):
    """What a job cost, in tokens."""

    prompt_tokens: int = Field(default=0, description="Tokens of the prompt, the cached ones included.")
    cached_tokens: int = Field(
        default=0, description="Tokens of the prompt that were taken from the prefix cache."
    )
    completion_tokens: int = Field(default=0, description="Tokens generated.")

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class LikelyToken(BaseModel):
    """A token and how likely it was."""

    token: str = Field(description="Its text; U+FFFD for bytes that are no whole character.")
    token_id: int = Field(description="Its id.")
    logprob: float = Field(description="Its log-probability under the model, before any sampling option.")
    bytes: list[int] | None = Field(default=None, description="Its bytes, where `token` does not say them.")

    def to_openai(self) -> dict[str, Any]:
        """As OpenAI's chat format has it."""
        data = list(self.token.encode("utf-8", "replace")) if self.bytes is None else self.bytes
        return {"token": self.token, "logprob": self.logprob, "bytes": data}


class TokenLogprob(LikelyToken):
    """A token of prompt or answer, and the likeliest ones of its place."""

    logprob: float | None = Field(  # type: ignore[assignment]
        default=None,
        description="Its log-probability under the model, before any sampling option. The prompt's first token, which"
        " follows nothing, has none.",
    )
    top_logprobs: list[LikelyToken] = Field(
        default_factory=list,
        exclude_if=_is_empty,
        description="The likeliest tokens of its place, likeliest first.",
    )


class Choice(BaseModel):
    """One answer."""

    index: int = Field(default=0, description="Which answer, from 0.")
    text: str = Field(description="The answer. A character that JSON stores cannot hold is U+FFFD.")
    reasoning_content: str | None = Field(
        default=None, description="What a model that thinks thought before it answered; not part of `text`."
    )
    tool_calls: list[ToolCall] = Field(
        default_factory=list,
        exclude_if=_is_empty,
        description="The calls that the model made; `text` is what it said besides.",
    )
    finish_reason: str = Field(description='Why it ended: "stop", "length" or "tool_calls".')
    stop_reason: str | int | None = Field(
        default=None, description="The stop string or stop token id that ended it, if any."
    )
    logprobs: list[TokenLogprob] | None = Field(
        default=None, description="Of each token, where `logprobs` asked for it."
    )

    def to_message(self) -> dict[str, Any]:
        """As the message of OpenAI's chat format; ``reasoning_content`` is what others call it."""
        content = None if self.tool_calls and not self.text else self.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message

    def named_stop(self) -> dict[str, Any]:
        """As vLLM has it beside OpenAI's fields: what ended the answer, if it was a stop of the job's own."""
        return {} if self.stop_reason is None else {"stop_reason": self.stop_reason}

    def chat_logprobs(self) -> dict[str, Any] | None:
        """As OpenAI's chat format has them."""
        if self.logprobs is None:
            return None
        content = [
            token.to_openai() | {"top_logprobs": [other.to_openai() for other in token.top_logprobs]}
            for token in self.logprobs
        ]
        return {"content": content, "refusal": None}

    def completion_logprobs(self) -> dict[str, Any] | None:
        """As OpenAI's completion format has them. Offsets are in characters of the tokens' joined texts."""
        if self.logprobs is None:
            return None
        lengths = [len(token.token) for token in self.logprobs]
        return {
            "tokens": [token.token for token in self.logprobs],
            "token_logprobs": [token.logprob for token in self.logprobs],
            "top_logprobs": [
                None if token.logprob is None else _by_text((*token.top_logprobs, token))
                for token in self.logprobs
            ],
            "text_offset": list(accumulate(lengths, initial=0))[:-1],
        }


def _by_text(tokens: Sequence[LikelyToken]) -> dict[str, float]:
    """As OpenAI's completion format has them: of several tokens that are written alike, the first."""
    return {token.token: token.logprob for token in reversed(tokens)}


class Score(BaseModel):
    """How likely the model finds a continuation."""

    index: int = Field(description="Which continuation, from 0.")
    logprob: float = Field(description="The log-probability of all its tokens together, a natural logarithm.")
    tokens: int = Field(description="How many tokens it has.")
    is_greedy: bool = Field(description="Whether each of its tokens is the likeliest at its place.")


class Timings(BaseModel):
    """When, in UTC, and how long, in seconds."""

    submitted_at: datetime | None = Field(default=None, description="The timestamp of the job's record.")
    started_at: datetime | None = Field(
        default=None, description="When this attempt was given to the engine."
    )
    finished_at: datetime | None = Field(default=None, description="When this run ended.")
    queued_s: float | None = Field(
        default=None, description="From the engine's taking the job to its first step."
    )
    first_token_s: float | None = Field(
        default=None, description="From the engine's taking the job to its first token."
    )
    total_s: float | None = Field(default=None, description="From the engine's taking the job to its end.")


class JobError(BaseModel):
    """Why a job did not succeed: a stable code, a sentence for people, the path of the field at fault."""

    code: str = Field(description="One of the codes below.")
    message: str = Field(description="What is wrong, and what is allowed.")
    param: str | None = Field(
        default=None, description="The dotted path of the field at fault, if there is one."
    )


class Reference(BaseModel):
    """Where a body too large for a message is kept, and how to tell that it is the right one."""

    uri: str = Field(description="Where it is: under the results store of this installation.")
    bytes: int = Field(description="How many bytes it has.")
    sha256: str = Field(description="The SHA-256 of its bytes, in hexadecimal.")


class JobResult(BaseModel):
    """How one run of a job ended."""

    model_config = ConfigDict(extra="ignore")

    schema_version: int = Field(default=SCHEMA_VERSION, description="1.")
    id: UUID = Field(description="The job's key. Drop duplicates by (id, run).")
    tenant: str = Field(default="default", description="As the producer wrote it, or `default`.")
    job_id: str | None = Field(default=None, description="As the producer wrote it.")
    batch_id: str | None = Field(default=None, description="As the producer wrote it.")
    custom_id: str | None = Field(default=None, description="As the producer wrote it.")
    model: str | None = Field(default=None, description="The model that answered.")
    kind: JobKind = Field(
        default=JobKind.COMPLETION,
        description="`embedding` or `score` for a job that only looks at its prompt; else `chat` for one with messages, and"
        " `completion`.",
    )
    run: int = Field(default=1, description="1, and one more each time that the job was reopened.")
    attempt: int = Field(
        default=1, description="How many times this run was given to an engine, this one included."
    )
    state: JobState = Field(description="A terminal state.")
    choices: list[Choice] = Field(
        default_factory=list, exclude_if=_is_empty, description="The answers; none unless succeeded."
    )
    prompt_logprobs: list[TokenLogprob] | None = Field(
        default=None, description="Of each token of the prompt, where `prompt_logprobs` asked for it."
    )
    embedding: list[float] | str | None = Field(
        default=None, description="The vector: numbers, or base64 of them as little-endian fp32."
    )
    embeddings: list[list[float] | str] | None = Field(
        default=None, description="The vectors of `inputs`, in their order."
    )
    scores: list[Score] | None = Field(default=None, description="Of each continuation, in their order.")
    result_ref: Reference | None = Field(
        default=None,
        description="Where the whole result is, if it is too large for a message: then the answers are only there.",
    )
    usage: Usage = Field(default_factory=Usage, description="What it cost.")
    timings: Timings = Field(default_factory=Timings, description="When, and how long.")
    error: JobError | None = Field(
        default=None,
        description="Why it did not succeed; or, beside `succeeded`, why this record comes without its answers.",
    )
    worker: str | None = Field(default=None, description="The worker that wrote this result.")
    metadata: dict[str, str] = Field(
        default_factory=dict, exclude_if=_is_empty, description="As the producer wrote it."
    )

    @property
    def key(self) -> bytes:
        """The key of the result's record."""
        return str(self.id).encode()

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        """The headers of the result's record: enough to tell whose it is without reading it."""
        named = (
            (topics.TENANT, self.tenant),
            (topics.BATCH_ID, self.batch_id),
            (topics.CUSTOM_ID, self.custom_id),
        )
        return [
            (topics.CONTENT_TYPE, topics.JSON),
            *((name, text.encode("utf-8", "replace")) for name, text in named if text is not None),
        ]

    def encode(self) -> bytes:
        """The value of the result's record, and the body in the job table: JSON that jsonb takes."""
        return dump(self.model_dump(exclude_none=True))

    def kept_at(self, reference: Reference) -> Self:
        """This result without its answers, saying where the whole of it is."""
        return self._without_answers(result_ref=reference)

    def not_published(self, size: int) -> Self:
        """This result of ``size`` bytes without its answers, where the results topic takes no record of that size."""
        message = f"the results topic does not take the {size:,} bytes of this result: the job table has it (headrace results)"
        return self._without_answers(error=JobError(code=ErrorCode.RESULT_TOO_LARGE, message=message))

    def _without_answers(self, **instead: Any) -> Self:
        looks = ("prompt_logprobs", "embedding", "embeddings", "scores")
        empty: dict[str, Any] = {"choices": [], **dict.fromkeys(looks)}
        return self.model_copy(update=empty | instead)

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """The result in a record's value. Raises UnreadableResult."""
        try:
            return cls.model_validate_json(value)
        except ValidationError as error:
            raise UnreadableResult(f"no JobResult: {error.errors(include_input=False)[0]['msg']}") from None

    def to_openai(self) -> dict[str, Any]:
        """The result as a line of OpenAI's batch output (succeeded) or error file (every other state)."""
        line = {"id": f"batch_req_{self.id}", "custom_id": self.custom_id}
        if self.result_ref is not None:
            message = f"the result was not read from where it is kept: {self.result_ref.uri}"
            return {**line, "response": None, "error": {"code": "result_not_read", "message": message}}
        if self.state is JobState.SUCCEEDED and self.error is None:
            body = {
                JobKind.CHAT: self._chat_body,
                JobKind.COMPLETION: self._completion_body,
                JobKind.EMBEDDING: self._embedding_body,
                JobKind.SCORE: self._score_body,
            }[self.kind]()
            response = {"status_code": 200, "request_id": str(self.id), "body": body}
            return {**line, "response": response, "error": None}
        error = self.error or JobError(code=self.state, message=f"the job is {self.state}")
        code = _OPENAI_CODES.get(error.code, error.code)
        return {
            **line,
            "response": None,
            "error": {"code": code, "message": error.message, "param": error.param},
        }

    def _chat_body(self) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": choice.to_message(),
                "logprobs": choice.chat_logprobs(),
                "finish_reason": choice.finish_reason,
                **choice.named_stop(),
            }
            for choice in self.choices
        ]
        body = {**self._body("chat.completion", "chatcmpl"), "choices": choices, "usage": self._usage()}
        return body if self.prompt_logprobs is None else body | {"prompt_logprobs": self._prompt_logprobs()}

    def _completion_body(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = [
            {
                "index": choice.index,
                "text": choice.text,
                "logprobs": choice.completion_logprobs(),
                "finish_reason": choice.finish_reason,
                **choice.named_stop(),
            }
            for choice in self.choices
        ]
        if self.prompt_logprobs is not None:
            choices = [choice | {"prompt_logprobs": self._prompt_logprobs()} for choice in choices]
        return {**self._body("text_completion", "cmpl"), "choices": choices, "usage": self._usage()}

    def _prompt_logprobs(self) -> list[dict[str, Any] | None]:
        """As vLLM has them: by token id, null for the first, the token itself among the likeliest."""
        return [
            None
            if token.logprob is None
            else {
                str(other.token_id): {"logprob": other.logprob, "decoded_token": other.token}
                for other in (token, *token.top_logprobs)
            }
            for token in self.prompt_logprobs or ()
        ]

    def _embedding_body(self) -> dict[str, Any]:
        vectors = [self.embedding] if self.embeddings is None else self.embeddings
        return self._list_body(
            [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(vectors)
            ]
        )

    def _score_body(self) -> dict[str, Any]:
        return self._list_body([{"object": "score", **score.model_dump()} for score in self.scores or ()])

    def _list_body(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        tokens = self.usage.prompt_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    def _body(self, kind: str, prefix: str) -> dict[str, Any]:
        finished = self.timings.finished_at
        created = 0 if finished is None else int(finished.timestamp())
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": created, "model": self.model}

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "total_tokens": self.usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.usage.cached_tokens},
        }


_OPENAI_CODES: dict[str, str] = {
    ErrorCode.DEADLINE_EXCEEDED: "batch_expired",
    ErrorCode.CANCELLED: "batch_cancelled",
}
