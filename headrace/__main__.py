"""The ``headrace`` command, which is ``python -m headrace`` too."""

import sys


def main() -> None:
    """Run the command line. A Ctrl-C that comes while it is still being imported ends it as any other does."""
    try:
        from headrace.cli import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)  # Exit.INTERRUPTED, which may not be imported yet


if __name__ == "__main__":
    main()
