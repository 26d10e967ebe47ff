"""The job as a producer writes it, and how it goes on the wire and comes off it."""

import re
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)

from headrace.schemas import batch_line, topics
from headrace.schemas.envelope import MAX_ID_CHARS, Envelope, Headers, Record, parse_deadline, read_record
from headrace.schemas.errors import ErrorCode, InvalidJob
from headrace.schemas.explain import explain
from headrace.schemas.ids import Source
from headrace.schemas.options import refusal, refuse_misplaced, refuse_unsupported, without_nulls
from headrace.schemas.sampling import Sampling, Text, TokenId

SCHEMA_VERSION = 1
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
MAX_PROMPT_CHARS = 4_000_000
MAX_PROMPT_TOKENS = 2_000_000
MAX_MESSAGES = 10_000
MAX_METADATA = 16

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
SAMPLING_OPTIONS = frozenset(Sampling.model_fields)


class JobKind(StrEnum):
    """What a job asks for, which also says what its result looks like."""

    CHAT = "chat"
    COMPLETION = "completion"


def _check_name(name: str) -> str:
    if _CONTROL.search(name):
        raise refusal(ErrorCode.INVALID_VALUE, "must be a string without control characters")
    return name


Name = Annotated[
    Text,
    Field(min_length=1, max_length=MAX_ID_CHARS, description=f"a string of 1 to {MAX_ID_CHARS} characters"),
    AfterValidator(_check_name),
]


class TextPart(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"] = Field(description='"text"; other kinds of content are not supported yet')
    text: Text = Field(description="a string")


# By a tag (that no field is called), so that an error speaks of the form that was meant.
Content = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("<parts>")],
    Discriminator(lambda content: "<text>" if isinstance(content, str) else "<parts>"),
]


def _developer_as_system(role: Any) -> Any:
    # OpenAI's newer name. Chat templates do not know it, and some drop a message whose role they do not know.
    return "system" if role == "developer" else role


class Message(BaseModel):
    """A turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Annotated[
        Literal["system", "user", "assistant"],
        BeforeValidator(
            _developer_as_system, json_schema_input_type=Literal["system", "developer", "user", "assistant"]
        ),
    ] = Field(description="one of system, user and assistant; developer is another name of system")
    content: Content = Field(description="a string or a list of text parts")
    name: Text | None = Field(default=None, description="a string; who speaks, for templates that tell")

    @model_validator(mode="before")
    @classmethod
    def _refuse_tools(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for field in ("tool_calls", "function_call", "tool_call_id", "audio"):
                if data.get(field):
                    raise refusal(ErrorCode.UNSUPPORTED_OPTION, "is not supported yet; leave it out", field)
        return data


def _check_size(metadata: Any) -> Any:
    # Before its items: there is no failing fast for objects.
    if isinstance(metadata, dict) and len(metadata) > MAX_METADATA:
        raise refusal(ErrorCode.INVALID_VALUE, f"must have at most {MAX_METADATA} entries")
    return metadata


Metadata = Annotated[
    dict[Annotated[Text, Field(min_length=1, max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=MAX_METADATA),
    BeforeValidator(_check_size),
]


class PromptJob(BaseModel):
    """One prompt to answer. Unknown fields are ignored; what must not be ignored is named in ``requires``."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        json_schema_extra={"oneOf": [{"required": [field]} for field in PROMPT_FIELDS]},
    )

    schema_version: int = Field(default=SCHEMA_VERSION, ge=1, description="a whole number, 1 or more")
    job_id: Name | None = Field(
        default=None,
        description=f"a string of 1 to {MAX_ID_CHARS} characters; a UUIDv7 is the job's id as it is",
    )
    idempotency_key: Name | None = Field(
        default=None,
        description=f"a string of 1 to {MAX_ID_CHARS} characters; names the job where there is no job_id",
    )
    tenant: Name = Field(default="default", description=f"a string of 1 to {MAX_ID_CHARS} characters")
    batch_id: Name | None = Field(
        default=None,
        description=f"a string of 1 to {MAX_ID_CHARS} characters; the batch that the job counts for",
    )
    custom_id: Name | None = Field(
        default=None, description=f"a string of 1 to {MAX_ID_CHARS} characters; comes back with the result"
    )
    model: Name | None = Field(
        default=None,
        description="the name of a model that the topic's workers serve; left out: the one they serve",
    )
    prompt: Annotated[Text, Field(min_length=1, max_length=MAX_PROMPT_CHARS)] | None = Field(
        default=None, description=f"a string of 1 to {MAX_PROMPT_CHARS:,} characters"
    )
    prompt_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)] | None
    ) = Field(default=None, description=f"a list of 1 to {MAX_PROMPT_TOKENS:,} token ids")
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = Field(default=None, description=f"a list of 1 to {MAX_MESSAGES:,} messages")
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
    requires: list[Annotated[Text, Field(description="a string")]] = Field(
        default_factory=list,
        max_length=64,
        fail_fast=True,
        description="a list of the features that the job cannot do without",
    )

    _envelope: Envelope | None = PrivateAttr(None)
    _is_line: bool = PrivateAttr(False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        refuse_unsupported(data)
        given = without_nulls(data)
        refuse_misplaced(given, SAMPLING_OPTIONS)
        return given

    @model_validator(mode="after")
    def _exactly_one_prompt(self) -> Self:
        given = [
            name for name in ("prompt", "prompt_token_ids", "messages") if getattr(self, name) is not None
        ]
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
        return self

    @model_validator(mode="after")
    def _echo_of_a_prompt(self) -> Self:
        if self.messages is not None and self.sampling.echo:
            message = "must be false for messages: there is no prompt to repeat"
            raise refusal(ErrorCode.INVALID_VALUE, message, "sampling", "echo")
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
        """Chat if the job has messages, else a completion."""
        return JobKind.COMPLETION if self.messages is None else JobKind.CHAT

    @property
    def envelope(self) -> Envelope:
        """What parse_job read beside the job: its id, the digest of its content. Only parsed jobs have it."""
        if self._envelope is None:
            raise AttributeError("a job that was not read from a record has no envelope")
        return self._envelope

    def path_of(self, field: str) -> str:
        """Where the producer wrote ``field``: ``top_p`` is ``sampling.top_p``, or ``body.top_p`` in a batch line."""
        path = f"sampling.{field}" if field.partition(".")[0] in SAMPLING_OPTIONS else field
        return batch_line.param(path) if self._is_line else path


# What `requires` may name: every field of a job and every sampling option, and the batch format.
FEATURES = frozenset(PromptJob.model_fields) | SAMPLING_OPTIONS | {"openai_batch_line"}


def parse_job(value: bytes | None, headers: Headers, source: Source) -> PromptJob:
    """The job in a record, validated. Raises Unparsable, or InvalidJob where the job fails under its own id."""
    record = read_record(value, headers, source)
    return _validate(record)


def _validate(record: Record) -> PromptJob:
    is_line = batch_line.is_batch_line(record.body)
    try:
        job = PromptJob.model_validate(batch_line.to_job(record.body) if is_line else record.body)
    except ValidationError as error:
        wrong = explain(error, PromptJob, rename=batch_line.param if is_line else None)
    except batch_line.BadLine as error:
        wrong = error.wrong
    else:
        job._envelope, job._is_line = record.envelope, is_line
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
    value = orjson.dumps(job.model_dump(mode="json", exclude_none=True, exclude_defaults=True))
    return key, value, headers
