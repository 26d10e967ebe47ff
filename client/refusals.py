"""What Kafka tells of a sending's lines after they were sent: which of them never became jobs."""

from collections.abc import Mapping
from uuid import UUID

from confluent_kafka import Message

from headrace.client.lines import Problem, SentLine
from headrace.client.readback import place_of
from headrace.schemas import ErrorCode, Source, Unparsable, parse_envelope
from headrace.schemas import topics as names
from headrace.schemas.kafka_headers import headers_of

OTHER_CONTENT = "it was not run: a job with other content was sent before under its idempotency key or job_id; give it another"


class Refusals:
    """Adds to ``problems``, each line once, those that results and dead letters show to be refused.

    lines: of each job of the sending its line. An id alone does not tell, since lines of other content may have been sent
    under it before and after.
    """

    def __init__(self, lines: Mapping[UUID, SentLine], problems: list[Problem]) -> None:
        self._lines = lines
        self._problems = problems
        self._told = {problem.line for problem in problems}

    def take_result(self, id: UUID, message: Message) -> bool:
        """Whether the result of job ``id`` answers other content than was sent here."""
        line, content = self._lines.get(id), dict(headers_of(message)).get(names.CONTENT)
        if line is None or content in (None, line.content_sha.hex().encode()):
            return False
        self._tell(line.number, ErrorCode.DUPLICATE_JOB_ID, OTHER_CONTENT)
        return True

    def take_letter(self, id: UUID | None, code: ErrorCode, message: Message) -> bool:
        """Whether the dead letter, of a rejected record with the key ``id``, is of a line as it was sent here."""
        line = None if id is None else self._lines.get(id)
        if line is None:
            return False
        headers = headers_of(message)
        try:
            envelope = parse_envelope(message.value(), headers, Source(*place_of(message), timestamp_ms=-1))
        except Unparsable:
            return False
        if (envelope.id, envelope.content_sha) != (id, line.content_sha):
            return False
        why = (dict(headers).get(names.DEAD_MESSAGE) or b"").decode("utf-8", "replace")
        self._tell(line.number, code, OTHER_CONTENT if code is ErrorCode.DUPLICATE_JOB_ID else why)
        return True

    def _tell(self, number: int, code: ErrorCode, why: str) -> None:
        if number not in self._told:
            self._told.add(number)
            self._problems.append(Problem(number, code, why, None, sent=True))
