"""The contract's documents say what the code says, and their examples work."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
import yaml

from headrace.schemas import (
    BatchClosed,
    ErrorCode,
    InvalidJob,
    JobKind,
    JobResult,
    JobState,
    Source,
    Topics,
    parse_control,
    parse_job,
)
from headrace.schemas.asyncapi import asyncapi
from headrace.schemas.documents import DOCS, json_schemas, main, stale, tables

SCHEMAS = json_schemas()
MESSAGES = (DOCS / "messages.md").read_text()
SOURCE = Source("t", 0, 1, 1_795_000_000_000)


def test_no_document_is_stale(capsys: pytest.CaptureFixture[str]) -> None:
    assert stale() == []
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == ""


def test_a_stale_document_is_found(tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "messages.md").write_text(MESSAGES.replace("| `seed` |", "| `sead` |"))
    (tmp_path / "schemas" / "forgotten.json").write_text("{}")
    found = {path.name for path in stale(tmp_path)}
    assert found == {f"{name}.json" for name in SCHEMAS} | {"asyncapi.yaml", "messages.md", "forgotten.json"}


def test_a_place_for_a_table_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "messages.md").write_text(MESSAGES.replace("<!-- generated: errors -->", ""))
    with pytest.raises(ValueError, match="must have one place for 'errors', not 0"):
        stale(tmp_path)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_json_schema_is_one(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("prompt_job", {"prompt": "x"}),
        (
            "prompt_job",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "unknown": 1},
        ),
        (
            "prompt_job",
            {"prompt_token_ids": [1], "deadline": 1_800_000_000, "sampling": {"stop": "x", "top_k": -1}},
        ),
        ("prompt_job", {"prompt": "x", "deadline": "2027-01-31T12:00:00Z", "sampling": {"stop": ["x"]}}),
        ("prompt_job", {}),
        ("prompt_job", {"prompt": ""}),
        ("prompt_job", {"prompt": "x", "prompt_token_ids": [1]}),
        ("prompt_job", {"prompt": "x", "sampling": {"temperature": 3}}),
        ("prompt_job", {"prompt": "x", "sampling": {"max_tokens": "3"}}),
        ("prompt_job", {"prompt": "x", "sampling": {"stop": ["a"] * 17}}),
        ("prompt_job", {"prompt": "x", "metadata": {"a": 1}}),
        ("prompt_job", {"messages": [{"role": "tool", "content": "x"}]}),
        ("batch_line", {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x"}}),
        ("batch_line", {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x", "top_p": 0}}),
        ("batch_line", {"custom_id": "c", "url": "/v1/images", "body": {"prompt": "x"}}),
        ("batch_line", {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": [1, 2]}}),
        ("batch_line", {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": ["x"]}}),
        ("batch_line", {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": ["x", "y"]}}),
        ("batch_line", {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": "x"}}),
        ("batch_line", {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": [1, 2]}}),
        ("batch_line", {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": ["x", "y"]}}),
        ("batch_line", {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": [[1], [2]]}}),
        ("batch_line", {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": ["x", 1]}}),
        ("batch_line", {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": []}}),
        (
            "batch_line",
            {
                "custom_id": "c",
                "url": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web"}]},
            },
        ),
        ("prompt_job", {"prompt": "x", "continuations": ["y", [1]]}),
        ("prompt_job", {"prompt": "x", "continuations": [""]}),
        ("prompt_job", {"prompt": "x", "embedding": {"pooling": "max"}}),
        ("batch_line", {"url": "/v1/completions", "body": {"prompt": "x"}}),
        (
            "batch_line",
            {"custom_id": "c", "method": "GET", "url": "/v1/completions", "body": {"prompt": "x"}},
        ),
    ],
)
def test_a_schema_takes_what_the_reader_takes(name: str, body: dict[str, Any]) -> None:
    try:
        taken = bool(parse_job(orjson.dumps(body), None, SOURCE))
    except InvalidJob:
        taken = False
    assert jsonschema.Draft202012Validator(SCHEMAS[name]).is_valid(body) is taken


def test_a_result_fits_its_schema() -> None:
    result = JobResult.decode(
        orjson.dumps({"id": "0192f0c1-7a31-7cc5-a1c3-3f1d7a5b9e10", "state": JobState.FAILED})
    )
    jsonschema.validate(orjson.loads(result.encode()), SCHEMAS["job_result"])


def test_asyncapi_describes_every_topic_and_every_message() -> None:
    document = asyncapi()
    names = Topics()
    addresses = {channel["address"] for channel in document["channels"].values()}
    assert addresses == {"headrace.jobs.v1.{tier}", names.results, names.control, names.dead}
    assert document["channels"]["jobs"]["parameters"]["tier"]["enum"] == list(names.tiers)
    messages = document["components"]["messages"]
    payloads = {message["payload"].get("schema", {}).get("$ref") for message in messages.values()} - {None}
    assert payloads == {f"./schemas/{name}.json" for name in SCHEMAS}
    assert (DOCS / "asyncapi.yaml").read_text().endswith(yaml.safe_dump(document, sort_keys=False, width=120))


def test_every_reference_in_asyncapi_leads_somewhere() -> None:
    document = asyncapi()
    references = re.findall(r'"\$ref":"([^"]+)"', orjson.dumps(document).decode())
    assert len(references) > 10
    for reference in references:
        file, _, pointer = reference.partition("#")
        if file:
            assert (DOCS / file).is_file()
        found: Any = document
        for step in pointer.split("/")[1:]:
            found = found[step]


def test_the_table_of_errors_has_every_code() -> None:
    assert all(f"| `{code}` |" in tables()["errors"] for code in ErrorCode)


def test_the_json_on_the_page_is_what_it_says() -> None:
    values = [orjson.loads(block) for block in re.findall(r"```json\n(.*?)```", MESSAGES, re.DOTALL)]
    job, *forms, embedding, score, line, result, reference = values
    kinds = [parse_job(orjson.dumps(form), None, SOURCE).answer_form.kind for form in forms]
    assert kinds == ["json_schema", "choice"]
    assert str(parse_job(orjson.dumps(job), None, SOURCE).envelope.id) == result["id"]
    kinds = [parse_job(orjson.dumps(body), None, SOURCE).kind for body in (embedding, score)]
    assert kinds == [JobKind.EMBEDDING, JobKind.SCORE]
    assert parse_job(orjson.dumps(line), None, SOURCE).custom_id == "q-1"
    assert orjson.loads(JobResult.decode(orjson.dumps(result)).encode()) == result
    referred = JobResult.decode(orjson.dumps(reference))
    assert referred.result_ref is not None
    assert str(referred.id) in referred.result_ref.uri


@pytest.mark.parametrize("field", ["job_id", "idempotency_key", "tenant", "batch_id", "custom_id"])
def test_the_page_says_of_each_name_that_it_holds_no_control_characters(field: str) -> None:
    with pytest.raises(InvalidJob, match=f"^{field} must be a string without control characters"):
        parse_job(orjson.dumps({"prompt": "a", field: "a\tb"}), None, SOURCE)
    (row,) = re.findall(rf"^\| `{field}` \| (.*) \|$", tables()["job fields"], re.MULTILINE)
    assert "without control characters" in row


def test_every_control_message_on_the_page_can_be_sent() -> None:
    rows = re.findall(r"^\| `(batch_opened|batch_closed|cancel_\w+)` \|", MESSAGES, re.MULTILINE)
    sample = {"batch_id": "b", "expected": 1, "job_id": "j"}
    kinds = {type(parse_control(orjson.dumps({"type": row, **sample}))).__name__ for row in rows}
    assert kinds == {"BatchOpened", "BatchClosed", "CancelBatch", "CancelJob"}
    assert isinstance(
        parse_control(b'{"type": "batch_closed", "batch_id": "demo", "expected": 3}'), BatchClosed
    )
