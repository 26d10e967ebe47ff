"""What the dead-letter topic holds: the record as it came, byte for byte, and why it is there."""

from headrace.ledger import JobRow, RejectionRow
from headrace.schemas import ErrorCode, topics
from headrace.worker.consumer import Delivery
from headrace.worker.job import source_of_delivery
from headrace.worker.publisher import Headers, Publication

MOST_MESSAGE_CHARS = 1000


def dead_letter(
    topic: str,
    delivery: Delivery,
    row: JobRow | RejectionRow,
    run: int,
    code: str,
    message: str,
    about: object,
) -> Publication:
    """The dead letter of one record; its own headers stay, whose it is and why it is here are added.

    A record that was sent again comes from where the first one lay: that is the place the job table knows.
    """
    source = source_of_delivery(delivery)
    why: Headers = [
        (topics.DEAD_TOPIC, source.topic.encode()),
        (topics.DEAD_PARTITION, b"%d" % source.partition),
        (topics.DEAD_OFFSET, b"%d" % source.offset),
        (topics.DEAD_TIMESTAMP, b"%d" % source.timestamp_ms),
        (topics.DEAD_RUN, b"%d" % run),
        (topics.DEAD_CODE, code.encode()),
        (topics.DEAD_MESSAGE, message[:MOST_MESSAGE_CHARS].encode("utf-8", "replace")),
    ]
    if isinstance(row, RejectionRow) and code == ErrorCode.DUPLICATE_JOB_ID:
        why.append((topics.DEAD_SAME_BATCH, b"true" if row.same_batch else b"false"))
    own = {name for name, _ in delivery.headers}
    names = ((topics.TENANT, row.tenant), (topics.BATCH_ID, row.batch_id), (topics.CUSTOM_ID, row.custom_id))
    whose: Headers = [(name, text.encode()) for name, text in names if text is not None and name not in own]
    return Publication(topic, delivery.key, delivery.value, [*delivery.headers, *whose, *why], about)
