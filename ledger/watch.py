"""What a recorder says of itself: whether it lives and is ready, and its metrics for Prometheus.

It also tells the backlog, which is the job table's and not its own: with several recorders, take the largest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.ledger.rows import TierBacklog

STALLED_AFTER_S = 120.0
PREFIX = "headrace_recorder_"
KINDS = ("job", "rejection", "control")
CHORES = ("partitions", "backlog", "drain", "retire")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)
ROWS = (1, 10, 100, 500, 1000, 2500, 5000)


@dataclass(frozen=True, slots=True)
class RecorderStatus:
    """What a recorder is doing. partitions: assigned now. waiting: records that Postgres does not take for now.

    lag: records behind the end of the partitions, as of the last fetch. upkeep_failing: chores that failed last, and why.
    """

    partitions: int = 0
    waiting: int = 0
    lag: int = 0
    upkeep_failing: Mapping[str, str] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)

    @property
    def live(self) -> bool:
        """False once its loop has stood still for long."""
        return time.monotonic() - self.at < STALLED_AFTER_S

    @property
    def ready(self) -> bool:
        """Whether records come in and go into the table. A recorder that only stands by has no partitions."""
        return self.partitions > 0 and not self.waiting


class RecorderMetrics:
    """The metrics of one recorder, in a registry of its own; every series exists from the start."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.status = RecorderStatus()
        self.backlog: Sequence[TierBacklog] = ()
        self.upkeep_failing: dict[str, str] = {}  # changed in place: chores have more than one thread
        self.upkeep_done_at = dict.fromkeys(CHORES, time.monotonic())
        ProcessCollector(registry=self.registry)
        self._records = Counter(
            PREFIX + "records", "Records written, by what they are.", ["kind"], registry=self.registry
        )
        for kind in KINDS:
            self._records.labels(kind)
        self._new = Counter(
            PREFIX + "jobs_new", "Jobs that nobody had entered before.", registry=self.registry
        )
        self._unavailable = Counter(
            PREFIX + "ledger_unavailable", "Writes while Postgres was away.", registry=self.registry
        )
        self._seconds = Histogram(
            PREFIX + "write_seconds", "Bulk writes.", buckets=SECONDS, registry=self.registry
        )
        self._rows = Histogram(
            PREFIX + "write_rows", "Records of a bulk write.", buckets=ROWS, registry=self.registry
        )
        self._failures = Counter(
            PREFIX + "upkeep_failures", "Upkeep that failed, by what.", ["kind"], registry=self.registry
        )
        for chore in CHORES:
            self._failures.labels(chore)
        self.registry.register(_Now(self))

    def written(self, jobs: int, rejections: int, control: int, *, new: int, seconds: float) -> None:
        """A bulk is in the table."""
        for kind, count in zip(KINDS, (jobs, rejections, control), strict=True):
            self._records.labels(kind).inc(count)
        self._new.inc(new)
        self._seconds.observe(seconds)
        self._rows.observe(jobs + rejections + control)

    def unavailable(self) -> None:
        """Postgres was away; the write is tried again."""
        self._unavailable.inc()

    def upkeep_done(self, chore: str) -> None:
        """It was done just now."""
        self.upkeep_done_at[chore] = time.monotonic()
        self.upkeep_failing.pop(chore, None)

    def upkeep_failed(self, chore: str, why: str) -> None:
        """It could not be done, and is tried again."""
        self._failures.labels(chore).inc()
        self.upkeep_failing[chore] = why


class _Now(Collector):
    """The moment's state, made into metrics when it is asked for."""

    def __init__(self, metrics: RecorderMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        now, backlog = self._metrics.status, self._metrics.backlog
        yield GaugeMetricFamily(PREFIX + "ready", "Whether it records.", value=float(now.ready))
        yield GaugeMetricFamily(PREFIX + "partitions_assigned", "Partitions.", value=now.partitions)
        yield GaugeMetricFamily(PREFIX + "lag_records", "Records behind the end.", value=now.lag)
        age = GaugeMetricFamily(PREFIX + "upkeep_age_seconds", "Since it was last done.", labels=["kind"])
        for chore, done_at in self._metrics.upkeep_done_at.items():
            age.add_metric([chore], time.monotonic() - done_at)
        jobs = GaugeMetricFamily(
            "headrace_backlog_jobs", "Jobs that have not ended.", labels=["pool", "tier", "state"]
        )
        oldest = GaugeMetricFamily(
            "headrace_backlog_oldest_seconds",
            "Age of the oldest queued job, to the minute.",
            labels=["pool", "tier"],
        )
        for tier in backlog:
            jobs.add_metric([tier.pool, tier.tier, "queued"], tier.queued)
            jobs.add_metric([tier.pool, tier.tier, "running"], tier.running)
            oldest.add_metric([tier.pool, tier.tier], _age(tier.oldest))
        yield from (age, jobs, oldest)


def _age(since: datetime | None) -> float:
    return 0.0 if since is None else max(0.0, (datetime.now(UTC) - since).total_seconds())
