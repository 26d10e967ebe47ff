"""What a pipeline imports to submit jobs and follow their results."""

from headrace.client.client import Client, Submission
from headrace.client.errors import (
    BrokerUnreachable,
    ClientError,
    DeliveryFailed,
    InvalidLine,
    InvalidName,
    TopicMissing,
)
from headrace.client.lines import Line, Problem

__all__ = [
    "BrokerUnreachable",
    "Client",
    "ClientError",
    "DeliveryFailed",
    "InvalidLine",
    "InvalidName",
    "Line",
    "Problem",
    "Submission",
    "TopicMissing",
]
