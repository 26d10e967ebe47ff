"""Whether a worker starts with these settings, told before anything is started or loaded for nothing."""

from typing import TYPE_CHECKING

from headrace.cli import context
from headrace.cli.engine import engine_config, served_name
from headrace.cli.kafka_clients import (
    NOWHERE,
    check_other_clients,
    check_recorder_client,
    check_worker_clients,
)
from headrace.cli.serve import worker_config

if TYPE_CHECKING:
    from headrace.settings import Settings


def check_worker_settings(settings: "Settings") -> None:
    """Raise Failure, EngineError or KafkaException where no worker starts with these: what it checks before it loads a model.

    Kafka's properties are shared, so that they are checked for the recorder and the commands as well.
    """
    from headrace.engine.text import read_template

    context.must_know_the_group_protocol(settings)
    # Neither an address nor the default model is needed for a look: there may be no broker yet, and none is fetched.
    unopened = settings.model_copy(
        update={"kafka_bootstrap_servers": NOWHERE, "model": served_name(settings)}
    )
    config = worker_config(unopened)
    read_template(engine_config(unopened).chat_template)
    check_worker_clients(config)
    check_recorder_client(settings.kafka)
    check_other_clients(settings)
