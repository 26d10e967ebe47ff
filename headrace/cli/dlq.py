"""`headrace dlq`: dead letters, looked at, sent back or put away."""

import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import context
from headrace.cli.errors import Failure
from headrace.cli.exits import Exit
from headrace.cli.left_out import LeftOut
from headrace.cli.output import Json, count, emit, fields, note, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import Message

    from headrace.client.dead_letters import DeadLetter
    from headrace.client.readback import Place
    from headrace.client.repeater import Repeater
    from headrace.ledger import JobRow, Ledger, Letter, RejectionRow
    from headrace.schemas import Source
    from headrace.settings import Settings

PANEL = "Prompts"
CHUNK = 1000  # dead letters sent back between two words to the job table

group = typer.Typer(no_args_is_help=True, help="Dead letters: list, show, replay, drop.")

Letters = Annotated[
    list[str] | None, typer.Argument(metavar="[LETTER]...", help="As `headrace dlq list` names them.")
]
Batch = Annotated[
    str | None, typer.Option(help="Those of this batch, of whatever tenant.", show_default=False)
]
Code = Annotated[str | None, typer.Option(help="Those with this error code.", show_default=False)]
Every = Annotated[bool, typer.Option("--every", help="All that are open.")]


def register(app: typer.Typer) -> None:
    """Add this module's group."""
    app.add_typer(group, name="dlq", rich_help_panel=PANEL)


@dataclass
class Case:
    """One record that died, and its letters: mostly one, more where a worker was killed just after it wrote one."""

    letters: "list[DeadLetter]"
    settled: str | None = None

    @property
    def last(self) -> "DeadLetter":
        """The letter that stands for the case."""
        return self.letters[-1]


@dataclass(slots=True)
class SentBack:
    """What became of the cases that were to be sent back."""

    sent: int = 0
    passed_over: int = 0
    """Their jobs have been run again since."""
    left_out: LeftOut = field(default_factory=LeftOut)


@group.command("list")
def list_(
    batch: Batch = None,
    code: Code = None,
    settled: Annotated[bool, typer.Option("--all", help="Also those that were replayed or dropped.")] = False,
    json: Json = False,
) -> None:
    """List the dead letters that nobody has dealt with yet, oldest first."""
    settings = context.load_settings()
    with context.open_ledger(settings) as ledger:
        cases = [each for each in _cases(settings, ledger, batch, code) if settled or not each.settled]
    if json:
        emit([_as_json(case) for case in cases])
        return
    columns = ("letter", "written", "code", "from", "tenant", "batch", "custom id", "run", "settled")
    table(columns, map(_line, cases))


@group.command()
def show(
    letter: Annotated[str, typer.Argument(metavar="LETTER", help="As `headrace dlq list` names it.")],
    value: Annotated[bool, typer.Option("--value", help="Only the record's bytes, as they came.")] = False,
    json: Json = False,
) -> None:
    """Show one dead letter: why it is there, its headers, and the record as it came, prompt and all."""
    from headrace.schemas.kafka_headers import headers_of

    settings = context.load_settings()
    (message,) = _read(settings, [_place(settings, letter)])
    body: bytes = message.value() or b""
    if value:
        sys.stdout.buffer.write(body)
        return
    headers = {name: (given or b"").decode("utf-8", "replace") for name, given in headers_of(message)}
    shown: dict[str, Any] = {"letter": letter, **headers, "bytes": len(body)}
    if json:
        emit({**shown, "value": body.decode("utf-8", "replace")})
    else:
        fields({**shown, "value": body.decode("utf-8", "backslashreplace")})


@group.command()
def replay(
    letters: Letters = None,
    batch: Batch = None,
    code: Code = None,
    every: Every = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also those named that were replayed or dropped already.")
    ] = False,
    json: Json = False,
) -> None:
    """Send dead letters back to the topic they came from, as the next run of their jobs.

    The bytes are those that came. Jobs that have been run again since are left alone. Deadlines and cancels still hold: the
    letter of a job that is cancelled, or whose deadline or its batch's has passed, stays as it is, since the job could only end
    as cancelled or expired. The others are sent, and the command says so and ends with 3.
    """
    settings = context.load_settings()
    with context.open_ledger(settings) as ledger:
        chosen, settled = _choose(settings, ledger, letters, batch, code, every, again)
        done = _send_back(settings, ledger, chosen)
    if json:
        emit(
            {
                "replayed": done.sent,
                "passed_over": done.passed_over,
                "settled": settled,
                **asdict(done.left_out),
            }
        )
    else:
        for name, how in settled.items():
            note(f"{name} was {how} already; --again sends it back all the same.")
        passed = f", {done.passed_over} passed over, run again since" if done.passed_over else ""
        note(f"{count(done.sent, 'dead letter')} sent back{passed}.")
    if reasons := done.left_out.reasons():
        raise Failure(
            Exit.NOT_FOUND,
            " ".join(reasons),
            "Drop those, or submit them again, as new jobs of another batch: `headrace dlq show --value` gives what was sent.",
        )


