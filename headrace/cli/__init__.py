"""The command line: Typer over the layers below, one module a group of commands.

Modules import what a command needs inside it, so that `headrace --help` costs neither torch nor Kafka.
"""

from headrace.cli.main import app

__all__ = ["app"]
