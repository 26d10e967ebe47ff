"""Python's collector of cycles, told how a process that stays lives."""

import gc

# More made than freed since the last look: those of some 5,000 jobs. Python's own 700 are those of twenty.
NEW_OBJECTS = 200_000


def collect_seldom() -> None:
    """Look for cycles seldom, and never among what is there now.

    A worker or recorder holds thousands of records without cycles: at Python's own thresholds, walking them over and
    over took a sixth of a worker's CPU and a quarter of a recorder's (bench/LOG.md). Call it when everything is imported.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 20, 50)
