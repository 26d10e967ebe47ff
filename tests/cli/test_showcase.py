"""What the demo prints of a batch's results."""

from uuid import UUID

import pytest

from headrace.cli.showcase import _answer
from headrace.schemas import Choice, JobKind, JobResult, JobState
from headrace.schemas.result import Score


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ({"choices": [Choice(text="Paris", finish_reason="stop")]}, "Paris"),
        (
            {
                "kind": JobKind.SCORE,
                "scores": [Score(index=n, logprob=-n - 0.5, tokens=1, is_greedy=False) for n in range(2)],
            },
            "scores -0.50, -1.50",
        ),
        ({"kind": JobKind.EMBEDDING, "embedding": [0.6, 0.8]}, "embedding [0.6, 0.8]"),
        ({}, "kept apart, being too large for a message"),
    ],
    ids=["answer", "scores", "embedding", "kept apart"],
)
def test_every_kind_of_result_has_a_line(found: dict[str, object], shown: str) -> None:
    assert _answer(JobResult(id=UUID(int=1), state=JobState.SUCCEEDED, **found)) == shown
