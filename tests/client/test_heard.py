"""What a connection's last words mean."""

import pytest

from headrace.client.heard import remedy


@pytest.mark.parametrize(
    ("said", "setting"),
    [
        (
            "SSL handshake failed: Disconnected: connecting to a PLAINTEXT broker listener?",
            "takes no TLS there",
        ),
        (
            "SSL handshake failed: Disconnected: SSL connection closed by peer: connecting to a PLAINTEXT broker listener?",
            "takes no TLS there",
        ),
        ("Disconnected: SSL connection closed by peer (after 4ms in state APIVERSION_QUERY)", "SASL_SSL"),
        ("Connect to ipv4#127.0.0.1:1 failed: Connection refused", ""),
    ],
)
def test_the_remedy_is_of_what_was_said(said: str, setting: str) -> None:
    assert setting in remedy(said)
    assert bool(setting) == bool(remedy(said))