@group.command()
def drop(
    letters: Letters = None, batch: Batch = None, code: Code = None, every: Every = False, json: Json = False
) -> None:
    """Mark dead letters as dealt with: they are listed no more. The records stay on their topic until it forgets them."""
    settings = context.load_settings()
    with context.open_ledger(settings) as ledger:
        chosen, settled = _choose(settings, ledger, letters, batch, code, every)
        ledger.settle(_marks(chosen), "dropped")
    if json:
        emit({"dropped": len(chosen), "settled": settled})
        return
    for name, how in settled.items():
        note(f"{name} was {how} already.")
    note(f"{count(len(chosen), 'dead letter')} dropped.")


def _cases(settings: "Settings", ledger: "Ledger", batch: str | None, code: str | None) -> list[Case]:
    """All dead letters that fit, by the record that died, oldest first. Raises Failure where there is no such batch or code."""
    from headrace.client.dead_letters import dead_letters

    topic = context.topics(settings).dead
    settled = ledger.settled(topic)
    cases: dict[object, Case] = {}
    named, has_code = False, code is None
    for letter in dead_letters(context.kafka_client(settings), topic):
        has_code = has_code or code == letter.code
        if batch not in (None, letter.batch_id):
            continue
        named = True
        if code in (None, letter.code):
            case = cases.setdefault(letter.source or letter, Case([]))
            case.letters.append(letter)
            case.settled = case.settled or settled.get(_mark(letter))
    if not has_code:  # a letter of a newer worker, or of nobody's, may have one that is not known here
        _must_be_code(code)
    if batch is not None and not named and not ledger.has_batch(batch):
        raise Failure(
            Exit.NOT_FOUND,
            f"Nothing is known of a batch {batch!r}, of whatever tenant.",
            "`headrace dlq list` names the batches of its letters.",
        )
    return sorted(cases.values(), key=lambda case: case.last.written_at)


def _must_be_code(code: str | None) -> None:
    """Raise Failure where no dead letter is ever written with this code."""
    from headrace.schemas.errors import ErrorCode, Outcome
    from headrace.worker.results import FOR_PEOPLE

    codes = [each for each in ErrorCode if each.outcome is Outcome.REJECTED or each in FOR_PEOPLE]
    if code not in codes:
        raise Failure(
            Exit.USAGE, f"No dead letter has the code {code!r}.", f"Codes of theirs are {', '.join(codes)}."
        )


def _choose(
    settings: "Settings",
    ledger: "Ledger",
    names: list[str] | None,
    batch: str | None,
    code: str | None,
    every: bool,
    again: bool = False,
) -> tuple[list[Case], dict[str, str]]:
    """The cases that the command line means; and how those of the ``names`` were dealt with that are not among them."""
    if not (names or batch or code or every):
        raise Failure(Exit.USAGE, "No dead letter is named.", "Name some, or say --batch, --code or --every.")
    if names and every:
        raise Failure(
            Exit.USAGE, "Letters are named, and --every is all that are open.", "Leave one of the two out."
        )
    if again and not names:
        raise Failure(
            Exit.USAGE,
            "--again is for letters that are named: all others that are chosen are open.",
            "Leave it out, or name some: `headrace dlq list --all` shows those that were replayed or dropped too.",
        )
    cases = _cases(settings, ledger, batch, code)
    if not names:
        return [case for case in cases if not case.settled], {}
    by_name = {letter.name: case for case in cases for letter in case.letters}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise Failure(
            Exit.NOT_FOUND, f"There is no dead letter {', '.join(missing)}.", "See `headrace dlq list`."
        )
    settled = {name: how for name in names if (how := by_name[name].settled) and not again}
    chosen = {id(by_name[name]): by_name[name] for name in names if name not in settled}
    return list(chosen.values()), settled


def _send_back(settings: "Settings", ledger: "Ledger", cases: list[Case]) -> SentBack:
    """Send the records back whose jobs a worker would run, and mark their letters."""
    from headrace.client.repeater import Repeater

    foreign = [case.last.name for case in cases if case.last.source is None]
    if foreign:
        raise Failure(
            Exit.REFUSED,
            f"No worker wrote {', '.join(foreign)}: nothing says where it came from.",
            "Drop it, or send its bytes yourself (`headrace dlq show --value`).",
        )
    done = SentBack()
    with Repeater(context.kafka_client(settings)) as repeater:
        for start in range(0, len(cases), CHUNK):
            _send_chunk_back(settings, ledger, repeater, cases[start : start + CHUNK], done)
    return done


