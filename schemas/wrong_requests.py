"""The table of wrong requests in docs/messages.md: the bad lines of examples/everything.jsonl, and what is said of each.

Most are refused by the contract, which is asked here; those that only a model can refuse (its vocabulary, its context,
its chat template) are told as examples/everything.expected.jsonl has them, which a test holds against an engine.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.schemas.errors import InvalidJob
from headrace.schemas.ids import Source
from headrace.schemas.job import parse_job

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MAX_SHOWN_CHARS = 60
MAX_SAID_CHARS = 200
_SOURCE = Source("file", 0, 0, timestamp_ms=-1)


def wrong_requests() -> Iterator[tuple[str, str, str, str]]:
    """Rows of the table: the field at fault, what was sent there, the code, and the message behind the field's name."""
    expected = map(json.loads, (EXAMPLES / "everything.expected.jsonl").read_text().splitlines())
    errors = {line["custom_id"]: line["error"] for line in expected if "error" in line}
    for line in (EXAMPLES / "everything.jsonl").read_bytes().splitlines():
        sent = json.loads(line)
        if sent["custom_id"] in errors:
            error = _refusal(line) or errors[sent["custom_id"]]
            said = error["message"].removeprefix(error["param"]).strip()
            said += (
                " ..." if said.endswith(":") else ""
            )  # what follows is another library's, and changes with it
            yield (
                f"`{error['param']}`",
                _shown(_at(sent, error["param"])),
                f"`{error['code']}`",
                _short(said, MAX_SAID_CHARS).replace("|", "\\|"),
            )


def _refusal(line: bytes) -> dict[str, str] | None:
    try:
        parse_job(line, None, _SOURCE)
    except InvalidJob as error:
        return {"code": str(error.code), "param": str(error.param), "message": error.message}
    return None


def _at(line: Any, path: str) -> Any:
    """What stands at the path in the line; None where nothing does."""
    for step in path.split("."):
        if isinstance(line, list) and step.isdigit() and int(step) < len(line):
            line = line[int(step)]
        elif isinstance(line, dict):
            line = line.get(step)
        else:
            return None
    return line


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    return f"`{_short(json.dumps(value), MAX_SHOWN_CHARS)}`".replace("|", "\\|")


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most].rstrip() + "..."
