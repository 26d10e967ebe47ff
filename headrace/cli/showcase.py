"""What the demo shows at its end: prompts with their answers, and the job table as an analyst reads it."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.output import console, table

if TYPE_CHECKING:
    from headrace.ledger import Ledger
    from headrace.schemas import JobResult

# One of each kind: by the part of the custom id before its number.
SHOWN_KINDS = ("complete", "explain", "summary", "translate", "handbook", "openai", "bad")
CUT = 240

BATCH_SQL = """SELECT state, expected, succeeded, failed, cached_tokens, completion_tokens
FROM batch_progress WHERE batch_id = %s"""
JOBS_SQL = """SELECT custom_id, state, cached_tokens AS cached, completion_tokens AS completion, error
FROM job_status WHERE batch_id = %s ORDER BY error, custom_id LIMIT 8"""


def answers(ledger: "Ledger", tenant: str, batch_id: str, file: Path) -> None:
    """Print one prompt and answer of each kind."""
    from headrace.schemas import JobResult

    prompts = dict(_prompts(file))
    results = [JobResult.decode(row.body) for row in ledger.results(tenant, batch_id) if row.body]
    by_kind: dict[str, JobResult] = {}
    for result in sorted(results, key=lambda result: result.custom_id or ""):
        by_kind.setdefault((result.custom_id or "").rpartition("-")[0], result)
    for kind in SHOWN_KINDS:
        if kind in by_kind:
            _show(by_kind[kind], prompts.get(by_kind[kind].custom_id, ""))


def table_rows(url: str, batch_id: str) -> None:
    """Print the batch's line of `batch_progress` and some of `job_status`, with the queries."""
    import psycopg

    with psycopg.connect(url) as connection:
        for sql in (BATCH_SQL, JOBS_SQL):
            cursor = connection.execute(sql, (batch_id,))
            console().print(f"\n{sql.replace('%s', repr(batch_id))};", style="dim", markup=False)
            table((column.name for column in cursor.description or ()), cursor.fetchall())


def _show(result: "JobResult", prompt: str) -> None:
    out = console()
    out.print(f"\n{result.custom_id}: ", style="bold", end="")
    out.print(_cut(prompt), markup=False)
    if result.error is not None:
        out.print(f"  {result.state}: {result.error.message}", style="red", markup=False)
    else:
        out.print(f"  {_cut(_answer(result))}", style="green", markup=False)


def _answer(result: "JobResult") -> str:
    """What the job asked for, as a line of text: its first answer, or what it looked at its prompt for."""
    if result.scores is not None:
        return "scores " + ", ".join(f"{score.logprob:.2f}" for score in result.scores)
    if result.embedding is not None:
        return f"embedding {result.embedding}"
    return result.choices[0].text if result.choices else "kept apart, being too large for a message"


def _prompts(file: Path) -> Iterator[tuple[str | None, str]]:
    """Of each line its custom id, and the prompt or the last message's text."""
    import orjson

    for line in file.read_bytes().splitlines():
        with suppress(orjson.JSONDecodeError, AttributeError, LookupError, TypeError):  # a bad line has none
            job = orjson.loads(line)
            body = job.get("body", job)
            yield (
                job.get("custom_id"),
                str(body["messages"][-1]["content"] if "messages" in body else body["prompt"]),
            )


def _cut(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= CUT else f"{flat[:CUT]}..."
