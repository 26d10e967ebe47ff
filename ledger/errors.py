"""Why the ledger could not do as asked."""


class LedgerError(Exception):
    """Root of everything the ledger raises."""


class LedgerUnavailable(LedgerError):
    """Postgres could not be reached, or would not write, for as long as we were told to try."""


class NotMigrated(LedgerError):
    """The database lacks tables or columns that this version needs; `headrace migrate` makes them."""


class NotPostgres(LedgerError):
    """The address is that of another kind of database or of none, or a parameter in it has no such value."""


class NotPermitted(LedgerError):
    """The role that we log in as lacks a right; deploy/roles.sql grants what each process needs."""


class RowRefused(LedgerError):
    """Postgres will not take this row, however often it is tried."""
