"""Writes what the contract's documents say from the code: ``python -m headrace.schemas.documents [--check]``.

docs/schemas/*.json are JSON Schemas (2020-12) of the messages, docs/asyncapi.yaml describes topics and messages, and
the tables in docs/messages.md stand between ``<!-- generated: NAME -->`` and ``<!-- end -->``. With ``--check``
nothing is written, and the exit status is 1 if anything would have been.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from headrace.schemas import topics
from headrace.schemas.answer_form import FORM_FIELDS, JsonSchema, ResponseFormat, StructuredOutputs
from headrace.schemas.asyncapi import asyncapi
from headrace.schemas.batch_line import CHAT_FIELDS, URLS
from headrace.schemas.chat import Function, FunctionCall, Message, TextPart, Tool, ToolCall
from headrace.schemas.control import BatchClosed, BatchOpened, CancelBatch, CancelJob
from headrace.schemas.errors import ErrorCode
from headrace.schemas.job import FEATURES, PromptJob
from headrace.schemas.looks import Embedding
from headrace.schemas.options import NOT_YET
from headrace.schemas.result import (
    Choice,
    JobError,
    JobResult,
    Reference,
    Score,
    Timings,
    TokenLogprob,
    Usage,
)
from headrace.schemas.sampling import Sampling
from headrace.schemas.wrong_requests import wrong_requests

DOCS = Path(__file__).resolve().parent.parent / "docs"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
MODELS: dict[str, type[BaseModel]] = {
    "prompt_job": PromptJob,
    "job_result": JobResult,
    "batch_opened": BatchOpened,
    "batch_closed": BatchClosed,
    "cancel_job": CancelJob,
    "cancel_batch": CancelBatch,
}


def json_schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema of each message, by the name of its file."""
    schemas = {
        name: {"$schema": DIALECT, **_plain(model.model_json_schema())} for name, model in MODELS.items()
    }
    return {**schemas, "batch_line": _batch_line(schemas["prompt_job"])}


