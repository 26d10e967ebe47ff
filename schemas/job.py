"""The job as a producer writes it, and how it goes on the wire and comes off it."""

import re
from datetime import datetime
from enum import StrEnum
from functools import cached_property, partial
from typing import Annotated, Any, Self

import orjson
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from headrace.schemas import batch_line, topics
from headrace.schemas.answer_form import AsksForAForm
from headrace.schemas.batch_line import PROMPT_FIELDS
from headrace.schemas.chat import MAX_MESSAGES, MAX_TOOLS, Message, NamedTool, Tool, ToolChoice
from headrace.schemas.envelope import MAX_ID_CHARS, Envelope, Headers, Record, parse_deadline, read_record
from headrace.schemas.errors import ErrorCode, InvalidJob
from headrace.schemas.explain import explain
from headrace.schemas.ids import Source
from headrace.schemas.looks import MAX_CONTINUATIONS, MAX_INPUTS, Continuations, EmbeddingOptions, Inputs
from headrace.schemas.options import WRITTEN, refusal, refuse_misplaced, refuse_unsupported, without_nulls
from headrace.schemas.sampling import Sampling, TokenId

SCHEMA_VERSION = 1
MAX_PROMPT_CHARS = 4_000_000
MAX_PROMPT_TOKENS = 2_000_000
MAX_METADATA = 16
MAX_TEMPLATE_KWARGS = 64

NAME = f"a string of 1 to {MAX_ID_CHARS} characters without control characters"

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
SAMPLING_OPTIONS = frozenset(Sampling.model_fields)


class JobKind(StrEnum):
    """What a job asks for, which also says what its result looks like."""

    CHAT = "chat"
    COMPLETION = "completion"
    EMBEDDING = "embedding"
    SCORE = "score"


def _check_name(name: str) -> str:
    if not name.isprintable() and _CONTROL.search(name):  # the first is quicker, and true of nearly all
        raise refusal(ErrorCode.INVALID_VALUE, "must be a string without control characters")
    return name


Name = Annotated[
    str,
    Field(min_length=1, max_length=MAX_ID_CHARS, description=f"a string of 1 to {MAX_ID_CHARS} characters"),
    AfterValidator(_check_name),
]


def _check_size(metadata: Any) -> Any:
    # Before its items: there is no failing fast for objects.
    if isinstance(metadata, dict) and len(metadata) > MAX_METADATA:
        raise refusal(ErrorCode.INVALID_VALUE, f"must have at most {MAX_METADATA} entries")
    return metadata


Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(_check_size),
]


