"""From settings to the things that commands work with: addresses, topics, ledger, client."""

from typing import TYPE_CHECKING, Any

from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.output import note

BROKER_PATIENCE_S = 8.0

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.client import Client
    from headrace.client.announced import Announced
    from headrace.ledger import Ledger
    from headrace.local.state import Addresses
    from headrace.schemas import Topics
    from headrace.settings import Settings
    from headrace.store import Store


def load_settings(**options: Any) -> "Settings":
    """The environment's settings, with those ``options`` of the command line that are not None in their place."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from headrace.settings import Settings, TierSettings, variable

    try:
        return Settings(**{name: value for name, value in options.items() if value is not None})
    except SettingsError as error:  # no JSON where JSON must be
        setting = next((name for name in Settings.model_fields if f'"{name}"' in str(error)), "")
        named = variable(setting) if setting else "A variable"
        raise Failure(
            Exit.USAGE, f"{named} is not usable: it must be a JSON object.", "See docs/operations.md."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        why = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # of several settings together
            raise Failure(Exit.USAGE, f"{why}.") from None
        field, *below = first["loc"]
        name = variable(str(field), *below) if field in Settings.model_fields else str(field)
        if first["type"] == "extra_forbidden":  # only a tier has something below it that is named
            knobs = ", ".join(knob.upper() for knob in TierSettings.model_fields)
            raise Failure(Exit.USAGE, f"{name} is no knob of a tier.", f"There are {knobs}.") from None
        raise Failure(Exit.USAGE, f"{name} is not usable: {why}.", f"It is {first['input']!r} now.") from None


def misspelt(settings: "Settings") -> list[str]:
    """A sentence on each variable that is named like a setting and is none."""
    return [
        f"{name} is no setting and changes nothing{f': {meant} is one' if meant else ''}."
        for name, meant in settings.unknown_variables().items()
    ]


def bootstrap_servers(settings: "Settings") -> str:
    """The broker's address: the environment's, else that of a local stack that runs. Raises Failure."""
    local = _running_stack(settings)
    address = settings.kafka_bootstrap_servers or (local and local.kafka_bootstrap_servers)
    if not address:
        raise Failure(
            Exit.NOT_READY,
            "No Kafka broker is named, and no local stack runs.",
            "Set KAFKA_BOOTSTRAP_SERVERS=host:port, or start a stack with `headrace local up`."
            + _left_behind(settings),
        )
    return address


def database_url(settings: "Settings") -> str:
    """The database's address: the environment's, else that of a local stack that runs.

    Raises Failure, and NotPostgres for what is no address of Postgres.
    """
    from headrace.ledger.database import parse_url

    local = _running_stack(settings)
    address = settings.database_url or (local and local.database_url)
    if not address:
        raise Failure(
            Exit.NOT_READY,
            "No database is named, and no local stack runs.",
            "Set DATABASE_URL=postgresql://user:password@host/database, or start a stack with `headrace local up`."
            + _left_behind(settings),
        )
    parse_url(address)  # before a driver that cannot read it quotes it, password and all
    return address


def open_ledger(settings: "Settings") -> "Ledger":
    """The job table, for one command's questions: it gives up soon, since somebody waits for the answer."""
    from headrace.ledger import Ledger

    return Ledger(database_url(settings), pool_size=1, retry_for=3.0)


def open_client(settings: "Settings") -> "Client":
    """A producer's side, for one command."""
    from headrace.client import Client

    return Client(bootstrap_servers(settings), topics(settings), tenant=settings.tenant, kafka=settings.kafka)


def result_store(settings: "Settings") -> "Store | None":
    """Where results too large for a message are kept, if anywhere."""
    from headrace.store import open_store

    return None if settings.result_store is None else open_store(settings.result_store)


def group_member(settings: "Settings") -> dict[str, str]:
    """librdkafka's properties for a process that joins groups: what is set, above what a local stack's own broker needs."""
    return {**_own_broker_s_properties(settings), **settings.kafka}


def _own_broker_s_properties(settings: "Settings") -> dict[str, str]:
    """What the broker of a running stack needs, where that is the broker meant and the stack's own; else nothing."""
    local = _running_stack(settings)
    there = local is not None and bootstrap_servers(settings) == local.kafka_bootstrap_servers
    return local.kafka if local and there else {}


def must_know_the_group_protocol(settings: "Settings") -> None:
    """Raise Failure where a worker's groups were the embedded broker's, which has no KIP-848: it would wait there, unheard."""
    # Where no stack runs and no broker is named, that of a stack to come is meant, or none.
    to_come = not (_running_stack(settings) or settings.kafka_bootstrap_servers)
    embedded = to_come or bool(_own_broker_s_properties(settings))
    if embedded and settings.group_protocol == "consumer":
        raise Failure(
            Exit.USAGE,
            "The embedded broker of `headrace local` does not know HEADRACE_GROUP_PROTOCOL=consumer.",
            "Unset it, or set KAFKA_BOOTSTRAP_SERVERS to a Kafka 4.0 or newer.",
        )


def kafka_client(settings: "Settings") -> dict[str, Any]:
    """librdkafka's properties for a client of one command."""
    return {"bootstrap.servers": bootstrap_servers(settings), **settings.kafka}


def announced(settings: "Settings", batch_id: str) -> "Announced":
    """What is said of the batch in messages that the recorder has not confirmed. Raises BrokerUnreachable.

    Following needs no Kafka: where none is named nothing is said, and where it has no such topic the same, with a word.
    """
    from headrace.client import TopicMissing
    from headrace.client.announced import Announced, not_recorded

    try:
        kafka = kafka_client(settings)
    except Failure:
        return Announced(settings.tenant, batch_id)
    try:
        return not_recorded(kafka, topics(settings), settings.tenant, batch_id)
    except TopicMissing as error:
        note(f"Whether batch {batch_id} was sent more that the recorder has not read is not known: {error}.")
        return Announced(settings.tenant, batch_id)


def admin(settings: "Settings", patience_s: float | None = None) -> Any:
    """An AdminClient of confluent-kafka that the broker has answered. Raises BrokerUnreachable, with the reason."""
    from confluent_kafka.admin import AdminClient

    from headrace.client.heard import Heard

    heard = Heard()
    client = AdminClient({"logger": heard, **kafka_client(settings)})
    with heard.explaining(client):
        client.list_topics(timeout=patience_s or BROKER_PATIENCE_S)
    return client


def topics(settings: "Settings") -> "Topics":
    """The names of this installation's topics."""
    from headrace.schemas.topics import Topics

    try:
        return Topics(settings.topic_prefix, settings.pool, settings.tiers)
    except ValueError as error:
        raise Failure(
            Exit.USAGE, f"{error}.", "See HEADRACE_TOPIC_PREFIX, HEADRACE_POOL and HEADRACE_TIERS."
        ) from None


def _left_behind(settings: "Settings") -> str:
    """What to do about a stack that was killed, where one was."""
    return " `headrace local down` clears what a killed one left here." if _record(settings).exists() else ""


def _record(settings: "Settings") -> "Path":
    return settings.state_dir / "stack.json"


def _running_stack(settings: "Settings") -> "Addresses | None":
    if not _record(settings).exists():
        return None  # the usual case in production, where the embedded extra is not installed either
    from headrace.local.state import StateDir

    return StateDir(settings.state_dir).running()
