"""Whether a worker starts with these settings, told before anything is started or loaded for nothing."""

from typing import TYPE_CHECKING

from headrace.cli.engine import engine_config, served_name
from headrace.cli.tiers import tiers

if TYPE_CHECKING:
    from headrace.settings import Settings


def check_worker_settings(settings: "Settings") -> None:
    """Raise Failure or EngineError where no worker starts with these: what it checks before it loads a model."""
    from headrace.engine.text import read_template

    tiers(settings)
    # The model by its name: the default one is not fetched for a look.
    engine = engine_config(settings.model_copy(update={"model": served_name(settings)}))
    read_template(engine.chat_template)
