"""SmolLM2-135M-Instruct for tests: the same directory that the demo uses."""

from pathlib import Path

from headrace.local.model import default_model


def path() -> Path:
    """Its directory; fetched and converted once into the user's cache."""
    return default_model()