def _send_chunk_back(
    settings: "Settings", ledger: "Ledger", repeater: "Repeater", cases: list[Case], done: SentBack
) -> None:
    from headrace.client.readback import place_of

    by_place = {case.last.place: case for case in cases}
    asked = []
    for message in _read(settings, by_place):
        case = by_place[place_of(message)]
        assert case.last.source is not None
        source = case.last.source._replace(run=case.last.source.run + 1)
        asked.append((case, message, source, _row(message, source)))
    bound_for = ledger.bound_for([row for *_, row in asked])
    sent, settled = [], []
    for case, message, source, row in asked:
        if _has_run_again(ledger, row, case.last):
            done.passed_over += 1
            settled.append(case)
        elif row in bound_for:
            done.left_out.add(case.last.name, bound_for[row])
        else:
            repeater.send(message, source)
            sent.append(row)
            settled.append(case)
    repeater.flush()
    ledger.reopen(sent)
    ledger.settle(_marks(settled), "replayed")
    done.sent += len(sent)


def _row(message: "Message", source: "Source") -> "JobRow | RejectionRow":
    """What the job table calls this record: a job, or a rejection at its place."""
    from headrace.ledger import JobRow, RejectionRow
    from headrace.schemas import Unparsable, parse_envelope
    from headrace.schemas.kafka_headers import headers_of

    try:
        envelope = parse_envelope(message.value(), headers_of(message), source)
    except Unparsable as error:
        return RejectionRow(
            source.topic, source.partition, source.offset, error.tenant, error.code, run=source.run
        )
    return JobRow.of(envelope, source, tier=source.topic.rpartition(".")[2], pool="")


def _has_run_again(ledger: "Ledger", row: "JobRow | RejectionRow", letter: "DeadLetter") -> bool:
    """Whether the job died in a run that is not its latest. A rejected record has no job, or another's."""
    from headrace.ledger import JobRow
    from headrace.worker.results import FOR_PEOPLE

    if not isinstance(row, JobRow) or letter.code not in FOR_PEOPLE:
        return False
    status = ledger.job(row.id)
    return status is not None and status.run >= row.run


def _read(settings: "Settings", places: "Iterable[Place]") -> "list[Message]":
    """The records at these places. Raises Failure if the topic has one no more."""
    from headrace.client.readback import place_of, read_back

    wanted = list(places)
    found = list(read_back(context.kafka_client(settings), wanted))
    if len(found) < len(wanted):
        gone = set(wanted) - set(map(place_of, found))
        missing = ", ".join(f"{partition}:{offset}" for _, partition, offset in sorted(gone))
        raise Failure(Exit.NOT_FOUND, f"There is no dead letter {missing}.", "See `headrace dlq list`.")
    return found


def _place(settings: "Settings", name: str) -> "Place":
    partition, colon, offset = name.partition(":")
    if not colon or not partition.isdecimal() or not offset.isdecimal():
        raise Failure(Exit.USAGE, f"{name!r} names no dead letter.", "Write partition:offset, such as 0:17.")
    return context.topics(settings).dead, int(partition), int(offset)


def _marks(cases: "Iterable[Case]") -> "list[Letter]":
    return [_mark(letter) for case in cases for letter in case.letters]


def _mark(letter: "DeadLetter") -> "Letter":
    from headrace.ledger import Letter

    return Letter(letter.topic, letter.partition, letter.offset, letter.written_at)


def _line(case: Case) -> tuple[object, ...]:
    letter, source = case.last, case.last.source
    place = None if source is None else f"{source.topic}[{source.partition}]@{source.offset}"
    run = None if source is None else source.run
    when = f"{letter.written_at:%Y-%m-%d %H:%M:%S}"
    return (
        letter.name,
        when,
        letter.code,
        place,
        letter.tenant,
        letter.batch_id,
        letter.custom_id,
        run,
        case.settled,
    )


def _as_json(case: Case) -> dict[str, Any]:
    letter, source = case.last, case.last.source
    return {
        "letter": letter.name,
        "written_at": letter.written_at,
        "code": letter.code,
        "message": letter.message,
        "source": source and {"topic": source.topic, "partition": source.partition, "offset": source.offset},
        "run": source and source.run,
        "tenant": letter.tenant,
        "batch_id": letter.batch_id,
        "custom_id": letter.custom_id,
        "bytes": letter.size,
        "settled": case.settled,
    }
