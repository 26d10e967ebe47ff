"""Finds a model's directory: a path, or a Hugging Face hub id."""

from pathlib import Path

from headrace.engine.errors import ModelNotFound

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
NOT_READ = ["consolidated*.safetensors", "*/*.safetensors"]
"""The same weights once more, as Mistral's hub repositories have them, and those of other parts: as large as the model."""
TIMEOUT_S = 5.0


def resolve(name_or_path: str | Path) -> Path:
    """The directory of a model. A hub id is looked up in the hub's local cache first, then fetched.

    Raises ModelNotFound, which says what to do.
    """
    return local(name_or_path) or _from_hub(str(name_or_path))


def local(name_or_path: str | Path) -> Path | None:
    """The directory, if a path is meant; None for what may be a hub id. Raises ModelNotFound as ``resolve``."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        raise ModelNotFound(
            f"{path} is a GGUF file; run `headrace convert {path} DIRECTORY` and use the directory"
        )
    name = str(name_or_path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"no model directory at {path}")
    return None


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    for local in (True, False):
        try:
            return Path(
                snapshot_download(
                    name,
                    allow_patterns=FILES,
                    ignore_patterns=NOT_READ,
                    local_files_only=local,
                    etag_timeout=TIMEOUT_S,
                )
            )
        except LocalEntryNotFoundError:
            continue  # not in the cache; the second time round: the hub cannot be reached
        except HFValidationError as error:
            raise ModelNotFound(f"{name!r} is neither a directory nor a hub id") from error
        except (HfHubHTTPError, OSError) as error:
            raise ModelNotFound(
                f"the hub has no model {name!r} that this machine may read ({type(error).__name__}); "
                "check the id, or set HF_TOKEN if it is private"
            ) from error
    raise ModelNotFound(
        f"{name!r} is neither a directory nor in the hub's local cache, and the hub cannot be reached; "
        "download the model elsewhere and give its directory"
    )
