"""Bodies too large for a Kafka message: kept under one root, in a directory or a bucket, and referred to by URI.

A reference says where a body is, how many bytes it has and their SHA-256. Nothing is read from outside the roots that
the operator names, whatever a reference says, and nothing is believed that the digest does not confirm.
"""

from headrace.store.errors import (
    BodyAltered,
    BodyMissing,
    NotAllowed,
    StoreError,
    StoreNotInstalled,
    StoreUnavailable,
    UnknownStore,
)
from headrace.store.store import Store, open_store

__all__ = [
    "BodyAltered",
    "BodyMissing",
    "NotAllowed",
    "Store",
    "StoreError",
    "StoreNotInstalled",
    "StoreUnavailable",
    "UnknownStore",
    "open_store",
]
