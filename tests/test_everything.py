"""examples/everything.jsonl: a line for each option and a bad twin, all at once, each as expected."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import orjson
import pytest
from expectations import EXPECTED, LINES, TEMPLATE, check
from pipeline import health_server, pipeline
from typer.testing import CliRunner

from headrace.cli import app
from headrace.client import Client
from headrace.engine.config import EngineConfig
from headrace.engine.text import LocalTextEngine, open_text_engine
from headrace.engine.text_engine import RequestError
from headrace.schemas import InvalidJob, PromptJob, Source, parse_job
from headrace.schemas.batch_line import is_batch_line
from headrace.schemas.chat import Message
from headrace.schemas.job import FEATURES
from headrace.worker import translate

SOURCE = Source("file", 0, 0, timestamp_ms=-1)
# How a job is named, sent and counted: tested where that is.
NOT_ASKED_OF_THE_MODEL = {
    "schema_version",
    "job_id",
    "idempotency_key",
    "tenant",
    "batch_id",
    "custom_id",
    "deadline",
}


CANARY = "the patient is Ada"


def private_lines() -> list[dict[str, Any]]:
    """Jobs with a canary wherever a model, its tokenizer, its template or a grammar may come to quote it."""
    asks = {"role": "user", "content": CANARY}
    short = {"max_tokens": 8}
    properties = {CANARY: {"type": "object", CANARY: CANARY, "pattern": f"({CANARY}"}}
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "description": CANARY,
            "parameters": {"type": "object", "properties": properties},
        },
    }
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"{CANARY}": 1}}'}}
    lines: list[dict[str, Any]] = [
        {"prompt": CANARY, "sampling": {**short, "echo": True, "logprobs": 1, "prompt_logprobs": 1}},
        {"prompt": CANARY, "sampling": {**short, "stop": [CANARY], "bad_words": [CANARY], "n": 2}},
        {"prompt": CANARY, "continuations": [CANARY, CANARY * 2]},
        {"prompt": CANARY * 5000},
        {"prompt": CANARY, "sampling": {"bad_words": [""], "stop": [CANARY]}},
        {"prompt": CANARY, "sampling": {"logit_bias": {CANARY: 1}}},
        {"messages": [asks]},
        {
            "messages": [
                asks,
                {"role": "assistant", "tool_calls": [called]},
                {"role": "tool", "content": CANARY},
            ]
        },
        {"messages": [asks], "chat_template_kwargs": {"messages": CANARY, "loop": {CANARY: [CANARY]}}},
        {"messages": [{"role": "system", "content": CANARY}, asks, asks], "continue_final_message": True},
        {"messages": [asks], "tools": [tool], "tool_choice": "required"},
        {"prompt": CANARY, "response_format": {"type": "choice", "choice": [CANARY, CANARY + "!"]}},
        {"prompt": CANARY, "response_format": {"type": "regex", "regex": f"({CANARY}"}},
        {"prompt": CANARY, "response_format": {"type": "regex", "regex": f"{CANARY}(?=x)"}},
        {"prompt": CANARY, "response_format": {"type": "grammar", "grammar": f'start: "{CANARY}" | missing'}},
        {
            "prompt": CANARY,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": CANARY}}},
        },
        {
            "prompt": CANARY,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": properties}}},
        },
    ]
    return [line if "continuations" in line else {"sampling": short} | line for line in lines]


@pytest.mark.timeout(600)
def test_every_line_ends_as_expected_through_kafka_and_postgres_and_no_log_tells_what_was_asked(
    kafka: str,
    database_url: str,
    smollm: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level("INFO")

    def engine() -> LocalTextEngine:
        config = EngineConfig(model=str(smollm), device="cpu", dtype="float32", chat_template=str(TEMPLATE))
        made = open_text_engine(config, in_process=True)
        made.model = smollm.name
        return made

    with pipeline(kafka, database_url, partitions=2) as running:
        running.start_process(role="recorder")
        worker = running.start_worker(engine, health=health_server())
        with Client(running.bootstrap, running.topics) as client:
            submission = client.submit(LINES)
            results = {
                result.custom_id: result for result in client.follow_results(submission, idle_timeout=120)
            }
            rows = dict(running.query("SELECT custom_id, state::text FROM job_status"))
            lines = private_lines()
            submission = client.submit(
                [{**line, "custom_id": CANARY + str(n)} for n, line in enumerate(lines)]
            )
            private = list(client.follow_results(submission, idle_timeout=120))
        check({name or "": orjson.loads(result.encode()) for name, result in results.items()})
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.health_port}/metrics", timeout=30) as page:
            shown = page.read().decode()
    assert rows == {name: expected["state"] for name, expected in EXPECTED.items()}

    assert len(private) == len(lines)
    codes = {str(result.error.code) for result in private if result.error is not None}
    assert {"context_length_exceeded", "invalid_value"} <= codes
    assert "internal_error" not in codes
    told = [str(record.__dict__) for record in caplog.records] + [caplog.text, *capfd.readouterr(), shown]
    assert any("job failed" in text for text in told)
    assert not any(CANARY in text for text in told)


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_every_line_ends_as_expected_without_kafka(
    smollm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CHAT_TEMPLATE", str(TEMPLATE))
    monkeypatch.setenv("HEADRACE_DTYPE", "float32")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(LINES))
    command = ["generate", str(source), str(target), "--model", str(smollm), "--device", "cpu"]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    check({line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())})


def in_openais_form(job: dict[str, object]) -> bytes:
    """The same job as a line of OpenAI's batch format."""
    custom_id, sampling, metadata, requires = (
        job.pop(name, {}) for name in ("custom_id", "sampling", "metadata", "requires")
    )
    url = "/v1/chat/completions" if "messages" in job else "/v1/completions"
    prompt = {"prompt": job.pop("prompt_token_ids")} if "prompt_token_ids" in job else {}
    body = {**job, **prompt, **sampling}  # type: ignore[dict-item]
    line = {
        "custom_id": custom_id,
        "url": url,
        "body": body,
        "metadata": metadata or None,
        "requires": requires or None,
    }
    return json.dumps(line).encode()


