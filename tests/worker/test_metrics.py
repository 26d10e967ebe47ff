"""What Prometheus gets from a worker and a recorder."""

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pipeline import Pipeline, health_server
from prometheus_client.parser import text_string_to_metric_families
from recorders import running

from headrace.engine.answers import TextChoice
from headrace.engine.request import EngineStats, FinishReason
from headrace.engine.text_engine import TextCompletion
from headrace.ledger import Ledger
from headrace.ledger.recorder import Recorder
from headrace.ledger.watch import RecorderMetrics
from headrace.schemas import BatchOpened, ErrorCode
from headrace.worker.health import HealthServer, Status
from headrace.worker.metrics import Metrics

ROOT = Path(__file__).parents[2]
TIERS = ("interactive", "standard", "bulk")
LABELS = {
    "tier", "state", "code", "call", "outcome", "model_name", "finished_reason", "le", "kind", "pool",
}  # fmt: skip


def scrape(port: int | None) -> dict[str, float]:
    """Every sample, by its name and labels as one reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        assert response.headers["content-type"].startswith("text/plain")
        text = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert set(sample.labels) <= LABELS
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@pytest.fixture
def idle() -> Iterator[int]:
    """The port of a worker that has not done anything."""
    metrics = Metrics(TIERS, "m")
    engine = EngineStats(3, 2, 100, 20, 30, 50, 32, 1000, 400, 5, 900, 700, 60, 0)
    status = Status("w", "m", True, False, {"bulk": 4}, {"bulk": 7}, 9, 8, 1, 2, None, engine)
    metrics.watch(lambda: status, lambda: {"bulk": 12})
    server = HealthServer(0, lambda: status, metrics.registry)
    yield server.port
    server.close()


def test_every_series_is_there_before_its_first_event(idle: int) -> None:
    found = scrape(idle)
    for tier in TIERS:
        for state in ("succeeded", "failed", "cancelled", "expired"):
            assert found[f"headrace_jobs_total{{state={state},tier={tier}}}"] == 0
        assert found[f"headrace_job_seconds_count{{tier={tier}}}"] == 0
    for code in ErrorCode:
        assert found[f"headrace_dead_letters_total{{code={code}}}"] == 0
    for reason in ("stop", "length", "abort"):
        assert found[f"headrace_request_success_total{{finished_reason={reason},model_name=m}}"] == 0
    assert found["headrace_engine_deaths_total"] == 0


def test_the_engines_snapshot_has_vllms_names(idle: int) -> None:
    found = scrape(idle)
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.5,
        "num_preemptions_total": 5,
        "prefix_cache_queries_total": 1000,
        "prefix_cache_hits_total": 400,
        "prompt_tokens_total": 900,
        "generation_tokens_total": 700,
    }
    assert {name: found[f"headrace_{name}{{model_name=m}}"] for name in expected} == expected
    assert found["headrace_jobs_waiting{tier=bulk}"] == 7
    assert found["headrace_consumer_lag_records{tier=bulk}"] == 12
    assert (found["headrace_ready"], found["headrace_intake_paused"]) == (1, 0)


def test_the_phases_of_a_request_add_up_to_its_latency() -> None:
    metrics = Metrics(TIERS, "m")
    choice = TextChoice(0, "x", [1, 2, 3], FinishReason.STOP, None)
    times = {"queued_s": 0.5, "first_token_s": 2.0, "total_s": 5.0}
    metrics.answered(TextCompletion("1", [choice], completion_tokens=3, **times))
    expected = {
        "request_queue_time": 0.5,
        "request_prefill_time": 1.5,
        "request_decode_time": 3.0,
        "request_time_per_output_token": 1.5,
        "time_to_first_token": 2.0,
        "e2e_request_latency": 5.0,
    }
    labels = {"model_name": "m"}
    found = {
        name: metrics.registry.get_sample_value(f"headrace_{name}_seconds_sum", labels) for name in expected
    }
    assert found == expected


def exported() -> set[str]:
    """The names of every metric of ours, as Prometheus has them."""
    metrics = Metrics(TIERS, "m")
    status = Status("w", "m", True, False, {}, {}, 0, 0, 0, 0)
    metrics.watch(lambda: status, dict)
    names = set()
    for family in (*metrics.registry.collect(), *RecorderMetrics().registry.collect()):
        if family.name.startswith("headrace_"):
            names.add(family.name + ("_total" if family.type == "counter" else ""))
    return names


def spoken_of(file: str) -> set[str]:
    """The metrics that a file of the project names."""
    found = re.findall(r"\bheadrace_[a-z0-9_]+", (ROOT / file).read_text())
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def test_the_operators_page_names_every_metric_and_no_other() -> None:
    roles = {"headrace_worker", "headrace_recorder", "headrace_analyst"}  # of deploy/roles.sql
    assert spoken_of("docs/operations.md") - roles == exported()


def test_the_alerts_are_about_metrics_that_exist() -> None:
    (group,) = yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"]
    assert all(rule["alert"] and rule["expr"] and rule["annotations"]["summary"] for rule in group["rules"])
    assert spoken_of("deploy/alerts.yaml") <= exported()


def test_a_worker_counts_what_becomes_of_its_jobs(line: Pipeline) -> None:
    worker = line.start_worker(health=health_server())
    secret = "the patient is Ada"
    for n in range(20):
        line.submit(secret, TIERS[n % 2], tenant="acme", batch_id="b-private")
    line.submit("fail:made_up_code")
    line.submit("x", sampling={"temperature": 9})
    line.submit("flaky:2")
    line.send(b"{no json")
    line.wait_terminal(23)
    line.dead_letters(1)
    line.wait_for(lambda: sum(map(line.lag, TIERS)) == 0)
    port = worker.health_port
    line.wait_for(lambda: scrape(port)["headrace_offset_commits_total{outcome=done,tier=standard}"] > 0)
    line.wait_for(lambda: scrape(port)["headrace_consumer_lag_records{tier=standard}"] == 0)
    found = scrape(port)

    assert found["headrace_jobs_total{state=succeeded,tier=interactive}"] == 10
    assert found["headrace_jobs_total{state=succeeded,tier=standard}"] == 11
    assert found["headrace_jobs_total{state=failed,tier=standard}"] == 2
    assert found["headrace_job_errors_total{code=other}"] == 1  # an engine's own code is no label of its own
    assert found["headrace_job_errors_total{code=invalid_value}"] == 1
    assert found["headrace_dead_letters_total{code=invalid_json}"] == 1
    assert found["headrace_retries_total{code=out_of_memory}"] == 2
    assert found["headrace_attempts_total{tier=standard}"] == 14
    assert found["headrace_request_success_total{finished_reason=stop,model_name=stand-in}"] == 21
    assert found["headrace_request_prompt_tokens_sum{model_name=stand-in}"] == 21 * 8
    assert found["headrace_job_seconds_count{tier=interactive}"] == 10
    assert found["headrace_job_wait_seconds_count{tier=interactive}"] == 10
    assert found["headrace_ledger_call_rows_sum{call=finish}"] == 23
    assert found["headrace_ledger_call_rows_sum{call=reject}"] == 1
    assert found["process_resident_memory_bytes"] > 0
    assert not any(
        private in sample for sample in found for private in (secret, "acme", "b-private", "made_up")
    )


def test_a_job_that_comes_again_is_not_counted_again(line: Pipeline) -> None:
    first = line.start_worker()
    line.submit("hello")
    line.wait_terminal(1)
    line.wait_for(lambda: line.lag() == 0)
    first.close()
    line.forget_offsets("standard")
    second = line.start_worker(health=health_server())
    line.wait_for(lambda: line.lag() == 0)
    assert scrape(second.health_port)["headrace_jobs_total{state=succeeded,tier=standard}"] == 0


def test_an_engines_death_is_counted(line: Pipeline) -> None:
    worker = line.start_worker(health=health_server())
    id = line.submit("die")
    line.wait_for(lambda: line.rows().get(id) == "failed")
    line.dead_letters(1)
    found = scrape(worker.health_port)
    assert found["headrace_engine_deaths_total"] >= 2
    assert found["headrace_dead_letters_total{code=engine_failure}"] == 1


def test_a_recorder_tells_what_it_wrote_and_what_waits(line: Pipeline) -> None:
    with Ledger(line.database_url) as ledger:
        recorder = Recorder(line.bootstrap, line.topics, ledger)
        server = HealthServer(0, recorder.status, recorder.metrics.registry)
        assert scrape(server.port)["headrace_recorder_records_total{kind=job}"] == 0
        assert not recorder.status().ready
        line.control(BatchOpened(batch_id="b"))
        for _ in range(5):
            line.submit("hello", "bulk")
        line.send(b"{no json")
        line.flush()
        with running(recorder):
            line.wait_for(lambda: line.states()["queued"] == 5)
            for kind, count in (("job", 5), ("rejection", 1), ("control", 1)):
                counter = f"headrace_recorder_records_total{{kind={kind}}}"
                line.wait_for(lambda: scrape(server.port)[counter] >= count)  # noqa: B023
            line.wait_for(lambda: recorder.status().ready)
            found = scrape(server.port)
            assert found["headrace_recorder_records_total{kind=job}"] == 5
            assert found["headrace_recorder_records_total{kind=rejection}"] == 1
            assert found["headrace_recorder_jobs_new_total"] == 5
            assert found["headrace_recorder_write_rows_sum"] == 7
        server.close()
        again = Recorder(line.bootstrap, line.topics, ledger)  # which looks at once at what waits
        server = HealthServer(0, again.status, again.metrics.registry)
        with running(again):
            waits = "headrace_backlog_jobs{pool=default,state=queued,tier=bulk}"
            line.wait_for(lambda: scrape(server.port).get(waits) == 5)
        server.close()
