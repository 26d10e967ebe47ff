"""A Kafka record's headers, also where the client library stumbles over them."""

from operator import methodcaller
from typing import Any

UNREADABLE = "\ufffd"
"""Stands for all headers of a record of which one has a name that is not UTF-8."""


# Written as message.headers(), the interpreter's quick path for such calls would not see that it has failed.
_headers = methodcaller("headers")


def headers_of(message: Any) -> list[tuple[str, bytes | None]]:
    """The headers of a confluent_kafka.Message.

    It gives none of them where a name is not UTF-8, and what it then holds is broken, so that is replaced.
    """
    try:
        return _headers(message) or []
    except (SystemError, UnicodeDecodeError):
        message.set_headers([(UNREADABLE, None)])
        return [(UNREADABLE, None)]
