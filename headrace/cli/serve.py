"""`headrace worker` and `headrace recorder`: the processes that stay."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import context, logs
from headrace.cli.engine import engine_config, open_engine, served_name
from headrace.cli.errors import translate
from headrace.cli.interpreter import collect_seldom, take_short_turns
from headrace.cli.kafka_clients import check_recorder_client, check_worker_clients
from headrace.cli.stopping import stop_on_signals
from headrace.cli.tiers import priorities, tiers

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from headrace.settings import Settings
    from headrace.worker import WorkerConfig
    from headrace.worker.health import Health, HealthServer

PANEL = "Serve"
ASK_AGAIN_S = 1.0

log = logging.getLogger(__name__)

Model = Annotated[
    str | None, typer.Option(help="Directory or hub id; default: HEADRACE_MODEL.", show_default=False)
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 or auto.", show_default=False)]
JsonLog = Annotated[bool, typer.Option("--json", help="Log JSON lines, also on a terminal.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (worker, recorder):
        app.command(rich_help_panel=PANEL)(command)


def worker(model: Model = None, device: Device = None, json: JsonLog = False) -> None:
    """Take jobs from Kafka, answer them, and write the results to Postgres and Kafka.

    Stops cleanly on SIGTERM or Ctrl-C: what runs may finish within HEADRACE_GRACE_SECONDS, offsets are committed, the
    rest is left to others.
    """
    settings = context.load_settings(model=model, device=device, log_format=_log_format(json))
    config = worker_config(settings)
    logs.configure(settings)
    _warn_of_misspelt(settings)
    context.must_know_the_group_protocol(settings)
    check_worker_clients(config)

    from headrace.ledger import Ledger
    from headrace.worker import Worker
    from headrace.worker.health import loading

    name = served_name(settings)
    with ExitStack() as stack:
        health = _health(settings, stack, lambda: loading(config.name, name))
        # May download a model, which a signal ends as usual.
        engine = replace(engine_config(settings), priorities=priorities(config.tiers))
        url = context.database_url(settings)
        collect_seldom()
        stop, ledger = stack.enter_context(stop_on_signals()), stack.enter_context(Ledger(url))
        if _migrated(url, stop):
            Worker(config, lambda: open_engine(engine, name), ledger, health).run(stop)


def recorder(json: JsonLog = False) -> None:
    """Enter jobs, batches and cancels into the job table as they arrive, and keep its partitions.

    Any number of recorders share the work; without one, status queries see a job only when a worker takes it.
    """
    settings = context.load_settings(log_format=_log_format(json))
    logs.configure(settings)
    _warn_of_misspelt(settings)

    kafka = context.group_member(settings)
    check_recorder_client(kafka)

    from headrace.ledger import Ledger
    from headrace.ledger.recorder import Recorder
    from headrace.ledger.watch import RecorderStatus

    url = context.database_url(settings)
    collect_seldom()
    take_short_turns()
    with stop_on_signals() as stop, Ledger(url) as ledger, ExitStack() as stack:
        recorder = Recorder(
            context.bootstrap_servers(settings),
            context.topics(settings),
            ledger,
            kafka=kafka,
            keep=timedelta(days=settings.keep_days),
        )
        # Live while it waits for Postgres, however long: to be started anew would help nobody.
        health = _health(settings, stack, RecorderStatus, recorder.metrics.registry)
        if _migrated(url, stop):
            if health is not None:
                health.tell(recorder.status, recorder.metrics.registry)
            recorder.run(stop)


def _health(
    settings: "Settings",
    stack: ExitStack,
    status: "Callable[[], Health]",
    registry: "CollectorRegistry | None" = None,
) -> "HealthServer | None":
    """A server of these, if there is to be one, open for as long as the stack is."""
    from headrace.worker.health import HealthServer

    if settings.health_port is None:
        return None
    server = HealthServer(settings.health_port, status, registry)
    stack.callback(server.close)
    return server


def _log_format(json: bool) -> str | None:
    return "json" if json else None


def _warn_of_misspelt(settings: "Settings") -> None:
    for sentence in context.misspelt(settings):
        log.warning("%s", sentence)


def _migrated(url: str, stop: Event) -> bool:
    """Wait for Postgres to say that the tables are those of this version; False if told to stop before that.

    Before anything is taken: on older tables some of the work would fail, and some be counted wrongly in silence. Raises
    NotMigrated.
    """
    from headrace.ledger import LedgerUnavailable, require_migrated
    from headrace.ledger.outage import Outage

    outage = Outage(log)
    while not stop.is_set():
        try:
            require_migrated(url)
        except LedgerUnavailable as error:
            if failure := translate(error):
                outage.lasts(
                    "Postgres", "waiting for Postgres", f"{failure.message.rstrip('.')}. {failure.remedy}"
                )
            stop.wait(ASK_AGAIN_S)
        else:
            outage.over()
            return True
    return False


def worker_config(settings: "Settings") -> "WorkerConfig":
    """A worker's plain values."""
    from headrace.worker import WorkerConfig
    from headrace.worker.brake import DeadLetterLimit

    return WorkerConfig(
        bootstrap=context.bootstrap_servers(settings),
        topics=context.topics(settings),
        tiers=tiers(settings),
        kafka=context.group_member(settings),
        group_protocol=settings.group_protocol,
        model_names=settings.model_names,
        max_in_flight=settings.max_in_flight,
        max_result_bytes=settings.max_result_bytes,
        result_store=settings.result_store,
        grace_s=settings.grace_seconds,
        alive_s=settings.alive_seconds,
        dead_letters=DeadLetterLimit(most=settings.dead_letter_limit),
    )
