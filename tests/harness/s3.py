"""A server that speaks S3 (moto's), and what a client's environment has to say of it."""

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server() -> Iterator[dict[str, str]]:
    """A server with a bucket called ``bucket``: the environment that leads there."""
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "key",
            "AWS_REGION": "us-east-1",
        }
    finally:
        running.stop()
