"""Records whose headers no well-behaved client can write: librdkafka itself, past the Python client."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import confluent_kafka

# Tags of rd_kafka_producev's arguments (rd_kafka_vtype_t).
_END, _TOPIC, _VALUE, _COPY, _HEADERS = (ctypes.c_int(tag) for tag in (0, 1, 4, 7, 10))


def library() -> Path | None:
    """The librdkafka that came with the Python client; None where it is the system's."""
    folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    return next(folder.glob("librdkafka*"), None)


def send(bootstrap: str, topic: str, value: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Send one record, and return when the broker has it."""
    kafka = ctypes.CDLL(str(library()))
    for function in (kafka.rd_kafka_conf_new, kafka.rd_kafka_new, kafka.rd_kafka_headers_new):
        function.restype = ctypes.c_void_p
    why = ctypes.create_string_buffer(512)
    config = ctypes.c_void_p(kafka.rd_kafka_conf_new())
    assert kafka.rd_kafka_conf_set(config, b"bootstrap.servers", bootstrap.encode(), why, 512) == 0, why.value
    producer = ctypes.c_void_p(kafka.rd_kafka_new(0, config, why, 512))
    raw = ctypes.c_void_p(kafka.rd_kafka_headers_new(len(headers)))
    for name, content in headers:
        sizes = ctypes.c_ssize_t(len(name)), ctypes.c_ssize_t(len(content))
        assert kafka.rd_kafka_header_add(raw, name, sizes[0], content, sizes[1]) == 0
    record = (_VALUE, ctypes.c_char_p(value), ctypes.c_size_t(len(value)), _COPY, ctypes.c_int(2))
    assert (
        kafka.rd_kafka_producev(
            producer, _TOPIC, ctypes.c_char_p(topic.encode()), *record, _HEADERS, raw, _END
        )
        == 0
    )
    assert kafka.rd_kafka_flush(producer, 120_000) == 0
    kafka.rd_kafka_destroy(producer)
