"""A bucket as a store, against a server that speaks S3 (moto's)."""

import sys
from collections.abc import Iterator
from hashlib import sha256

import pytest
import s3

from headrace.store import (
    BodyAltered,
    BodyMissing,
    NotAllowed,
    StoreNotInstalled,
    StoreUnavailable,
    open_store,
)

BODY = bytes(range(256)) * 30_000
DIGEST = sha256(BODY).hexdigest()


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    """The environment that leads to a server with a bucket called ``bucket``."""
    with s3.server() as told:
        yield told


@pytest.fixture(autouse=True)
def environment(bucket: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("root", ["s3://bucket", "s3://bucket/some/prefix/"])
def test_a_body_reads_back_from_its_uri(root: str) -> None:
    store = open_store(root)
    store.check()
    store.write("2027-01-31/a.json", BODY)
    store.write("2027-01-31/a.json", BODY)
    uri = store.uri("2027-01-31/a.json")
    assert uri == f"{root.rstrip('/')}/2027-01-31/a.json"
    assert store.read(uri, len(BODY), DIGEST) == BODY


def test_a_body_is_what_its_reference_says_or_nothing() -> None:
    store = open_store("s3://bucket/x")
    store.write("a.json", BODY)
    with pytest.raises(BodyAltered, match="bytes"):
        store.read(store.uri("a.json"), 5, DIGEST)
    with pytest.raises(BodyAltered, match="SHA-256"):
        store.read(store.uri("a.json"), len(BODY), "00" * 32)
    with pytest.raises(BodyMissing):
        store.read(store.uri("b.json"), len(BODY), DIGEST)


@pytest.mark.parametrize(
    "uri", ["s3://bucket/y/a.json", "s3://bucket/x/../y/a.json", "s3://bucket/xy/a.json"]
)
def test_what_lies_outside_the_prefix_is_not_read(uri: str) -> None:
    open_store("s3://bucket/y").write("a.json", BODY)
    with pytest.raises(NotAllowed):
        open_store("s3://bucket/x").read(uri, len(BODY), DIGEST)


def test_a_bucket_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailable, match="nobody"):
        open_store("s3://nobody").write("a.json", b"x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = open_store("s3://bucket")
    with pytest.raises(StoreUnavailable):
        store.write("a.json", b"x")
    with pytest.raises(StoreUnavailable):
        store.read("s3://bucket/a.json", 1, DIGEST)


def test_without_the_extra_a_bucket_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(StoreNotInstalled, match=r"headrace\[buckets\]"):
        open_store("s3://bucket")
