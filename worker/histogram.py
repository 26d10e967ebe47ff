"""A histogram for what is observed of every job: the client library's takes two locks and four calls for each."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Observed:
    """One series. Written by one thread; who reads meanwhile may miss the latest observation.

    bounds: the buckets' upper ends, ascending; each holds its end, and what lies beyond the last is counted too.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one more."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class JobHistogram(Collector):
    """A metric with one label. ``series``: what was observed, by the label's value; each is there from the start."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], label: str, values: Iterable[str]
    ) -> None:
        self._name, self._text, self._label = name, text, label
        self._ends = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self.series = {value: Observed(bounds) for value in values}

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for value, observed in self.series.items():
            buckets = list(zip(self._ends, accumulate(observed.counts), strict=True))
            family.add_metric([value], buckets, observed.sum)
        yield family
