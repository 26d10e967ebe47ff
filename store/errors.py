"""Why a body could not be kept or read."""


class StoreError(Exception):
    """Root of everything that stores raise."""


class UnknownStore(StoreError):
    """The root is neither a directory nor a bucket of a kind that is known."""


class StoreNotInstalled(StoreError):
    """The package that talks to this kind of bucket is missing."""


class StoreUnavailable(StoreError):
    """The store does not answer, or takes nothing: trying again may help."""


class NotAllowed(StoreError):
    """The reference leads out of the root: another place, a way up, a link."""


class BodyMissing(StoreError):
    """There is nothing where the reference leads."""


class BodyAltered(StoreError):
    """What lies there is not what the reference describes: other bytes, or another number of them."""
