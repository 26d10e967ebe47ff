"""What a worker counts and measures, for Prometheus.

Names are vLLM's where the meaning is the same, with ``headrace_`` in the place of ``vllm:``, so that dashboards carry
over. Every series exists from the start, at 0: a rate over a series that appears with its first event misses that
event. No label has more values than the code knows: no tenants, no batches, no text of anybody's.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from time import time
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.engine.request import EngineStats, FinishReason
from headrace.engine.text_engine import TextCompletion
from headrace.schemas import ErrorCode, JobState
from headrace.worker.health import Status
from headrace.worker.histogram import JobHistogram, Observed
from headrace.worker.publisher import Form
from headrace.worker.retries import RETRIABLE

if TYPE_CHECKING:
    from headrace.worker.job import Job

PREFIX = "headrace_"
OTHER = "other"
_CODES = frozenset(ErrorCode)

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LONG_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14_400, 43_200, 86_400)
CALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 15)
TOKENS = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
ROWS = (1, 4, 16, 64, 256, 1000)

ENDED = tuple(state for state in JobState if state.terminal)
COMMITS = ("done", "overtaken", "failed")


class CallMeter:
    """Measures one kind of bulk call to Postgres."""

    def __init__(self, seconds: Histogram, rows: Histogram, unavailable: Counter) -> None:
        self._seconds, self._rows, self._unavailable = seconds, rows, unavailable

    def done(self, seconds: float, rows: int) -> None:
        """A call has been answered."""
        self._seconds.observe(seconds)
        self._rows.observe(rows)

    def unavailable(self) -> None:
        """Postgres was away; the call is tried again."""
        self._unavailable.inc()


class Metrics:
    """The metrics of one worker, in a registry of its own."""

    def __init__(self, tiers: Sequence[str], model: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        codes = [*ErrorCode, OTHER]
        self._jobs = self._counter("jobs", "Jobs that ended by this worker's write.", tier=tiers, state=ENDED)
        self._errors = self._counter("job_errors", "The same that did not succeed, by code.", code=codes)
        self._dead = self._counter("dead_letters", "Records put on the dead-letter topic.", code=codes)
        forms = [form for form in Form if form is not Form.WHOLE]
        self._refused = self._counter(
            "records_refused",
            "Records that Kafka never takes, by what was published instead.",
            outcome=forms,
        )
        self._attempts = self._counter("attempts", "Jobs given to the engine, again or anew.", tier=tiers)
        self._retries = self._counter(
            "retries", "Attempts to be tried again, by the engine's code.", code=list(RETRIABLE)
        )
        self._deaths = Counter(PREFIX + "engine_deaths", "Times the engine died.", registry=self.registry)
        self._commits = self._counter("offset_commits", "Commits, by partition.", tier=tiers, outcome=COMMITS)
        self._job_seconds = self._job_histogram(
            "job_seconds", "From a job's record to its result in the table.", LONG_SECONDS, "tier", tiers
        )
        self._wait_seconds = self._job_histogram(
            "job_wait_seconds", "From a job's record to its first attempt.", LONG_SECONDS, "tier", tiers
        )
        calls = ("lookup", "begin", "end attempts", "finish", "reject")
        self._call_seconds = self._histogram("ledger_call_seconds", "Bulk calls.", CALL_SECONDS, call=calls)
        self._call_rows = self._histogram("ledger_call_rows", "Rows of a bulk call.", ROWS, call=calls)
        self._unavailable = self._counter("ledger_unavailable", "Calls while Postgres was away.", call=calls)

        reasons = [reason.value for reason in FinishReason]
        self._success = self._counter(
            "request_success", "Answers.", model_name=[model], finished_reason=reasons
        )
        self._requests = [
            (self._job_histogram(name, text, buckets, "model_name", [model])[model], value)
            for name, text, buckets, value in _OF_A_REQUEST
        ]
        self._model = model

    def watch(self, status: Callable[[], Status], lag: Callable[[], dict[str, int]]) -> None:
        """Also tell what the worker is doing at the moment of the question."""
        self.registry.register(_Now(status, lag))

    def call(self, name: str) -> CallMeter:
        """The meter of one kind of bulk call."""
        return CallMeter(self._call_seconds[name], self._call_rows[name], self._unavailable[name])

    def started(self, job: "Job") -> None:
        """A job's attempt is in the table, and the engine may have it."""
        self._attempts[job.tier].inc()
        if job.attempt == 1:
            self._wait_seconds[job.tier].observe(_since(job))

    def answered(self, done: TextCompletion) -> None:
        """The engine has answered."""
        for choice in done.choices:
            self._success[self._model, choice.finish_reason.value].inc()
        for histogram, value in self._requests:
            histogram.observe(value(done))

    def ended(self, job: "Job", state: JobState, code: str | None) -> None:
        """This worker's write ended a job."""
        self._jobs[job.tier, state].inc()
        self._job_seconds[job.tier].observe(_since(job))
        if code is not None:
            self._errors[known_code(code)].inc()

    def died(self, code: str) -> None:
        """A record goes to the dead-letter topic."""
        self._dead[known_code(code)].inc()

    def published(self, form: Form) -> None:
        """Kafka has a record, in this form."""
        if form is not Form.WHOLE:
            self._refused[form].inc()

    def retried(self, code: str) -> None:
        """An attempt failed and will be tried again."""
        self._retries[code].inc()

    def engine_died(self) -> None:
        """The engine died, and what was in it runs again."""
        self._deaths.inc()

    def committed(self, tier: str, outcome: str) -> None:
        """One partition's commit came through, was overtaken by a rebalance, or failed."""
        self._commits[tier, outcome].inc()

    def _counter(self, name: str, text: str, **labels: Iterable[str]) -> "Series[Counter]":
        made = Counter(PREFIX + name, text, list(labels), registry=self.registry)
        return _series(made, labels)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float], **labels: Iterable[str]
    ) -> "Series[Histogram]":
        made = Histogram(PREFIX + name, text, list(labels), registry=self.registry, buckets=buckets)
        return _series(made, labels)

    def _job_histogram(
        self, name: str, text: str, buckets: Sequence[float], label: str, values: Iterable[str]
    ) -> dict[str, Observed]:
        made = JobHistogram(PREFIX + name, text, buckets, label, values)
        self.registry.register(made)
        return made.series


