"""The boundary: what lower layers raise becomes one sentence, a remedy and an exit code.

Rules are looked up by the error's class, by name, so that translating never imports a layer that was not in use. An
error without a rule is a defect and keeps its traceback.
"""

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.cli.exits import Exit


class Failure(Exception):
    """A command cannot go on, and why: ``message`` is one sentence, ``remedy`` what the user can do."""

    def __init__(self, exit_code: Exit, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.message = message
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Rule:
    """How to say an error. ``{error}`` in ``sentence`` is the error's own text.

    exact: not for subclasses, which mean something else.
    """

    exit_code: Exit
    remedy: str = ""
    sentence: str = "{error}"
    exact: bool = False


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

TELLS_MORE = "; `headrace doctor` tells more"

_ROLES = "Have the owner of the tables run deploy/roles.sql, or log in with another role."
_DATABASE = f"Check DATABASE_URL and that Postgres is up{TELLS_MORE}."
_POSTGRES_URL = "It looks like postgresql://user:password@host:5432/database."
_STORE = f"Check HEADRACE_RESULT_STORE: a directory, or s3://bucket/prefix{TELLS_MORE}."
# What Postgres or libpq says when it does not let one in, and what to do about it.
_LOCKED_OUT = {
    "no encryption": "Postgres takes TLS alone: add ?sslmode=verify-full&sslrootcert=CA.pem to DATABASE_URL.",
    "password authentication failed": "Check the user and the password in DATABASE_URL.",
    "no password supplied": "DATABASE_URL names no password, and Postgres asks for one.",
    "certificate": "Check sslrootcert in DATABASE_URL: it names the authority that signed Postgres's certificate.",
    "does not support SSL": "Postgres offers no TLS there: check the host, or sslmode in DATABASE_URL.",
}
_PROPERTY = r"(?<![\w./])(?:[a-z]+(?:\.[a-z]+)+|acks\b)"  # of librdkafka's, and no file
_BROKER = f"Check KAFKA_BOOTSTRAP_SERVERS and that the broker is up{TELLS_MORE}."

RULES = {
    "headrace.ledger.errors.LedgerUnavailable": Rule(
        Exit.UNAVAILABLE, _DATABASE, "The database cannot be reached: {error}"
    ),
    "headrace.ledger.errors.NotPostgres": Rule(Exit.USAGE, _POSTGRES_URL, "DATABASE_URL: {error}"),
    "headrace.ledger.errors.NotMigrated": Rule(Exit.NOT_READY, "Run `headrace migrate`."),
    "headrace.ledger.errors.NotPermitted": Rule(Exit.REFUSED, _ROLES),
    "psycopg.errors.InsufficientPrivilege": Rule(Exit.REFUSED, _ROLES, "Postgres refused: {error}"),
    "psycopg.OperationalError": Rule(Exit.UNAVAILABLE, _DATABASE, "The database cannot be reached: {error}"),
    # Of libpq's connection string; what Postgres itself refuses has a class below this one, and is a defect.
    "psycopg.ProgrammingError": Rule(
        Exit.USAGE, "Check the options in DATABASE_URL.", "The database's driver refused: {error}", exact=True
    ),
    "sqlalchemy.exc.OperationalError": Rule(
        Exit.UNAVAILABLE, _DATABASE, "The database cannot be reached: {error}"
    ),
    "cimpl.KafkaException": Rule(Exit.UNAVAILABLE, _BROKER, "Kafka refused: {error}"),
    "headrace.client.errors.DeliveryFailed": Rule(Exit.UNAVAILABLE, _BROKER),
    "headrace.client.errors.BrokerUnreachable": Rule(Exit.UNAVAILABLE, _BROKER),
    "headrace.client.errors.TopicMissing": Rule(Exit.NOT_READY, "Run `headrace topics create`."),
    "headrace.client.errors.InvalidLine": Rule(
        Exit.USAGE, "Of a file nothing was sent; of stdin, what came before that line."
    ),
    "headrace.client.errors.NoJobs": Rule(Exit.USAGE),
    "headrace.client.errors.InvalidName": Rule(Exit.USAGE, "Choose another."),
    "headrace.store.errors.UnknownStore": Rule(Exit.USAGE, _STORE),
    "headrace.store.errors.StoreNotInstalled": Rule(Exit.NOT_READY),
    "headrace.store.errors.StoreUnavailable": Rule(Exit.UNAVAILABLE, _STORE),
    "headrace.engine.errors.ModelNotFound": Rule(Exit.NOT_FOUND),
    "headrace.engine.errors.UnsupportedModel": Rule(Exit.REFUSED),
    "headrace.engine.errors.BadCheckpoint": Rule(Exit.REFUSED),
    "headrace.engine.errors.InvalidRequest": Rule(Exit.USAGE),
    "headrace.engine.errors.OutOfMemory": Rule(
        Exit.REFUSED, "Give it less: HEADRACE_KV_TOKENS, HEADRACE_MAX_CONTEXT or HEADRACE_MAX_SLOTS."
    ),
    "headrace.engine.errors.EngineError": Rule(Exit.USAGE),
    "headrace.engine.errors.EngineDead": Rule(
        Exit.UNAVAILABLE, "Its log above says why; start again to go on."
    ),
    "headrace.local.errors.MissingPart": Rule(Exit.NOT_READY),
    "headrace.local.errors.ChildFailed": Rule(Exit.UNAVAILABLE),
    "headrace.local.errors.AlreadyRunning": Rule(Exit.REFUSED),
    "headrace.local.errors.StateNotKept": Rule(Exit.REFUSED),
    "headrace.local.errors.Interrupted": Rule(Exit.INTERRUPTED),
    "builtins.FileNotFoundError": Rule(Exit.NOT_FOUND, "", "There is no {path}."),
    "builtins.FileExistsError": Rule(
        Exit.REFUSED, "Choose another name, or move it away.", "{path} is already there."
    ),
    "builtins.BlockingIOError": Rule(Exit.REFUSED, "", "{path} is in use by another process."),
    "builtins.IsADirectoryError": Rule(Exit.USAGE, "Name a file.", "{path} is a directory."),
    "builtins.NotADirectoryError": Rule(
        Exit.USAGE, "Choose another.", "{path} lies below a file, not a directory."
    ),
    "builtins.PermissionError": Rule(Exit.REFUSED, "", "No permission for {path}."),
}


def translate(error: BaseException) -> Failure | None:
    """What to tell the user of ``error``; None when it is a defect, or not for us."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return Failure(
            Exit.REFUSED, "The disk is full: the output is not whole.", "Make room, and run it again."
        )
    if isinstance(error, OSError) and error.errno == errno.EROFS and error.filename:
        return Failure(
            Exit.REFUSED,
            f"{error.filename} lies on a file system that can only be read.",
            "Choose another place.",
        )
    if refused := _refused_property(error):
        return refused
    for name in _names(type(error)):
        rule = RULES.get(name)
        if rule and not (rule.exact and name != next(_names(type(error)))):
            path = getattr(error, "filename", None)
            # An error of ours below Python's own class is a sentence already.
            sentence = "{error}" if "{path}" in rule.sentence and path is None else rule.sentence
            said = _text(error)
            if rule.remedy == _DATABASE:  # libpq says the same in a line for each address that it has tried
                said = said.partition("\n")[0]
            text = sentence.format(error=said, path=path)
            return Failure(rule.exit_code, text, getattr(error, "remedy", "") or _remedy(rule, text))
    return None


def _refused_property(error: BaseException) -> Failure | None:
    """What librdkafka does not take as it is set: a mistake in the environment, wherever the broker is."""
    cause: Any = error.args[0] if error.args else None
    if (
        type(error).__name__ != "KafkaException"
        or not hasattr(cause, "name")
        or cause.name() != "_INVALID_ARG"
    ):
        return None
    text = _text(error)
    named = re.findall(r'property:? "([\w.]+)"', text) or re.findall(_PROPERTY, text)
    remedy = f"Check {' and '.join(map(_kafka_variable, named or ['<name>']))}."
    if "SASL mechanism" in text:  # one that is none, or none: then librdkafka takes one that is not built in
        setting = _kafka_variable("sasl.mechanism")
        remedy = f"Set {setting}, e.g. to SCRAM-SHA-512 or PLAIN; left out, it is GSSAPI."
    return Failure(Exit.USAGE, f"Kafka's client cannot be set up so: {text}.", remedy)


def _kafka_variable(name: str) -> str:
    """The environment variable that sets a property of librdkafka's."""
    from headrace.settings import kafka_variable, variable

    return variable("kafka_bootstrap_servers") if name == "bootstrap.servers" else kafka_variable(name)


def _remedy(rule: Rule, text: str) -> str:
    locked_out = _LOCKED_OUT.items() if rule.remedy == _DATABASE else ()
    return next((remedy for sign, remedy in locked_out if sign in text), rule.remedy)


def defect(error: BaseException) -> Failure:
    """An error that nothing is known of, for a program that reads JSON."""
    remedy = "Please report it; without --json the traceback is shown."
    return Failure(Exit.BUG, f"A defect in Headrace: {type(error).__name__}: {_text(error)}", remedy)


def _names(kind: type[BaseException]) -> Iterator[str]:
    for ancestor in kind.__mro__:
        yield f"{ancestor.__module__}.{ancestor.__qualname__}"


def _text(error: BaseException) -> str:
    """What an error says; of a KafkaError without its repr."""
    cause = error.args[0] if error.args else ""
    return (cause.str() if hasattr(cause, "str") else str(error)).strip()
