"""How long-running commands log: to stderr, as text on a terminal and as JSON elsewhere.

The layers below use the standard library's logging with ``extra`` for figures; here each record gets its form.
"""

import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.settings import Settings

# They speak of every request they make, at INFO.
CHATTY = ("httpx", "httpcore", "urllib3", "huggingface_hub", "transformers", "alembic")


def configure(settings: "Settings") -> None:
    """Set up the root logger."""
    import structlog

    level = settings.log_level.upper()
    as_json = settings.log_format == "json" or (settings.log_format == "auto" and not sys.stderr.isatty())
    chain: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: list[Any] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if as_json:
        render += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        render += [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=chain, processors=render))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))