def _per_token(done: TextCompletion) -> float:
    """Seconds a token after the first."""
    return (done.total_s - done.first_token_s) / max(done.completion_tokens - 1, 1)


_OF_A_REQUEST: tuple[tuple[str, str, Sequence[float], Callable[[TextCompletion], float]], ...] = (
    ("request_queue_time_seconds", "From the engine's taking it to its first step.", SECONDS, lambda d: d.queued_s),
    ("time_to_first_token_seconds", "From the engine's taking it to its first token.", SECONDS, lambda d: d.first_token_s),
    ("request_prefill_time_seconds", "From its first step to its first token.", SECONDS, lambda d: d.first_token_s - d.queued_s),
    ("request_decode_time_seconds", "From its first token to its end.", SECONDS, lambda d: d.total_s - d.first_token_s),
    ("e2e_request_latency_seconds", "From the engine's taking it to its end.", SECONDS, lambda d: d.total_s),
    ("request_time_per_output_token_seconds", "A token after the first, on average.", CALL_SECONDS, _per_token),
    ("request_prompt_tokens", "Tokens of the prompt.", TOKENS, lambda d: d.prompt_tokens),
    ("request_generation_tokens", "Tokens generated.", TOKENS, lambda d: d.completion_tokens),
)  # fmt: skip


class _Now(Collector):
    """The moment's state, made into metrics when it is asked for."""

    def __init__(self, status: Callable[[], Status], lag: Callable[[], dict[str, int]]) -> None:
        self._status, self._lag = status, lag

    def collect(self) -> Iterator[Metric]:
        now = self._status()
        yield _gauge("ready", "Whether it takes jobs.", now.ready)
        yield _gauge("intake_paused", "Whether dead letters have stopped it.", now.paused is not None)
        yield _gauge("jobs_held", "Jobs in memory.", now.held)
        yield _gauge("jobs_in_flight", "Jobs with an open attempt.", now.in_flight)
        yield _gauge("jobs_finishing", "Results that Postgres does not have yet.", now.finishing)
        yield _gauge("records_unconfirmed", "Records that Kafka has not confirmed yet.", now.unconfirmed)
        yield _by_tier("jobs_waiting", "Jobs that wait for their turn.", now.waiting)
        yield _by_tier("partitions_assigned", "Partitions.", now.partitions)
        yield _by_tier(
            "consumer_lag_records", "Records behind the end, by what may be committed.", self._lag()
        )
        yield from _engine(now.engine or _NO_ENGINE, now.model)


def _engine(stats: EngineStats, model: str) -> Iterator[Metric]:
    gauges = {
        "num_requests_running": ("Requests in the running batch.", stats.running),
        "num_requests_waiting": ("Requests that wait inside the engine.", stats.waiting),
        "kv_cache_usage_perc": ("Blocks in use, 0 to 1.", stats.blocks_live / max(stats.blocks_total, 1)),
        "kv_cache_waste_perc": ("Share of the used blocks that holds no token, 0 to 1.", stats.kv_waste),
    }
    counters = {
        "prompt_tokens": ("Prompt tokens taken.", stats.prompt_tokens),
        "generation_tokens": ("Tokens generated.", stats.generated_tokens),
        "num_preemptions": ("Requests put back to make room.", stats.preemptions),
        "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
        "prefix_cache_hits": ("Prompt tokens found there.", stats.prefix_hits),
        "engine_steps": ("Steps.", stats.steps),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        gauge.add_metric([model], value)
        yield gauge
    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        counter.add_metric([model], value)
        yield counter


_NO_ENGINE = EngineStats(**{field.name: 0 for field in fields(EngineStats)})


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=float(value))


def _by_tier(name: str, text: str, values: dict[str, int]) -> Metric:
    gauge = GaugeMetricFamily(PREFIX + name, text, labels=["tier"])
    for tier, value in values.items():
        gauge.add_metric([tier], value)
    return gauge


def _since(job: "Job") -> float:
    """Seconds since the job's record was written; clocks differ, but nobody waits less than nothing."""
    return max(0.0, time() - job.row.submitted_at.timestamp())


def known_code(code: str) -> str:
    """An engine may make up codes; what is not in our tables is one label, not many, and nobody's text."""
    return code if code in _CODES else OTHER


M = TypeVar("M", Counter, Histogram)


# By the label's value, or by the values of all labels. Looking one up here costs a tenth of what `labels()` does.
Series: TypeAlias = dict[str | tuple[str, ...], M]


def _series(metric: M, labels: dict[str, Iterable[str]]) -> Series[M]:
    """All of a metric's series; from here on each exists, at 0."""
    every = itertools.product(*labels.values())
    return {values if len(values) > 1 else values[0]: metric.labels(*values) for values in every}
