"""A directory as a store: whole bodies or none, and nothing from outside it."""

import os
from hashlib import sha256
from pathlib import Path

import pytest

from headrace.store import (
    BodyAltered,
    BodyMissing,
    NotAllowed,
    Store,
    StoreUnavailable,
    UnknownStore,
    open_store,
)

BODY = b'{"text": "a large answer"}'
DIGEST = sha256(BODY).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def read(store: Store, uri: str) -> bytes:
    return store.read(uri, len(BODY), DIGEST)


def test_a_body_reads_back_from_its_uri(store: Store, tmp_path: Path) -> None:
    store.write("2027-01-31/a.json", BODY)
    store.write("2027-01-31/a.json", BODY)
    uri = store.uri("2027-01-31/a.json")
    assert uri == (tmp_path / "store/2027-01-31/a.json").as_uri()
    assert read(store, uri) == BODY
    assert [path.name for path in (tmp_path / "store/2027-01-31").iterdir()] == ["a.json"]


def test_the_same_directory_has_one_name_however_it_is_written(tmp_path: Path) -> None:
    with_spaces = tmp_path / "a b"
    roots = {open_store(root).root for root in (str(with_spaces), f"{with_spaces}/", with_spaces.as_uri())}
    assert roots == {with_spaces.as_uri()}


def test_nothing_is_there_before_it_is_whole(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnavailable, match="No space left"):
        store.write("a.json", BODY)
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize(
    "path",
    [
        "../outside",
        "%2e%2e/outside",
        "a/../../outside",
        "./a",
        "a//b",
        "",
        "a\\..\\b",
        "a%00b",
        "a/%2E%2E/%2e%2e/x",
    ],
)
def test_a_path_that_goes_astray_is_refused(path: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(BODY)
    with pytest.raises(NotAllowed):
        read(store, f"{store.root}/{path}")


def test_a_place_outside_the_root_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store-2").write_bytes(BODY)
    for uri in (
        (tmp_path / "store-2").as_uri(),
        store.root,
        "file:///etc/passwd",
        "file://elsewhere/etc/passwd",
        "http://169.254.169.254/latest/meta-data/",
        "https://example.org/a.json",
        "s3://bucket/a.json",
        "/etc/passwd",
        "",
    ):
        with pytest.raises(NotAllowed):
            read(store, uri)


def test_links_are_not_followed_wherever_they_stand(store: Store, tmp_path: Path) -> None:
    root, outside = tmp_path / "store", tmp_path / "outside"
    outside.mkdir()
    (outside / "a.json").write_bytes(BODY)
    store.write("in/a.json", BODY)
    (root / "file.json").symlink_to(outside / "a.json")
    (root / "inner.json").symlink_to("in/a.json")
    (root / "directory").symlink_to(outside)
    for name in ("file.json", "inner.json", "directory/a.json"):
        with pytest.raises(NotAllowed):
            read(store, store.uri(name))


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = open_store(str(tmp_path / "link"))
    store.write("a.json", BODY)
    assert read(store, store.uri("a.json")) == BODY


def test_what_is_no_file_is_refused_without_waiting_for_it(store: Store, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store/pipe")
    (tmp_path / "store/directory").mkdir()
    for name in ("pipe", "directory"):
        with pytest.raises(NotAllowed):
            read(store, store.uri(name))


def test_a_body_is_what_its_reference_says_or_nothing(store: Store, tmp_path: Path) -> None:
    store.write("a.json", BODY)
    with pytest.raises(BodyAltered, match="bytes"):
        store.read(store.uri("a.json"), len(BODY) - 1, DIGEST)
    (tmp_path / "store/a.json").write_bytes(BODY.swapcase())
    with pytest.raises(BodyAltered, match="SHA-256"):
        read(store, store.uri("a.json"))
    (tmp_path / "store/a.json").unlink()
    with pytest.raises(BodyMissing):
        read(store, store.uri("a.json"))


def test_a_store_whose_directory_is_away_is_unavailable_and_comes_back(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("in the way")
    with pytest.raises(StoreUnavailable):
        store.write("a.json", BODY)
    (tmp_path / "store").unlink()
    store.write("a.json", BODY)
    store.check()


@pytest.mark.parametrize(
    "root", ["http://169.254.169.254/", "https://example.org/x", "ftp://x/y", "memory:/x"]
)
def test_a_root_of_another_kind_is_refused(root: str) -> None:
    with pytest.raises(UnknownStore):
        open_store(root)
