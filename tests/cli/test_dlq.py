"""Which dead letters may be sent back: those whose job has not run again since."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from rows import job

from headrace.cli.dlq import _has_run_again
from headrace.schemas import ErrorCode


@pytest.mark.parametrize(
    ("code", "again"),
    [(ErrorCode.ENGINE_FAILURE, True), (ErrorCode.INTERNAL_ERROR, True), (ErrorCode.INVALID_JSON, False)],
)
def test_a_job_that_died_and_ran_again_is_passed_over_whichever_failure_of_ours_it_was(
    code: ErrorCode, again: bool
) -> None:
    row = job()
    ledger = cast(Any, SimpleNamespace(job=lambda id: SimpleNamespace(run=row.run)))
    letter = cast(Any, SimpleNamespace(code=str(code)))
    assert _has_run_again(ledger, row, letter) is again
