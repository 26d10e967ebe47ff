"""Which of Kafka's errors a process that stays goes on after."""

from confluent_kafka import KafkaError

_NEVER_MENDS = frozenset({
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
    KafkaError._FATAL,
})  # fmt: skip


def never_mends(error: KafkaError) -> bool:
    """Whether no waiting helps: the client's rights or its own state are wrong."""
    return error.fatal() or error.code() in _NEVER_MENDS