class PromptJob(AsksForAForm):
    """One prompt to answer. Unknown fields are ignored; what must not be ignored is named in ``requires``."""

    model_config = WRITTEN | ConfigDict(
        json_schema_extra={"oneOf": [{"required": [field]} for field in PROMPT_FIELDS]}
    )

    schema_version: int = Field(default=SCHEMA_VERSION, ge=1, description="a whole number, 1 or more")
    job_id: Name | None = Field(
        default=None,
        description=f"{NAME}; a UUIDv7 becomes the job's id unchanged",
    )
    idempotency_key: Name | None = Field(
        default=None,
        description=f"{NAME}; it names the job, and must not stand beside a job_id",
    )
    tenant: Name = Field(default="default", description=NAME)
    batch_id: Name | None = Field(
        default=None,
        description=f"{NAME}; it names the batch that the job counts for",
    )
    custom_id: Name | None = Field(default=None, description=f"{NAME}; it comes back with the result")
    model: Name | None = Field(
        default=None,
        description="the name of a model that the topic's workers serve; leave it out for the one they serve",
    )
    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)] | None = Field(
        default=None, description=f"a string of 1 to {MAX_PROMPT_CHARS:,} characters"
    )
    prompt_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)] | None
    ) = Field(default=None, description=f"a list of 1 to {MAX_PROMPT_TOKENS:,} token ids")
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = Field(default=None, description=f"a list of 1 to {MAX_MESSAGES:,} messages")
    inputs: Inputs | None = Field(
        default=None,
        description=f"a list of 1 to {MAX_INPUTS:,} strings or lists of token ids; each becomes a vector; only beside"
        " embedding",
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list,
        description=f"a list of up to {MAX_TOOLS} functions that the model may call; only beside messages",
    )
    tool_choice: ToolChoice = Field(
        default="auto",
        description='"none", "auto" or "required", or {"type": "function", "function": {"name": ...}} with one of the'
        " tools; with none they are not shown to the model",
    )
    parallel_tool_calls: bool = Field(
        default=True, description="true or false; false keeps only the first call"
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="true or false; true lets the chat template open the answer, as it does where this is left out, unless"
        " continue_final_message is true",
    )
    continue_final_message: bool = Field(
        default=False,
        description="true or false; true goes on with the last message instead of answering it; only beside messages",
    )
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS)] = Field(
        default_factory=dict,
        description=f"an object of up to {MAX_TEMPLATE_KWARGS} values that the chat template knows by name, such as"
        " enable_thinking; only beside messages",
    )
    continuations: Continuations | None = Field(
        default=None,
        description=f"a list of 1 to {MAX_CONTINUATIONS:,} strings or lists of token ids; each is scored as what comes after"
        " the prompt, and nothing is generated",
    )
    embedding: EmbeddingOptions | None = Field(
        default=None,
        description="an object of embedding options, which may be empty; the prompt becomes a vector, and nothing is"
        " generated",
    )
    sampling: Sampling = Field(default_factory=Sampling, description="an object of sampling options")
    deadline: Annotated[
        datetime | None,
        BeforeValidator(
            lambda value: value if value is None else parse_deadline(value),
            json_schema_input_type=datetime | float | None,
        ),
    ] = Field(
        default=None,
        description="a time after 2000: RFC 3339 with a zone, such as 2027-01-31T12:00:00Z, or seconds since the epoch",
    )
    metadata: Metadata = Field(
        default_factory=dict,
        description=f"an object of up to {MAX_METADATA} strings, names up to 64 and values up to 512 characters long",
    )
    requires: list[Annotated[str, Field(description="a string")]] = Field(
        default_factory=list,
        max_length=64,
        fail_fast=True,
        description="a list of up to 64 features that the job cannot do without",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        refuse_unsupported(data)
        given = without_nulls(data)
        refuse_misplaced(given, SAMPLING_OPTIONS)
        _refuse_inside(given.get("sampling"))
        return given

    @model_validator(mode="after")
    def _exactly_one_prompt(self) -> Self:
        given = [name for name in PROMPT_FIELDS if getattr(self, name) is not None]
        if not given:
            raise refusal(
                ErrorCode.MISSING_FIELD,
                "is missing: give one of prompt, prompt_token_ids and messages",
                "prompt",
            )
        if len(given) > 1:
            raise refusal(
                ErrorCode.INVALID_VALUE, f"must not stand beside {given[0]}: give only one of them", given[1]
            )
        if self.inputs is not None and self.embedding is None:
            message = "must stand beside embedding: every other job has one prompt"
            raise refusal(ErrorCode.INVALID_VALUE, message, "inputs")
        return self

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        if self.job_id is not None and self.idempotency_key is not None:
            message = "must not stand beside job_id, which names the job, so that the key would keep nothing from running twice"
            raise refusal(ErrorCode.INVALID_VALUE, message, "idempotency_key")
        return self

    @model_validator(mode="after")
    def _echo_of_a_prompt(self) -> Self:
        if self.messages is not None and self.sampling.echo:
            message = "must be false for messages: there is no prompt to repeat"
            raise refusal(ErrorCode.INVALID_VALUE, message, "sampling", "echo")
        return self

    @model_validator(mode="after")
    def _chat_options_for_messages(self) -> Self:
        for option in ("tools", "continue_final_message", "chat_template_kwargs", "add_generation_prompt"):
            if self.messages is None and getattr(self, option):
                raise refusal(ErrorCode.INVALID_VALUE, "must be left out of a job without messages", option)
        if self.continue_final_message and self.messages and self.messages[-1].tool_calls:
            message = "must be false where the last message calls tools: only a text can be gone on with"
            raise refusal(ErrorCode.INVALID_VALUE, message, "continue_final_message")
        if self.continue_final_message and self.add_generation_prompt:
            message = "must be false where continue_final_message is true: an answer is begun or gone on with"
            raise refusal(ErrorCode.INVALID_VALUE, message, "add_generation_prompt")
        return self

    @model_validator(mode="after")
    def _a_tool_to_choose(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        for place, name in enumerate(names):
            if name in names[:place]:
                message = "must be unlike the other tools'"
                raise refusal(ErrorCode.INVALID_VALUE, message, "tools", place, "function", "name")
        if isinstance(self.tool_choice, NamedTool):
            if self.tool_choice.function.name not in names:
                message = "must be the name of one of the tools"
                raise refusal(ErrorCode.INVALID_VALUE, message, "tool_choice", "function", "name")
        elif self.tool_choice == "required" and not names:
            message = "must be none or auto where no tools are given"
            raise refusal(ErrorCode.INVALID_VALUE, message, "tool_choice")
        return self

    @model_validator(mode="after")
    def _nothing_to_sample(self) -> Self:
        if self.embedding is None and self.continuations is None:
            return self
        look = "embedding" if self.embedding is not None else "continuations"
        if self.embedding is not None and self.continuations is not None:
            message = "must not stand beside embedding: give only one of them"
            raise refusal(ErrorCode.INVALID_VALUE, message, "continuations")
        plain = Sampling()
        for option in sorted(self.sampling.model_fields_set - {"truncate_prompt_tokens"}):
            if getattr(self.sampling, option) != getattr(plain, option):
                message = f"must be left out beside {look}: nothing is sampled"
                raise refusal(ErrorCode.INVALID_VALUE, message, "sampling", option)
        return self

    @model_validator(mode="after")
    def _a_form_for_a_text(self) -> Self:
        """Refuse what contradicts a form of the answer."""
        if (form := self.answer_form) is None:
            return self
        field = form.path.partition(".")[0]
        if self.kind in (JobKind.EMBEDDING, JobKind.SCORE):
            raise refusal(ErrorCode.INVALID_VALUE, "must be left out of a job that generates nothing", field)
        if self.tools and self.tool_choice != "none":
            message = "must be left out beside tools, unless tool_choice is none"
            raise refusal(ErrorCode.UNSUPPORTED_OPTION, message, field)
        for option in ("bad_words", "allowed_token_ids", "banned_token_ids"):
            if getattr(self.sampling, option):
                message = f"must be left out beside {field}, which says what may come"
                raise refusal(ErrorCode.INVALID_VALUE, message, "sampling", option)
        return self

    @model_validator(mode="after")
    def _only_known_features(self) -> Self:
        for index, feature in enumerate(self.requires):
            if feature not in FEATURES:
                message = (
                    f"names a feature that is not supported here; known are {', '.join(sorted(FEATURES))}"
                )
                raise refusal(ErrorCode.UNSUPPORTED_FEATURE, message, "requires", index)
        return self

    @property
    def kind(self) -> JobKind:
        """What it looks for if it only looks at its prompt; else chat if it has messages, and a completion if not."""
        if self.embedding is not None:
            return JobKind.EMBEDDING
        if self.continuations is not None:
            return JobKind.SCORE
        return JobKind.COMPLETION if self.messages is None else JobKind.CHAT

    # parse_job sets these two. Private attributes of pydantic's would cost microseconds at each touch.
    @cached_property
    def envelope(self) -> Envelope:
        """What parse_job read beside the job: its id, the digest of its content. Only parsed jobs have it."""
        raise AttributeError("a job that was not read from a record has no envelope")

    @cached_property
    def url(self) -> str | None:
        """The ``url`` of the batch line that the job was read from; None for any other job."""
        return None

    def path_of(self, field: str) -> str:
        """Where the producer wrote ``field``: ``top_p`` is ``sampling.top_p``, or ``body.top_p`` in a batch line."""
        if field == "max_tokens" and "max_completion_tokens" in self.sampling.model_fields_set:
            field = "max_completion_tokens"
        path = f"sampling.{field}" if field.partition(".")[0] in SAMPLING_OPTIONS else field
        return path if self.url is None else batch_line.param(path, self.url)


def _refuse_inside(sampling: Any) -> None:
    """Raise for the first field of a job that stands inside ``sampling`` and would be ignored there."""
    if isinstance(sampling, dict):
        for name, value in sampling.items():
            if name in JOB_FIELDS and value is not None:
                message = f"belongs beside `sampling`: write {name}"
                raise refusal(ErrorCode.MISPLACED_OPTION, message, "sampling", name)


JOB_FIELDS = frozenset(PromptJob.model_fields)  # once: pydantic makes it anew each time that it is asked for
# What `requires` may name: every field of a job and every sampling option, and the batch format.
FEATURES = JOB_FIELDS | SAMPLING_OPTIONS | {"openai_batch_line"}


def parse_job(value: bytes | None, headers: Headers, source: Source) -> PromptJob:
    """The job in a record, validated. Raises Unparsable, or InvalidJob where the job fails under its own id."""
    return job_of(read_record(value, headers, source))


def job_of(record: Record) -> PromptJob:
    """The job that a record is, validated. Raises InvalidJob."""
    url = str(record.body.get("url")) if batch_line.is_batch_line(record.body) else None
    try:
        job = PromptJob.model_validate(record.body if url is None else batch_line.to_job(record.body))
    except ValidationError as error:
        wrong = explain(error, PromptJob, rename=None if url is None else partial(batch_line.param, url=url))
    except batch_line.BadLine as error:
        wrong = error.wrong
    else:
        job.envelope, job.url = record.envelope, url
        return job
    raise InvalidJob(record.envelope, wrong.code, wrong.message, wrong.param)


def encode_job(job: PromptJob) -> tuple[bytes | None, bytes, list[tuple[str, bytes]]]:
    """Key, value and headers of a job's record. Without a job_id there is no key: the id comes from the place."""
    headers = [(topics.CONTENT_TYPE, topics.JSON), (topics.TENANT, job.tenant.encode())]
    headers += [
        (name, text.encode())
        for name, text in ((topics.BATCH_ID, job.batch_id), (topics.CUSTOM_ID, job.custom_id))
        if text is not None
    ]
    key = None if job.job_id is None else job.job_id.encode()
    # As it is: what Postgres refuses in a prompt (NUL) is no reason to change the prompt, which Postgres never sees.
    value = orjson.dumps(job.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True))
    return key, value, headers
