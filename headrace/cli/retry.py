"""`headrace retry`: jobs that have ended, run again from the records they came in."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import context
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.jobs import PANEL, Tenant
from headrace.cli.left_out import LeftOut, not_again
from headrace.cli.output import Json, count, emit, note
from headrace.cli.submission import about_batch

if TYPE_CHECKING:
    from confluent_kafka import Message

    from headrace.client.repeater import Repeater
    from headrace.ledger import JobRow, Ledger
    from headrace.schemas import JobState, Source
    from headrace.settings import Settings


@dataclass(slots=True)
class Asked:
    """What became of the jobs that were asked for: how many were sent again, and which were not."""

    sent: int = 0
    gone: "list[JobRow]" = field(default_factory=list)
    """The topic no longer has their record."""
    left_out: LeftOut = field(default_factory=LeftOut)

    def why_not(self) -> list[str]:
        """A sentence for each reason why some do not run again."""
        reasons = self.left_out.reasons()
        if self.gone:
            first = self.gone[0]
            place = f"{first.src_topic}[{first.src_partition}] at {first.src_offset}"
            why = "the topic no longer has what was sent"
            reasons.append(not_again(len(self.gone), why, f"{first.id}, {place}"))
        return reasons


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command(rich_help_panel=PANEL)(retry)


def retry(
    batch: Annotated[str, typer.Argument(metavar="BATCH", help="A batch.")],
    failed_only: Annotated[
        bool,
        typer.Option("--failed-only/--all", help="Only jobs that failed, or all that have ended."),
    ] = True,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Run jobs of a batch again, each as the next run of the same job.

    Their prompts are read back from Kafka. Deadlines and cancels still hold: a batch that was cancelled is refused, and a job
    that was cancelled, or whose deadline or its batch's has passed, stays as it ended, since it could only end as cancelled or
    expired. So does a job whose record the topic no longer has. The others run, and the command says so and ends with 3.
    """
    from headrace.schemas import JobState

    settings = context.load_settings(tenant=tenant)
    states = [JobState.FAILED] if failed_only else [state for state in JobState if state.terminal]
    with context.open_ledger(settings) as ledger:
        if ledger.batch(settings.tenant, batch) is None:
            raise Failure(
                Exit.NOT_FOUND, f"Nothing is known of a batch {batch!r} of tenant {settings.tenant!r}."
            )
        if ledger.is_cancelled(settings.tenant, batch):
            raise Failure(
                Exit.REFUSED,
                f"Batch {batch} is cancelled; nothing of it would run, and what has ended would end as cancelled.",
                "Submit its file again, as another batch.",
            )
        asked = _run_again(settings, ledger, batch, states)
    if json:
        emit(
            {
                "batch_id": batch,
                "sent_again": asked.sent,
                "gone": [str(row.id) for row in asked.gone],
                **asdict(asked.left_out),
            }
        )
    else:
        note(f"{count(asked.sent, 'job')} of batch {batch} run again.")
        if asked.sent and not failed_only:
            former = about_batch(settings, "results", batch, "--run", "1")
            note(f"Their former results: {former} (or the run that they had).")
    if reasons := asked.why_not():
        raise Failure(Exit.NOT_FOUND, " ".join(reasons), "Submit those again, as new jobs of another batch.")


def _run_again(settings: "Settings", ledger: "Ledger", batch: str, states: list["JobState"]) -> Asked:
    """Send the jobs again that a worker would run, and open their next run."""
    from headrace.client.repeater import Repeater

    asked = Asked()
    with Repeater(context.kafka_client(settings)) as repeater:
        for page in ledger.ended(settings.tenant, batch, states):
            for each in page:
                if each.bound_for is not None:
                    asked.left_out.add(str(each.job.id), each.bound_for)
            rows = [each.job for each in page if each.bound_for is None]
            found = _send_again(settings, repeater, rows)
            # After Kafka has them: a job opened for a record that never came would wait for ever. Recorder and workers
            # do the same when they meet the record, so this only makes the next `headrace status` true at once.
            repeater.flush()
            ledger.reopen(found)
            asked.sent += len(found)
            there = {row.id for row in found}
            asked.gone += [row for row in rows if row.id not in there]
    return asked


def _send_again(settings: "Settings", repeater: "Repeater", jobs: list["JobRow"]) -> list["JobRow"]:
    from dataclasses import replace

    from headrace.client.readback import place_of, read_back

    rows = {(row.src_topic, row.src_partition, row.src_offset): row for row in jobs}
    found = []
    for message in read_back(context.kafka_client(settings), rows):
        row = rows[place_of(message)]
        source = _source(message, row)
        if source is not None:
            repeater.send(message, source)
            found.append(replace(row, run=source.run))
    return found


def _source(message: "Message", row: "JobRow") -> "Source | None":
    """Where the job lay and the run it is to have; None if another record lies there now (a topic made again)."""
    from headrace.schemas import Source, Unparsable, parse_envelope
    from headrace.schemas.kafka_headers import headers_of

    source = Source(row.src_topic, row.src_partition, row.src_offset, message.timestamp()[1], run=row.run + 1)
    try:
        envelope = parse_envelope(message.value(), headers_of(message), source)
    except Unparsable:
        return None
    same = (envelope.id, envelope.content_sha) == (row.id, row.content_sha)
    return source if same else None
