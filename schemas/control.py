"""Messages of the control topic: batches opened and closed, jobs and batches cancelled."""

from typing import Annotated, Literal, Self
from uuid import UUID

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from headrace.schemas import topics
from headrace.schemas.errors import ErrorCode, Unparsable
from headrace.schemas.ids import named_key
from headrace.schemas.job import Metadata, Name
from headrace.schemas.wire import dump, load_object


class _Control(BaseModel):
    model_config = ConfigDict(extra="ignore")

    tenant: Name = "default"

    def encode(self) -> tuple[bytes, bytes, list[tuple[str, bytes]]]:
        """Key, value and headers of the message's record; all messages about one target share a key."""
        headers = [(topics.CONTENT_TYPE, topics.JSON), (topics.TENANT, self.tenant.encode())]
        return (
            f"{self.tenant}/{self._target()}".encode(),
            dump(self.model_dump(mode="json", exclude_none=True)),
            headers,
        )

    def _target(self) -> str:
        raise NotImplementedError


class _AboutBatch(_Control):
    batch_id: Name

    def _target(self) -> str:
        return self.batch_id


class BatchOpened(_AboutBatch):
    """A batch exists: its jobs follow. Not needed before a job; a batch also comes to be with its first job."""

    type: Literal["batch_opened"] = "batch_opened"
    opened_at: AwareDatetime | None = None
    expires_at: AwareDatetime | None = Field(
        default=None, description="The deadline of jobs that have none of their own."
    )
    input_ref: str | None = Field(
        default=None, max_length=2048, description="Where the input came from, for people."
    )
    metadata: Metadata = Field(default_factory=dict)


class BatchClosed(_AboutBatch):
    """No more jobs follow: the batch is complete when this many of its records have ended."""

    type: Literal["batch_closed"] = "batch_closed"
    expected: int = Field(ge=0, lt=2**63, description="How many records were sent for the batch.")
    closed_at: AwareDatetime | None = None


class CancelBatch(_AboutBatch):
    """End the jobs of a batch that have not ended; those that are still to come too."""

    type: Literal["cancel_batch"] = "cancel_batch"


class CancelJob(_Control):
    """End a job that has not ended; one that is still to come too. By ``job_id`` as sent, or by ``id``."""

    type: Literal["cancel_job"] = "cancel_job"
    job_id: Name | None = Field(default=None, description="As the producer wrote it.")
    id: UUID | None = Field(default=None, description="The job's key.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.id is None) == (self.job_id is None):
            raise ValueError("give exactly one of id and job_id")
        return self

    @property
    def key(self) -> UUID:
        """The id of the job to cancel."""
        return self.id if self.job_id is None else named_key(self.tenant, self.job_id)  # type: ignore[return-value]

    def _target(self) -> str:
        return str(self.key)


ControlMessage = BatchOpened | BatchClosed | CancelJob | CancelBatch
_ADAPTER: TypeAdapter[ControlMessage] = TypeAdapter(Annotated[ControlMessage, Field(discriminator="type")])


def parse_control(value: bytes | None) -> ControlMessage:
    """The message in a record of the control topic. Raises Unparsable."""
    fields = load_object(value)
    try:
        return _ADAPTER.validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"][1:]))
        code = ErrorCode.MISSING_FIELD if first["type"] == "missing" else ErrorCode.INVALID_VALUE
        raise Unparsable(code, f"{path or 'type'}: {first['msg']}") from None
