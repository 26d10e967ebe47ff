"""What a pipeline imports to submit jobs and follow their results."""

from headrace.client.client import Client, Submission
from headrace.client.errors import (
    BrokerUnreachable,
    ClientError,
    DeliveryFailed,
    InvalidLine,
    InvalidName,
    NoJobs,
    TopicMissing,
)
from headrace.client.lines import Line, Problem, Repeated

__all__ = [
    "BrokerUnreachable",
    "Client",
    "ClientError",
    "DeliveryFailed",
    "InvalidLine",
    "InvalidName",
    "Line",
    "NoJobs",
    "Problem",
    "Repeated",
    "Submission",
    "TopicMissing",
]
