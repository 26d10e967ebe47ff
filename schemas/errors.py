"""What can be wrong with a record or a job: stable codes, and the two exceptions that carry them."""

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.schemas.envelope import Envelope


class Outcome(StrEnum):
    """How a record with a certain error ends."""

    REJECTED = "rejected"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class ErrorCode(StrEnum):
    """Stable names of errors, for programs; each knows how its job ends and what it means."""

    outcome: Outcome
    meaning: str

    def __new__(cls, value: str, outcome: Outcome, meaning: str) -> "ErrorCode":
        code = str.__new__(cls, value)
        code._value_ = value
        code.outcome = outcome
        code.meaning = meaning
        return code

    # The record never becomes a job: it goes to the dead-letter topic unchanged.
    EMPTY_VALUE = (
        "empty_value",
        Outcome.REJECTED,
        "The record has no value (a tombstone) or only white space.",
    )
    INVALID_ENCODING = (
        "invalid_encoding",
        Outcome.REJECTED,
        "The value, or a header that stands for a field, is not UTF-8.",
    )
    INVALID_JSON = "invalid_json", Outcome.REJECTED, "The value is not JSON."
    NOT_AN_OBJECT = "not_an_object", Outcome.REJECTED, "The value is JSON, but not an object."
    NESTED_TOO_DEEP = "nested_too_deep", Outcome.REJECTED, "The value is nested deeper than is allowed."
    MESSAGE_TOO_LARGE = "message_too_large", Outcome.REJECTED, "The value is larger than a record may be."
    JOB_ID_OUT_OF_RANGE = (
        "job_id_out_of_range",
        Outcome.REJECTED,
        "The job_id is a UUIDv7 whose time lies outside the days that the job table keeps.",
    )
    DUPLICATE_JOB_ID = (
        "duplicate_job_id",
        Outcome.REJECTED,
        "Another job with this id and other content came first; it is not touched.",
    )

    # The job is refused before it reaches the engine.
    MISSING_FIELD = "missing_field", Outcome.FAILED, "A field that the job needs is not there."
    INVALID_TYPE = "invalid_type", Outcome.FAILED, "A field has the wrong JSON type."
    INVALID_VALUE = "invalid_value", Outcome.FAILED, "A field's value is not allowed, or contradicts another."
    INVALID_TEXT = (
        "invalid_text",
        Outcome.FAILED,
        "A text holds half a surrogate pair, which is no character.",
    )
    MISPLACED_OPTION = (
        "misplaced_option",
        Outcome.FAILED,
        "An option stands where it would be ignored: a sampling option outside `sampling`, say.",
    )
    UNSUPPORTED_OPTION = (
        "unsupported_option",
        Outcome.FAILED,
        "The option is known, but this version does not carry it out.",
    )
    UNSUPPORTED_FEATURE = (
        "unsupported_feature",
        Outcome.FAILED,
        "`requires` names a feature that this version does not know.",
    )
    UNSUPPORTED_URL = "unsupported_url", Outcome.FAILED, "The batch line's `url` is not one of those served."
    UNKNOWN_MODEL = "unknown_model", Outcome.FAILED, "No worker of this pool serves the model."
    NO_CHAT_TEMPLATE = "no_chat_template", Outcome.FAILED, "The model has no chat template; send a `prompt`."
    INVALID_GRAMMAR = (
        "invalid_grammar",
        Outcome.FAILED,
        "A schema, regular expression or grammar is malformed, contradicts itself, or asks for what cannot be enforced.",
    )
    GRAMMAR_TOO_COMPLEX = (
        "grammar_too_complex",
        Outcome.FAILED,
        "A schema, regular expression or grammar takes more time or memory than is allowed.",
    )
    CONTEXT_LENGTH_EXCEEDED = (
        "context_length_exceeded",
        Outcome.FAILED,
        "The prompt leaves the model's context no room for an answer of min_tokens, or of one token.",
    )
    INVALID_REQUEST = "invalid_request", Outcome.FAILED, "The engine cannot run the job as asked."

    # The job ran, or was about to.
    ENGINE_FAILURE = (
        "engine_failure",
        Outcome.FAILED,
        "The engine failed again and again with this job alone.",
    )
    NON_FINITE_VALUES = (
        "non_finite_values",
        Outcome.FAILED,
        "The model computed NaN or infinity for the job: its weights are damaged, or overflow the dtype that it runs in.",
    )
    OUT_OF_MEMORY = (
        "out_of_memory",
        Outcome.FAILED,
        "The worker found no memory left for the job's text or grammar, again and again.",
    )
    INTERNAL_ERROR = (
        "internal_error",
        Outcome.FAILED,
        "A defect in Headrace; the worker's log has the details.",
    )
    LEDGER_REJECTED = "ledger_rejected", Outcome.FAILED, "Postgres refused the job's row."
    RESULT_TOO_LARGE = (
        "result_too_large",
        Outcome.FAILED,
        "The result does not fit a Kafka message, and there is no store for larger ones. Beside `succeeded`: the topic did"
        " not take it, and only the job table has its answers.",
    )
    CANCELLED = "cancelled", Outcome.CANCELLED, "The job or its batch was cancelled."
    DEADLINE_EXCEEDED = "deadline_exceeded", Outcome.EXPIRED, "The deadline passed before the job ended."


class SchemaError(Exception):
    """Root of everything this package raises on purpose."""


class Unparsable(SchemaError):
    """A record that can never be a job: it is dead-lettered unchanged and counts as rejected.

    ``tenant``, ``batch_id`` and ``custom_id`` come from the record's headers, so that its batch still adds up.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        tenant: str = "default",
        batch_id: str | None = None,
        custom_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.tenant = tenant
        self.batch_id = batch_id
        self.custom_id = custom_id


class InvalidJob(SchemaError):
    """A job that is refused: it fails under its own id. ``param`` is the dotted path of the field at fault."""

    def __init__(self, envelope: "Envelope", code: ErrorCode, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.envelope = envelope
        self.code = code
        self.message = message
        self.param = param
