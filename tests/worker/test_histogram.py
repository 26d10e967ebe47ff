"""The histogram of what is observed of every job, beside the client library's own."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headrace.worker.histogram import JobHistogram

BOUNDS = (0.5, 1, 10)


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """What Prometheus reads, less when each series began, which the library tells and Prometheus does not keep."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        f"{sample.name} {sample.labels}": sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_prometheus_reads_of_it_what_it_reads_of_the_librarys() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    made = JobHistogram("wait_seconds", "Waits.", BOUNDS, "tier", ["a", "b"])
    ours.register(made)
    library = Histogram("wait_seconds", "Waits.", ["tier"], registry=theirs, buckets=BOUNDS)
    for tier in "ab":
        library.labels(tier)
    for value in (0.0, 0.5, 0.6, 1, 1.0001, 10, 11, 1e9):
        made.series["a"].observe(value)
        library.labels("a").observe(value)
    assert samples(ours) == samples(theirs)
    assert len(samples(ours)) == 2 * (len(BOUNDS) + 1 + 2)
