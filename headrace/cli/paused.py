"""Why jobs wait though a worker lives: it says so itself, where it can be asked."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.settings import Settings

PATIENCE_S = 2.0


def paused(settings: "Settings") -> str | None:
    """Why the worker behind HEADRACE_HEALTH_PORT of this machine takes no jobs; None where it does, or none is there."""
    import json
    from http.client import HTTPException
    from urllib.request import ProxyHandler, build_opener

    if not settings.health_port:
        return None
    address = f"http://127.0.0.1:{settings.health_port}/status"
    try:
        with build_opener(ProxyHandler({})).open(address, timeout=PATIENCE_S) as answer:
            said = json.load(answer)
    except (OSError, HTTPException, ValueError):
        return None
    why = said.get("paused") if isinstance(said, dict) else None  # whatever else listens there
    return None if why is None else f"the worker on port {settings.health_port} takes no jobs: {why}"
