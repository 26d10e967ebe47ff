"""examples/everything.jsonl: a line for each option and a bad twin, all at once, each as expected."""

import json
from pathlib import Path

import orjson
import pytest
from expectations import EXPECTED, LINES, TEMPLATE, check
from pipeline import pipeline
from typer.testing import CliRunner

from headrace.cli import app
from headrace.client import Client
from headrace.engine.config import EngineConfig
from headrace.engine.text import LocalTextEngine, RequestError, open_text_engine
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


@pytest.mark.timeout(600)
def test_every_line_ends_as_expected_through_kafka_and_postgres(
    kafka: str, database_url: str, smollm: Path
) -> None:
    def engine() -> LocalTextEngine:
        config = EngineConfig(model=str(smollm), device="cpu", dtype="float32", chat_template=str(TEMPLATE))
        made = open_text_engine(config, in_process=True)
        made.model = smollm.name
        return made

    with pipeline(kafka, database_url, partitions=2) as running:
        running.start_process(role="recorder")
        running.start_worker(engine)
        with Client(running.bootstrap, running.topics) as client:
            submission = client.submit(LINES)
            results = {
                result.custom_id: result for result in client.follow_results(submission, idle_timeout=120)
            }
        check({name or "": orjson.loads(result.encode()) for name, result in results.items()})
        rows = dict(running.query("SELECT custom_id, state::text FROM job_status"))
    assert rows == {name: expected["state"] for name, expected in EXPECTED.items()}


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
