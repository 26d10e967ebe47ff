"""The wire contract: what goes over Kafka, and what everybody calls it.

Read in this order: ids (what a job is called), envelope (what all but the engine need of it), job and sampling (what
may be asked for), result (what comes back), control (batches and cancels), errors (what can be wrong).
"""

from headrace.schemas.chat import Message
from headrace.schemas.control import (
    BatchClosed,
    BatchOpened,
    CancelBatch,
    CancelJob,
    ControlMessage,
    parse_control,
)
from headrace.schemas.envelope import Envelope, Headers, parse_envelope
from headrace.schemas.errors import ErrorCode, InvalidJob, Outcome, SchemaError, Unparsable
from headrace.schemas.ids import Source, job_key, named_key, uuid7
from headrace.schemas.job import JobKind, PromptJob, encode_job, parse_job
from headrace.schemas.replay import dead_letter_source, repeat_headers, source_of
from headrace.schemas.result import (
    Choice,
    JobError,
    JobResult,
    Reference,
    Timings,
    UnreadableResult,
    Usage,
)
from headrace.schemas.sampling import Sampling
from headrace.schemas.states import JobState
from headrace.schemas.topics import Topics
from headrace.schemas.wire import clean_json, clean_text

__all__ = [
    "BatchClosed",
    "BatchOpened",
    "CancelBatch",
    "CancelJob",
    "Choice",
    "ControlMessage",
    "Envelope",
    "ErrorCode",
    "Headers",
    "InvalidJob",
    "JobError",
    "JobKind",
    "JobResult",
    "JobState",
    "Message",
    "Outcome",
    "PromptJob",
    "Reference",
    "Sampling",
    "SchemaError",
    "Source",
    "Timings",
    "Topics",
    "Unparsable",
    "UnreadableResult",
    "Usage",
    "clean_json",
    "clean_text",
    "dead_letter_source",
    "encode_job",
    "job_key",
    "named_key",
    "parse_control",
    "parse_envelope",
    "parse_job",
    "repeat_headers",
    "source_of",
    "uuid7",
]
