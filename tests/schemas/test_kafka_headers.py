"""Headers as confluent_kafka gives them, and as it fails to."""

import pytest

from headrace.schemas import ErrorCode, Source, Unparsable, parse_envelope
from headrace.schemas.kafka_headers import UNREADABLE, headers_of


class Message:
    """One whose headers can be read, or not."""

    def __init__(self, headers: list[tuple[str, bytes]] | BaseException | None) -> None:
        self.given = headers

    def headers(self) -> list[tuple[str, bytes]] | None:
        if isinstance(self.given, BaseException):
            raise self.given
        return self.given

    def set_headers(self, headers: list[tuple[str, bytes]]) -> None:
        self.given = headers


def test_headers_come_as_they_are_and_none_as_an_empty_list() -> None:
    assert headers_of(Message([("a", b"1"), ("a", b"2")])) == [("a", b"1"), ("a", b"2")]
    assert headers_of(Message(None)) == []


@pytest.mark.parametrize("error", [SystemError(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "")])
def test_headers_that_cannot_be_read_reject_their_record_however_often_they_are_asked_for(
    error: Exception,
) -> None:
    message = Message(error)
    assert headers_of(message) == headers_of(message) == [(UNREADABLE, None)]
    with pytest.raises(Unparsable, match="name of a header") as caught:
        parse_envelope(b'{"prompt": "x"}', headers_of(message), Source("t", 0, 0, -1))
    assert caught.value.code is ErrorCode.INVALID_ENCODING