def _plain(schema: Any) -> Any:
    """Pydantic's schema without what no reader needs: titles made of names, and null beside each optional type."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    properties = {name: _plain(item) for name, item in schema.get("properties", {}).items()}
    plain = {
        name: _plain(item)
        for name, item in schema.items()
        if name not in ("title", "properties") and not (name == "default" and item is None)
    }
    if properties:
        plain["properties"] = properties
    kinds = [kind for kind in plain.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) == 1:
        del plain["anyOf"]
        return {**kinds[0], **plain}
    return {**plain, "anyOf": kinds} if kinds else plain


def _batch_line(job: dict[str, Any]) -> dict[str, Any]:
    """A line of OpenAI's batch format, made of PromptJob's own parts."""
    parts, fields = job["$defs"], job["properties"]
    texts_or_ids = [fields["prompt"], fields["prompt_token_ids"]]
    only_one = {"type": "array", "items": {"anyOf": texts_or_ids}, "minItems": 1, "maxItems": 1}
    body = {
        **{name: fields[name] for name in ("model", "messages", *CHAT_FIELDS, *FORM_FIELDS, "continuations")},
        "prompt": {"anyOf": [*texts_or_ids, only_one]},
        "input": {"anyOf": [*texts_or_ids, fields["inputs"]]},
        **parts["Embedding"]["properties"],
        **parts["Sampling"]["properties"],
    }
    extra = ("job_id", "idempotency_key", "tenant", "batch_id", "deadline", "metadata", "requires")
    return {
        "$schema": DIALECT,
        "description": "A line of OpenAI's batch format. Beside `body` it may carry fields of PromptJob.",
        "type": "object",
        "required": ["custom_id", "url", "body"],
        "properties": {
            "custom_id": fields["custom_id"],
            "method": {"const": "POST", "default": "POST"},
            "url": {"enum": list(URLS)},
            "body": {
                "type": "object",
                "properties": body,
                "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}, {"required": ["input"]}],
            },
            **{name: fields[name] for name in extra},
        },
        "$defs": {name: part for name, part in parts.items() if name != "Sampling"},
    }


def tables() -> dict[str, str]:
    """The generated parts of docs/messages.md, by name."""
    return {
        "job fields": _table(("field", "must be"), _fields(PromptJob)),
        "message fields": _table(
            ("field", "must be"),
            [
                *_fields(Message),
                *_fields(TextPart, "content[]."),
                *_fields(ToolCall, "tool_calls[]."),
                *_fields(FunctionCall, "tool_calls[].function."),
            ],
        ),
        "tool fields": _table(("field", "must be"), [*_fields(Tool), *_fields(Function, "function.")]),
        "response format": _table(
            ("field", "must be"),
            [
                *_fields(ResponseFormat, "response_format."),
                *_fields(JsonSchema, "response_format.json_schema."),
                *_fields(StructuredOutputs, "structured_outputs."),
            ],
        ),
        "embedding options": _table(("option", "must be"), _fields(Embedding)),
        "sampling options": _table(("option", "must be"), _fields(Sampling)),
        "refused options": ", ".join(f"`{name}`" for name in sorted(NOT_YET)) + ".",
        "features": ", ".join(f"`{name}`" for name in sorted(FEATURES)) + ".",
        "result fields": _table(("field", "holds"), _result_fields()),
        "errors": _table(
            ("code", "the record or job ends as", "meaning"),
            ((f"`{code}`", code.outcome, code.meaning) for code in ErrorCode),
        ),
        "wrong requests": _table(("field", "sent", "code", "the message goes on"), wrong_requests()),
        "headers": _table(
            ("header", "field"), ((f"`{name}`", f"`{field}`") for name, field in topics.FIELD_HEADERS.items())
        ),
    }


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    inherited_last = sorted(model.model_fields.items(), key=lambda item: item[0] not in model.__annotations__)
    for name, field in inherited_last:
        yield f"`{prefix}{field.alias or name}`", field.description or ""


def _result_fields() -> Iterator[tuple[str, str]]:
    for model, prefix in (
        (JobResult, ""),
        (Choice, "choices[]."),
        (TokenLogprob, "choices[].logprobs[]."),
        (Score, "scores[]."),
        (Reference, "result_ref."),
        (Usage, "usage."),
        (Timings, "timings."),
        (JobError, "error."),
    ):
        yield from _fields(model, prefix)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def documents(directory: Path = DOCS) -> dict[Path, str]:
    """Each document under ``directory`` as the code has it."""
    import yaml  # a tool's need, not that of a producer

    written = {
        directory / "schemas" / f"{name}.json": orjson.dumps(schema, option=orjson.OPT_INDENT_2).decode()
        + "\n"
        for name, schema in json_schemas().items()
    }
    head = "# Generated by `python -m headrace.schemas.documents`: change the code instead.\n"
    written[directory / "asyncapi.yaml"] = head + yaml.safe_dump(
        asyncapi(), sort_keys=False, allow_unicode=True, width=120
    )
    messages = directory / "messages.md"
    written[messages] = _fill(messages.read_text())
    return written


def _fill(text: str) -> str:
    for name, table in tables().items():
        pattern = rf"(<!-- generated: {re.escape(name)} -->\n).*?(<!-- end -->)"
        places = re.findall(pattern, text, flags=re.DOTALL)
        if len(places) != 1:
            raise ValueError(f"docs/messages.md must have one place for {name!r}, not {len(places)}")
        begin, end = places[0]
        text = re.sub(pattern, f"{begin}\n{table}\n\n{end}".replace("\\", r"\\"), text, flags=re.DOTALL)
    return text


def stale(directory: Path = DOCS) -> list[Path]:
    """The documents that do not say what the code says."""
    wanted = documents(directory)
    unknown = set((directory / "schemas").glob("*.json")) - wanted.keys()
    return sorted(
        [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
        + list(unknown)
    )


def main(arguments: list[str]) -> int:
    """Write the documents, or with ``--check`` only tell which are stale."""
    if arguments == ["--check"]:
        for path in stale():
            print(f"{path.relative_to(DOCS.parent)} is stale: run `python -m headrace.schemas.documents`")
        return 1 if stale() else 0
    for path, text in documents().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
