"""Names on the wire: topics and headers."""

import re
from dataclasses import dataclass

CONTENT_TYPE = "content-type"
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
TRACE_HEADERS = (TRACEPARENT, TRACESTATE)

# Envelope fields that may travel as headers. A field in the body wins over its header.
TENANT = "headrace-tenant"
JOB_ID = "headrace-job-id"
BATCH_ID = "headrace-batch-id"
CUSTOM_ID = "headrace-custom-id"
DEADLINE = "headrace-deadline"
FIELD_HEADERS = {
    TENANT: "tenant",
    JOB_ID: "job_id",
    BATCH_ID: "batch_id",
    CUSTOM_ID: "custom_id",
    DEADLINE: "deadline",
}

# On the lines of a batch that is sent under an idempotency key: which sending of it they are of. The message that closes the
# batch names it too, so that what another sending had rejected need not count.
SUBMISSION = "headrace-submission"

# On results: the content of the job that was answered (Envelope.content_sha in hexadecimal), so that whoever sent other content
# under the same id does not take the answer for theirs.
CONTENT = "headrace-content"

# On a record sent once more: which run of its job it asks for, and the place (partition/offset/timestamp in its topic)
# of the record that it repeats.
RUN = "headrace-run"
REPLAY_OF = "headrace-replay-of"
REPEAT_HEADERS = (RUN, REPLAY_OF)

# On dead letters: where the record came from, and why it is there.
DEAD_TOPIC = "headrace-dead-topic"
DEAD_PARTITION = "headrace-dead-partition"
DEAD_OFFSET = "headrace-dead-offset"
DEAD_TIMESTAMP = "headrace-dead-timestamp"
DEAD_RUN = "headrace-dead-run"
DEAD_CODE = "headrace-dead-code"
DEAD_MESSAGE = "headrace-dead-message"
# Of a duplicate_job_id, "true" or "false": whether the job that came first is of the same batch, and so ends in it.
DEAD_SAME_BATCH = "headrace-dead-same-batch"
DEAD_HEADERS = (
    DEAD_TOPIC,
    DEAD_PARTITION,
    DEAD_OFFSET,
    DEAD_TIMESTAMP,
    DEAD_RUN,
    DEAD_CODE,
    DEAD_MESSAGE,
    DEAD_SAME_BATCH,
)

JSON = b"application/json"

MAX_LETTER_BYTES = 20_000_000  # the largest record, with its headers and those of a dead letter

# No dots, so that tier_of can read a name back; no underscores, which Kafka warns about next to dots.
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


@dataclass(frozen=True)
class Topics:
    """The topics of one installation.

    prefix: what all names begin with; several labels may be joined by dots. pool: the workers that share job topics
    (one pool a model or a set of models); None where there is only one pool. tiers: highest first.
    """

    prefix: str = "headrace"
    pool: str | None = None
    tiers: tuple[str, ...] = ("interactive", "standard", "bulk")

    def __post_init__(self) -> None:
        labels = [*self.prefix.split("."), *self.tiers, *([] if self.pool is None else [self.pool])]
        for label in labels:
            if not _LABEL.fullmatch(label):
                raise ValueError(f"{label!r} is no topic label: use a-z, 0-9 and hyphens inside")
        if not self.tiers or len(set(self.tiers)) != len(self.tiers):
            raise ValueError("tiers must be at least one, and each only once")

    def jobs(self, tier: str) -> str:
        """The topic on which jobs of ``tier`` arrive. Raises ValueError for an unknown tier."""
        if tier not in self.tiers:
            raise ValueError(f"{tier!r} is no tier; there are {', '.join(self.tiers)}")
        return f"{self._jobs_prefix}{tier}"

    def tier_of(self, topic: str) -> str:
        """The tier whose jobs arrive on ``topic``. Raises ValueError for any other topic."""
        tier = topic.removeprefix(self._jobs_prefix)
        if tier == topic or tier not in self.tiers:
            raise ValueError(f"{topic!r} is no topic of jobs here")
        return tier

    @property
    def results(self) -> str:
        """One record for each run that ended, at least once; keyed by the job's id."""
        return f"{self.prefix}.results.v1"

    @property
    def control(self) -> str:
        """Batches opened and closed, and cancels."""
        return f"{self.prefix}.control.v1"

    @property
    def dead(self) -> str:
        """Dead letters: rejected records, and jobs that failed by a fault of ours and not of their own."""
        return f"{self.prefix}.dead.v1"

    @property
    def recorder_group(self) -> str:
        """The recorder's consumer group: what it has confirmed is in the job table."""
        return f"{self.prefix}.recorder"

    @property
    def all(self) -> tuple[str, ...]:
        """Every topic, those of jobs first."""
        return (*map(self.jobs, self.tiers), self.results, self.control, self.dead)

    def config(self, topic: str) -> dict[str, str]:
        """What a topic is made with that is not the broker's default: a dead letter is a record and headers more."""
        return {"max.message.bytes": str(MAX_LETTER_BYTES)} if topic == self.dead else {}

    @property
    def _jobs_prefix(self) -> str:
        pool = "" if self.pool is None else f"{self.pool}."
        return f"{self.prefix}.jobs.v1.{pool}"
