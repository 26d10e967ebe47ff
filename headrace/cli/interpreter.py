"""Python's interpreter, told how a process that stays lives: how often to look for cycles, how long a thread's turn is."""

import gc
import sys

# More made than freed since the last look: those of some 5,000 jobs. Python's own 700 are those of twenty.
NEW_OBJECTS = 200_000
TURN_S = 0.0005


def collect_seldom() -> None:
    """Look for cycles seldom, and never among what is there now.

    A worker or recorder holds thousands of records without cycles: at Python's own thresholds, walking them over and
    over took a sixth of a worker's CPU and a quarter of a recorder's (bench/LOG.md). Call it when everything is imported.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 20, 50)


def take_short_turns() -> None:
    """Let threads take turns of half a millisecond instead of Python's five.

    For the recorder: one thread reads records without a pause while another talks to Postgres, and would wait five
    milliseconds for the interpreter after each of Postgres' answers.
    """
    sys.setswitchinterval(TURN_S)