# What only one of the forms can say: ``sampling`` itself, no prompt at all, a list of no token ids.
OURS_ALONE = {
    "sampling-bad",
    "sampling-beside",
    "no-prompt",
    "messages-beside-prompt",
    "prompt_token_ids-empty",
    "embedding",
    "embedding-bad",
    "inputs",
    "inputs-bad",
    "inputs-unread",
}


@pytest.mark.parametrize("line", LINES, ids=EXPECTED)
def test_openais_form_asks_for_the_same(line: bytes) -> None:
    job = json.loads(line)
    if is_batch_line(job) or job["custom_id"] in OURS_ALONE:
        return
    ours, _ = translate.read_line(line, 1)
    openais, _ = translate.read_line(in_openais_form(job), 1)
    if not isinstance(ours, RequestError):
        assert openais == ours
        return
    assert isinstance(openais, RequestError)
    assert openais.code == ours.code
    assert (openais.param or "").removeprefix("body.") == (ours.param or "").removeprefix("sampling.")


def parsed(line: bytes) -> PromptJob | InvalidJob:
    try:
        return parse_job(line, None, SOURCE)
    except InvalidJob as error:
        return error


def test_each_option_has_a_line_and_a_bad_twin() -> None:
    asked, refused = set[str](), set[str]()
    for line in LINES:
        job = parsed(line)
        if isinstance(job, PromptJob) and EXPECTED[json.loads(line)["custom_id"]]["state"] == "succeeded":
            asked |= job.model_fields_set | job.sampling.model_fields_set
            asked |= {name for message in job.messages or () for name in message.model_fields_set}
            asked |= {"openai_batch_line"} if is_batch_line(json.loads(line)) else set()
    for expected in EXPECTED.values():
        if expected["state"] == "failed":
            refused |= {
                "openai_batch_line" if word in ("url", "body") else word
                for word in expected["error"]["param"].split(".")
            }
    wanted = FEATURES - NOT_ASKED_OF_THE_MODEL
    assert wanted - asked == set(), "have no line in examples/everything.jsonl"
    assert wanted - refused == set(), "have no bad twin in examples/everything.jsonl"
    assert set(Message.model_fields) - asked <= {"name", "reasoning_content"}


def test_what_is_expected_is_said_of_each_line() -> None:
    assert [json.loads(line)["custom_id"] for line in LINES] == list(EXPECTED)
    for line in LINES:
        name, job = json.loads(line)["custom_id"], parsed(line)
        if isinstance(job, InvalidJob):
            assert EXPECTED[name] == {"state": "failed", "error": {"code": job.code, "param": job.param}}
