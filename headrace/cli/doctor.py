"""`headrace doctor`: what a working installation needs, checked, each with its remedy."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from headrace.cli import context
from headrace.cli.errors import TELLS_MORE, translate
from headrace.cli.exits import Exit
from headrace.cli.output import Json, console, count, emit
from headrace.cli.paused import paused
from headrace.cli.topics import describe_topics, largest_records
from headrace.cli.worker_settings import check_worker_settings

if TYPE_CHECKING:
    from pathlib import Path

    from psycopg import Connection

    from headrace.settings import Settings

PANEL = "Set up"
HEADER_BYTES = (
    16 * 1024
)  # of a result's or a dead letter's record: names, a trace, why it is dead; and of its batch


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. ``ok`` None: nothing is wrong, and yet worth knowing."""

    check: str
    ok: bool | None
    detail: str
    remedy: str = ""


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command(rich_help_panel=PANEL)(doctor)


def doctor(json: Json = False) -> None:
    """Check settings, broker, topics, database, migrations, workers, model and GPU. Exit 5 when something is missing."""
    settings = context.load_settings()
    findings = _examine(settings)
    broken = any(finding.ok is False for finding in findings)
    if json:
        emit({"ok": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            _show(finding)
    if broken:
        raise typer.Exit(Exit.NOT_READY)


def _examine(settings: "Settings") -> list[Finding]:
    """What each check found. One that needs what is away is not tried: it would wait as long, and say the same."""
    findings: dict[str, Finding] = {}
    for name, check in CHECKS.items():
        needed = findings.get(NEEDS.get(name, ""))
        if needed is not None and needed.ok is False:
            findings[name] = Finding(name, None, f"not tried: it needs the {needed.check}")
        else:
            findings[name] = _run(name, check, settings)
    return list(findings.values())


def _run(name: str, check: Callable[["Settings"], Finding], settings: "Settings") -> Finding:
    try:
        return check(settings)
    except Exception as error:
        failure = translate(error)
        if failure is None:
            raise
        return Finding(name, False, failure.message, failure.remedy.replace(TELLS_MORE, ""))


def _settings(settings: "Settings") -> Finding:
    """Whether each is one, and whether a worker takes them."""
    from headrace.engine.errors import EngineError

    try:
        check_worker_settings(settings)
    except EngineError as error:
        return Finding("settings", False, str(error), "With this no worker starts.")
    if wrong := context.misspelt(settings):
        return Finding("settings", None, " ".join(wrong), "All settings are in docs/operations.md.")
    return Finding("settings", True, "each variable is one")


def _broker(settings: "Settings") -> Finding:
    address = context.bootstrap_servers(settings)
    patience = context.BROKER_PATIENCE_S / 2  # who asks what is wrong expects that something is
    brokers = len(context.admin(settings, patience).list_topics(timeout=patience).brokers)
    return Finding("broker", True, f"{count(brokers, 'broker')} behind {address}")


def _topics(settings: "Settings") -> Finding:
    missing = [topic["topic"] for topic in describe_topics(settings) if topic["partitions"] is None]
    if missing:
        return Finding("topics", False, f"missing: {', '.join(missing)}", "Run `headrace topics create`.")
    return Finding("topics", True, "all there")


def _sizes(settings: "Settings") -> Finding:
    """Whether the topics that Headrace writes to take what it writes: Kafka refuses the rest."""
    names, most = context.topics(settings), largest_records(settings)
    jobs = [most[topic] for tier in settings.tiers if (topic := names.jobs(tier)) in most]
    if names.results not in most or names.dead not in most or not jobs:
        return Finding("sizes", None, "the broker does not say how large a record of each topic may be")
    wanted = {names.results: settings.max_result_bytes + HEADER_BYTES, names.dead: max(jobs) + HEADER_BYTES}
    small = [topic for topic, size in wanted.items() if most[topic] < size]
    if not small:
        return Finding("sizes", True, "results and dead letters fit their topics")
    remedies = [f"Give {topic} a max.message.bytes of {wanted[topic]} or more." for topic in small]
    if names.results in small and (fits := most[names.results] - HEADER_BYTES) > 0:
        remedies.append(f"For results HEADRACE_MAX_RESULT_BYTES={fits} does as well, in every worker.")
    lacks = "; ".join(f"{topic} takes {most[topic]:,} bytes, of {wanted[topic]:,} at most" for topic in small)
    return Finding("sizes", False, lacks, " ".join(remedies))


def _connect(settings: "Settings") -> "Connection":
    import psycopg

    from headrace.ledger.database import parse_url

    return psycopg.connect(**{**parse_url(context.database_url(settings)), "connect_timeout": 5})


def _database(settings: "Settings") -> Finding:
    with _connect(settings) as connection:
        version = connection.info.server_version
        told = connection.info.backend_pid  # a pooler makes up what it tells of itself
        pooled = connection.execute("SELECT pg_backend_pid()").fetchone() != (told,)
    major, minor = divmod(version, 10_000)
    if major < 14:
        return Finding(
            "database", False, f"PostgreSQL {major}.{minor}", "Headrace needs PostgreSQL 14 or newer."
        )
    if pooled:
        text = f"PostgreSQL {major}.{minor}, behind a connection pooler"
        remedy = "Good for everything but `headrace migrate`, which needs Postgres's own address."
        return Finding("database", None, text, remedy)
    return Finding("database", True, f"PostgreSQL {major}.{minor}")


def _migrations(settings: "Settings") -> Finding:
    from headrace.ledger import check

    if problems := check(context.database_url(settings)):
        return Finding("migrations", False, " ".join(problems))
    return Finding("migrations", True, "up to date")


def _results(settings: "Settings") -> Finding:
    store = context.result_store(settings)
    if store is None:
        text = "one too large for a message fails its job"
        return Finding("results", None, text, "Set HEADRACE_RESULT_STORE where such answers are wanted.")
    store.check()
    return Finding("results", True, f"too large for a message go to {store.root}")


def _workers(settings: "Settings") -> Finding:
    with _connect(settings) as connection:
        if connection.execute("SELECT to_regclass('workers')").fetchone() == (None,):
            return Finding("workers", None, "unknown before `headrace migrate`")
        rows = connection.execute("SELECT model FROM workers WHERE alive_until > now()").fetchall()
    if not rows:
        return Finding("workers", None, "none is alive", "Start one with `headrace worker`.")
    alive = f"{len(rows)} alive, serving {', '.join(sorted({row[0] for row in rows}))}"
    if why := paused(settings):
        return Finding(
            "workers", None, f"{alive}; {why}", "`headrace dlq list` shows what died, where that is why."
        )
    return Finding("workers", True, alive)


def _model(settings: "Settings") -> Finding:
    from headrace.local import model

    if settings.model is None:
        place = model.cache_root() / model.NAME
        if place.is_dir():
            return Finding("model", True, f"{model.NAME} (the default) in {place}")
        remedy = "It is fetched when first needed; `headrace local model` does it now. Or set HEADRACE_MODEL."
        return Finding("model", None, f"{model.NAME} (the default) is not here yet", remedy)
    from headrace.engine.errors import EngineError
    from headrace.engine.hub import local

    try:
        if directory := local(settings.model):
            return Finding(
                "model", True, f"{_architecture(directory, settings.max_context)} in {settings.model}"
            )
    except EngineError as error:
        remedy = f"Set HEADRACE_MODEL to a whole directory, or to a hub id; left out, it is {model.NAME}."
        return Finding("model", False, str(error), remedy)
    return Finding("model", None, f"{settings.model} is looked up on the hub when a worker starts")


def _architecture(directory: "Path", max_context: int | None) -> str:
    """Of a model that a worker could load. Raises EngineError as it would; weights stay unread."""
    import torch

    from headrace.engine.tokenizer import Tokenizer
    from headrace.engine.weights import load_model

    # All names and shapes, into memory that is not there.
    model = load_model(directory, "meta", torch.bfloat16, max_context=max_context)
    Tokenizer.load(directory)
    return model.config.architecture


def _gpu(settings: "Settings") -> Finding:
    import torch

    from headrace.engine.build import find_device
    from headrace.engine.errors import EngineError

    try:
        find_device(settings.device)
    except EngineError as error:
        remedy = (
            "Set HEADRACE_DEVICE to cpu, cuda, cuda:N or auto; nvidia-smi tells whether the driver is well."
        )
        return Finding("gpu", False, str(error), remedy)
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding("gpu", True, f"{names}; torch {torch.__version__}")
    return Finding("gpu", None, "no CUDA device; a worker here runs on the CPU")


CHECKS: dict[str, Callable[["Settings"], Finding]] = {
    "settings": _settings,
    "broker": _broker,
    "topics": _topics,
    "sizes": _sizes,
    "database": _database,
    "migrations": _migrations,
    "results": _results,
    "workers": _workers,
    "model": _model,
    "gpu": _gpu,
}
NEEDS = {"topics": "broker", "sizes": "broker", "migrations": "database", "workers": "database"}
"""The check without which another is not tried."""


def _show(finding: Finding) -> None:
    out = console()
    mark = {True: "[green]ok[/green]  ", False: "[red]FAIL[/red]", None: "[yellow]note[/yellow]"}[finding.ok]
    out.print(f"{mark} {finding.check:<11}", end="")
    out.print(finding.detail, markup=False)
    if finding.remedy:
        out.print(f"{'':17}{finding.remedy}", markup=False)
