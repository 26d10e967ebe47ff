"""Finding a model: a directory as it is, a hub id from the cache, an error that says what to do."""

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from headrace.engine.errors import ModelNotFound
from headrace.engine.hub import resolve


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/place", "./absent", "a/b/c"])
def test_a_path_that_is_not_there_never_asks_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ModelNotFound, match="no model directory"):
        resolve(name)


def test_a_gguf_file_is_pointed_at_convert(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelNotFound, match="headrace convert"):
        resolve(tmp_path / "m.gguf")


def test_the_hubs_local_cache_comes_before_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, local_files_only: bool, **_: object) -> str:
        asked.append(local_files_only)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("someone/model") == tmp_path
    assert asked == [True]


def test_weights_that_are_not_read_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        "config.json",
        "consolidated.safetensors",
        "model-00001-of-00002.safetensors",
        "original/model.safetensors",
        "additional_chat_templates/tool_use.jinja",
    ]
    fetched = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str], **_: object) -> str:
        fetched.extend(
            filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        )
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve("someone/model")
    assert fetched == [files[0], files[2], files[4]]


def test_an_unreachable_hub_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **_: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFound, match="cannot be reached"):
        resolve("someone/model")


def test_a_name_that_is_no_hub_id_is_refused() -> None:
    with pytest.raises(ModelNotFound, match="neither a directory nor a hub id"):
        resolve("some one/mod el")
