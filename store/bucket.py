"""Bodies as objects in a bucket (S3, Google Cloud Storage, Azure), through obstore."""

from datetime import timedelta
from typing import TYPE_CHECKING

from headrace.store.errors import BodyAltered, BodyMissing, StoreNotInstalled, StoreUnavailable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# A caller that can wait tries again itself, so that it can also be told to stop.
_RETRIES = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}


class Bucket:
    """Objects below ``root``, such as ``s3://bucket/prefix``. Raises StoreNotInstalled; connects when first used."""

    def __init__(self, root: str) -> None:
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError:
            raise StoreNotInstalled(
                f"{root} needs the extra `buckets`: pip install 'headrace[buckets]'"
            ) from None
        self._root = root
        try:
            self._store: ObjectStore = from_url(root, retry_config=_RETRIES)
        except BaseError as error:
            raise StoreUnavailable(f"{root} cannot be used: {_cause(error)}") from error

    def write(self, name: str, body: bytes) -> None:
        """See Bodies. An object appears whole or not at all."""
        from obstore.exceptions import BaseError

        try:
            self._store.put(name, body, use_multipart=False)
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"{self._root} takes nothing: {_cause(error)}") from error

    def read(self, name: str, size: int) -> bytes:
        """See Bodies."""
        from obstore.exceptions import BaseError, NotFoundError

        try:
            found = self._store.get(name)
            if found.meta["size"] != size:
                raise BodyAltered(f"{name} has {found.meta['size']:,} bytes, and not {size:,}")
            return bytes(found.bytes())
        except (NotFoundError, FileNotFoundError):
            raise BodyMissing(f"there is no {name} in {self._root}") from None
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"{self._root} does not answer: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """The first line: obstore appends the request and its own debugging output."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
