"""Messages of the control topic: batches opened and closed, jobs and batches cancelled."""

from datetime import UTC, datetime
from typing import Annotated, Literal, Self
from uuid import UUID

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from headrace.schemas import topics
from headrace.schemas.envelope import MAX_ID_CHARS
from headrace.schemas.errors import ErrorCode, Unparsable
from headrace.schemas.explain import explain
from headrace.schemas.ids import named_key
from headrace.schemas.job import MAX_METADATA, Metadata, Name
from headrace.schemas.options import refusal
from headrace.schemas.wire import dump, load_object

# A description reads on from "must be", as those of a job do.
TIME = "a time with a zone, such as 2027-01-31T12:00:00Z"


def _in_utc(time: datetime) -> datetime:
    # A zone may carry a time out of the years that Python knows: Postgres would take it, and nobody could read it back.
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise refusal(ErrorCode.INVALID_VALUE, "must lie between the years 1 and 9999 in UTC") from None


Time = Annotated[AwareDatetime, AfterValidator(_in_utc)]


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
    opened_at: Time | None = Field(default=None, description=TIME)
    expires_at: Time | None = Field(
        default=None, description=f"{TIME}; the deadline of jobs that have none of their own"
    )
    input_ref: str | None = Field(
        default=None,
        max_length=2048,
        description="a string of up to 2,048 characters; where the input came from, for people",
    )
    metadata: Metadata = Field(
        default_factory=dict,
        description=f"an object of up to {MAX_METADATA} strings, names up to 64 and values up to 512 characters long",
    )


class BatchClosed(_AboutBatch):
    """No more jobs follow: the batch is complete when this many of its records have ended."""

    type: Literal["batch_closed"] = "batch_closed"
    expected: int = Field(
        ge=0, lt=2**63, description="a whole number, 0 or more; how many records were sent for the batch"
    )
    closed_at: Time | None = Field(default=None, description=TIME)
    submission: Name | None = Field(
        default=None,
        description=f"a string of 1 to {MAX_ID_CHARS} characters; the {topics.SUBMISSION} header of the records just sent",
    )


class CancelBatch(_AboutBatch):
    """End the jobs of a batch that have not ended; those that are still to come too."""

    type: Literal["cancel_batch"] = "cancel_batch"


class CancelJob(_Control):
    """End a job that has not ended; one that is still to come too. By ``job_id`` as sent, or by ``id``."""

    type: Literal["cancel_job"] = "cancel_job"
    job_id: Name | None = Field(
        default=None, description=f"a string of 1 to {MAX_ID_CHARS} characters, as the job has it"
    )
    id: UUID | None = Field(default=None, description="a UUID: the job's key")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if self.id is None and self.job_id is None:
            raise refusal(ErrorCode.MISSING_FIELD, "is missing: give exactly one of id and job_id", "id")
        if self.id is not None and self.job_id is not None:
            raise refusal(
                ErrorCode.INVALID_VALUE,
                "must not stand beside job_id: give exactly one of id and job_id",
                "id",
            )
        return self

    @property
    def key(self) -> UUID:
        """The id of the job to cancel."""
        return self.id if self.job_id is None else named_key(self.tenant, self.job_id)  # type: ignore[return-value]

    def _target(self) -> str:
        return str(self.key)


ControlMessage = BatchOpened | BatchClosed | CancelJob | CancelBatch
_BY_TYPE: dict[str, type[ControlMessage]] = {
    "batch_opened": BatchOpened,
    "batch_closed": BatchClosed,
    "cancel_job": CancelJob,
    "cancel_batch": CancelBatch,
}


def parse_control(value: bytes | None) -> ControlMessage:
    """The message in a record of the control topic. Raises Unparsable."""
    fields = load_object(value)
    kind = fields.get("type")
    model = _BY_TYPE.get(kind) if isinstance(kind, str) else None
    if model is None:
        code = ErrorCode.MISSING_FIELD if kind is None else ErrorCode.INVALID_VALUE
        raise Unparsable(code, f"type must be one of {', '.join(_BY_TYPE)}")
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        wrong = explain(error, model)
        raise Unparsable(wrong.code, wrong.message) from None
