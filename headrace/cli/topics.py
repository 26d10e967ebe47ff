"""`headrace topics`: the topics that an installation needs."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import context
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.output import Json, count, emit, note, table

if TYPE_CHECKING:
    from headrace.settings import Settings

PANEL = "Set up"
CREATE_S = 30.0  # a busy broker takes its time to place many partitions
NEW_TOPIC_S = 1.0  # a topic just made is not known to every broker at once

group = typer.Typer(no_args_is_help=True, help="Create and describe the Kafka topics.")


def register(app: typer.Typer) -> None:
    """Add this module's group."""
    app.add_typer(group, name="topics", rich_help_panel=PANEL)


@group.command()
def create(
    partitions: Annotated[
        int,
        typer.Option(
            min=1, help="Partitions of each topic of jobs: at least as many as there will be workers."
        ),
    ] = 8,
    replication: Annotated[
        int, typer.Option(min=-1, help="Copies of each partition; -1 takes the broker's default.")
    ] = -1,
    json: Json = False,
) -> None:
    """Create the topics that are missing. Topics that exist stay as they are."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import NewTopic

    settings = context.load_settings()
    names = context.topics(settings)
    wanted = [NewTopic(name, partitions, replication, config=names.config(name)) for name in names.all]
    created = []
    admin = context.admin(settings)  # lives until the last answer is in
    for name, future in admin.create_topics(
        wanted, request_timeout=CREATE_S, operation_timeout=CREATE_S
    ).items():
        try:
            future.result()
            created.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
    # Returns once every partition has a leader, and so can be written to.
    describe_topics(settings, missing_s=CREATE_S, leaderless_s=CREATE_S)
    if json:
        emit({"created": created, "topics": list(names.all)})
    else:
        note(f"{count(len(created), 'topic')} created; there already: {len(names.all) - len(created)}.")


@group.command()
def describe(json: Json = False) -> None:
    """Show the topics, their partitions and how much lies in each."""
    settings = context.load_settings()
    found = describe_topics(settings)
    if json:
        emit(found)
    else:
        rows = [(t["topic"], t["partitions"], t["replication"], t["records"]) for t in found]
        table(("topic", "partitions", "replication", "records"), rows)
    missing = [t["topic"] for t in found if t["partitions"] is None]
    if missing:
        raise Failure(Exit.NOT_READY, f"Missing: {', '.join(missing)}.", "Run `headrace topics create`.")


def describe_topics(
    settings: "Settings", missing_s: float = NEW_TOPIC_S, leaderless_s: float = context.BROKER_PATIENCE_S
) -> list[dict[str, Any]]:
    """What the broker says of each topic of ours; ``partitions`` is None for one that is still missing after ``missing_s``.

    Raises KafkaException for one that still has a partition without a leader after ``leaderless_s``.
    """
    admin = context.admin(settings)
    names = context.topics(settings).all
    there = _partitions(admin, names, missing_s)
    found = []
    for name in names:
        partitions = there.get(name)
        found.append(
            {
                "topic": name,
                "partitions": len(partitions) if partitions else None,
                "replication": len(partitions[0].replicas) if partitions else None,
                "records": _records(admin, name, list(partitions), leaderless_s) if partitions else None,
            }
        )
    return found


def _partitions(admin: Any, names: Sequence[str], patience: float) -> dict[str, Any]:
    """The partitions of each topic that the broker knows, once it knows all of them or ``patience`` is over."""
    deadline = time.monotonic() + patience
    while True:
        there = admin.list_topics(timeout=context.BROKER_PATIENCE_S).topics
        known = [name for name in names if name in there and there[name].error is None]
        found = {name: there[name].partitions for name in known if there[name].partitions}
        if len(found) == len(names) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def largest_records(settings: "Settings") -> dict[str, int]:
    """``max.message.bytes`` of each topic of ours, as far as the broker tells it."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import ConfigResource

    admin = context.admin(settings)
    asked = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in context.topics(settings).all]
    found = {}
    for resource, future in admin.describe_configs(asked, request_timeout=context.BROKER_PATIENCE_S).items():
        try:
            entry = future.result().get("max.message.bytes")
        except KafkaException:  # it is missing, or this login may not ask
            continue
        if entry is not None and entry.value is not None:
            found[resource.name] = int(entry.value)
    return found


def _records(admin: Any, topic: str, partitions: list[int], patience: float) -> int:
    """Records between the first and the last offset of each partition; gaps are counted as well."""
    from confluent_kafka.admin import OffsetSpec

    last, first = (
        _offsets(admin, topic, partitions, spec, patience)
        for spec in (OffsetSpec.latest(), OffsetSpec.earliest())
    )
    return sum(last) - sum(first)


def _offsets(admin: Any, topic: str, partitions: list[int], spec: Any, patience: float) -> list[int]:
    """One offset of each partition. A partition that was made a moment ago has no leader yet: try again."""
    from confluent_kafka import KafkaError, KafkaException, TopicPartition

    soon = (
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.OFFSET_NOT_AVAILABLE,  # a leader of several copies that has not heard from the others yet
        KafkaError._NOENT,  # librdkafka asked a broker that has not heard of the topic
    )
    deadline = time.monotonic() + patience
    while True:
        futures = admin.list_offsets(
            {TopicPartition(topic, number): spec for number in partitions},
            request_timeout=context.BROKER_PATIENCE_S,
        )
        try:
            return [future.result().offset for future in futures.values()]
        except KafkaException as error:
            if error.args[0].code() not in soon or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
