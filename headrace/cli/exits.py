"""Exit codes: the one table. docs/cli.md and `headrace --help` show it."""

from enum import IntEnum


class Exit(IntEnum):
    """How a command ended; ``meaning`` is for people."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> "Exit":
        exit_ = int.__new__(cls, code)
        exit_._value_ = code
        exit_.meaning = meaning
        return exit_

    OK = 0, "Done as asked. Jobs that failed on their own account do not change this: each has its own state."
    BUG = 1, "A defect in Headrace: please report the traceback."
    USAGE = 2, "The command line, the environment or an input file is wrong."
    NOT_FOUND = 3, "There is no such batch, job, file or model."
    UNAVAILABLE = 4, "Broker or database cannot be reached; trying again later may help."
    NOT_READY = 5, "Something has to be set up first: addresses, migrations, topics, an extra to install."
    REFUSED = (
        6,
        "Not possible as asked: an unsupported model, a file in the way, a full disk, a stack that already runs, a batch or a"
        " key that was used for something else.",
    )
    INTERRUPTED = (
        130,
        "Stopped by Ctrl-C, or by SIGTERM where there is something to bring to an end; other commands die of it (143).",
    )
    PIPE_CLOSED = 141, "Who read the output has read enough, as `head` does."
