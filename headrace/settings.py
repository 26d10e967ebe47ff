"""What the environment says: the one place that reads it.

The command line turns a ``Settings`` into plain values for worker, client and ledger; none of them looks at the
environment. ``KAFKA_BOOTSTRAP_SERVERS`` and ``DATABASE_URL`` keep the names that other tools use; everything else is
``HEADRACE_<FIELD>``, and ``LOG_LEVEL`` counts where ``HEADRACE_LOG_LEVEL`` is not given.
"""

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

PREFIX = "HEADRACE_"
KAFKA_PREFIX = "HEADRACE_KAFKA_"

# A broker as librdkafka reads it. It takes a scheme as well, and says of one that is not its own "transport failure".
BROKER = re.compile(r"(\[[^\]\s]+\]|[^\[\]\s:/@]+):([0-9]{1,5})")

# librdkafka's properties that are not passed through, and what to set instead or why. With one group for all, workers and
# recorder, which share partitions out in different ways, would keep each other out of it.
_BROKERS = "name the brokers in KAFKA_BOOTSTRAP_SERVERS"
OURS_TO_GIVE = {
    "bootstrap.servers": _BROKERS,
    "metadata.broker.list": _BROKERS,
    "group.id": "groups are named after HEADRACE_TOPIC_PREFIX and HEADRACE_POOL",
    "auto.offset.reset": "a new group begins with the oldest job, and would lose some if it began with any other",
}

# What LOG_LEVEL may say, which is set for other programs too and knows more levels. Anything else is none of ours.
Level = Literal["debug", "info", "warning", "error"]
_LEVELS: dict[str, Level] = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
    "critical": "error",
    "fatal": "error",
}

CommaSeparated = Annotated[tuple[str, ...], NoDecode]


def kafka_properties() -> dict[str, str]:
    """librdkafka properties passed through: ``HEADRACE_KAFKA_SECURITY_PROTOCOL`` is ``security.protocol``."""
    return {
        name.removeprefix(KAFKA_PREFIX).lower().replace("_", "."): value
        for name, value in os.environ.items()
        if name.startswith(KAFKA_PREFIX) and value
    }


def default_state_dir() -> Path:
    """``$XDG_STATE_HOME/headrace``, or ``~/.local/state/headrace``."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "headrace"


class TierSettings(BaseModel):
    """One tier's knobs; None leaves the default, which depends on the tier's place."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    floor: float | None = Field(default=None, ge=0, lt=1)
    promote_after_seconds: float | None = Field(default=None, gt=0, description="inf: never")
    reserve: float | None = Field(default=None, ge=0, lt=1)
    preempts: bool | None = None
    max_preemptions: int | None = Field(default=None, ge=0)
    tenant_limit: int | None = Field(default=None, ge=1)
    prefetch: int | None = Field(default=None, ge=1, le=1_000_000)


class Settings(BaseSettings):
    """Every knob, with its default. Tokens and seconds unless the name says otherwise."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", env_ignore_empty=True, extra="ignore", frozen=True
    )

    kafka_bootstrap_servers: str | None = Field(
        None,
        validation_alias="KAFKA_BOOTSTRAP_SERVERS",
        description="host:port of the brokers, comma separated",
    )
    database_url: str | None = Field(
        None, validation_alias="DATABASE_URL", description="postgresql://user:password@host/database"
    )
    kafka: dict[str, str] = Field(
        default_factory=kafka_properties,
        validation_alias="HEADRACE_KAFKA",
        description="further librdkafka properties, each as HEADRACE_KAFKA_<NAME>, e.g. HEADRACE_KAFKA_SASL_MECHANISM",
    )

    topic_prefix: str = Field(
        "headrace", description="topics are <prefix>.jobs.v1.<tier>, <prefix>.results.v1, ..."
    )
    pool: str | None = Field(
        None, description="the pool of workers a worker belongs to and a client submits to"
    )
    tiers: CommaSeparated = Field(
        ("interactive", "standard", "bulk"), description="tiers, most urgent first, comma separated"
    )
    tier: dict[str, TierSettings] = Field(
        default_factory=dict,
        description="how one tier is served, each knob by itself, e.g. HEADRACE_TIER__BULK__FLOOR; see Tiers below",
    )
    tenant: str = Field("default", description="tenant of jobs that name none")

    model: str | None = Field(
        None, description="directory or hub id; without one, SmolLM2-135M-Instruct is fetched and cached"
    )
    model_names: CommaSeparated = Field(
        (),
        description="further names that jobs may call the model by, besides its hub id or its directory's name",
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1, ...; auto: cuda where there is one, else cpu")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="of weights and KV cache"
    )
    memory_fraction: float = Field(
        0.9, ge=0.05, le=0.98, description="of the card, for weights, work and KV cache"
    )
    kv_tokens: int | None = Field(
        None, gt=0, description="tokens the KV cache holds; default: what memory allows"
    )
    max_context: int | None = Field(
        None,
        gt=0,
        description="longest prompt plus answer, no more than the model takes; default: the model's",
    )
    max_slots: int | None = Field(
        None,
        gt=0,
        le=65_536,
        description="sequences that run at once, as far as the KV cache holds them; default: 2048 on CUDA, 64 on the CPU",
    )
    max_batched_tokens: int | None = Field(
        None,
        gt=0,
        description="tokens of one engine step, no fewer than its slots; default: 8192 on CUDA, 256 on the CPU",
    )

    batch_invariant: bool = Field(
        False,
        description="the same bits of every answer, whatever else the engine computes beside it; slower",
    )

    chat_template: Path | None = Field(
        None, description="a file with a chat template (Jinja) in place of the model's own"
    )
    tool_form: Literal["auto", "hermes", "llama3", "mistral"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template says"
    )

    prefetch: int | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="jobs a worker holds of each tier, from fetched to confirmed; default: four times as many as in flight",
    )
    max_in_flight: int | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="jobs a worker has in its engine, those waiting there included; default: an eighth more than its engine"
        " runs at once, 256 at least",
    )
    group_protocol: Literal["classic", "consumer"] = Field(
        "classic",
        description="of a worker's consumer groups; consumer is KIP-848, for Kafka 4.0 and newer; the embedded broker has it not",
    )
    alive_seconds: float = Field(
        15.0, gt=0, le=86_400, description="how long after its last heartbeat a worker counts as dead"
    )
    grace_seconds: float = Field(
        30.0, ge=0, description="how long a stopping worker lets running jobs finish"
    )
    result_store: str | None = Field(
        None,
        description="directory, or s3://bucket/prefix (gs, az), of results too large for a message; workers and readers alike",
    )
    max_result_bytes: int = Field(
        900_000,
        ge=1000,
        description="of a result as a Kafka message; keep it 100 KB below what the topic takes",
    )
    dead_letter_limit: int = Field(
        1000,
        ge=0,
        description="dead letters a minute (and a tenth of what ends), or ten times as many an hour (and a hundredth), beyond"
        " which a worker pauses; 0: no limit",
    )
    keep_days: int = Field(
        90,
        ge=1,
        le=36_500,
        description="how long the recorder keeps ended jobs in the table; longer than the topics keep records",
    )
    health_port: int | None = Field(
        None, ge=0, le=65535, description="serves /live, /ready, /status and /metrics; 0: any port"
    )
    log_level: Level = Field(
        default_factory=lambda: _LEVELS.get(os.environ.get("LOG_LEVEL", "").lower(), "info"),
        description="debug, info, warning or error, in any case; prompts only ever at debug; without it LOG_LEVEL counts, else info",
    )
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="auto: text on a terminal, else json"
    )

    state_dir: Path = Field(
        default_factory=default_state_dir,
        description="where `headrace local` keeps its logs and its state; default: ~/.local/state/headrace",
    )

    @field_validator("kafka_bootstrap_servers")
    @classmethod
    def _brokers(cls, value: str | None) -> str | None:
        """Each entry a host and a port, without the blanks around them."""
        entries = [] if value is None else [entry.strip() for entry in value.split(",")]
        for entry in entries:
            found = BROKER.fullmatch(entry)
            if found is None or not 0 < int(found[2]) < 65_536:
                raise ValueError(
                    f"{entry!r} is not host:port; several are separated by one comma, e.g. kafka-1:9092,kafka-2:9092"
                )
        return ",".join(entries) or None

    @field_validator("tiers", "model_names", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part for item in value.split(",") if (part := item.strip()))
        return value

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("tiers")
    @classmethod
    def _some_tier(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("name at least one tier, e.g. standard")
        return value

    @model_validator(mode="after")
    def _ours_to_give(self) -> Self:
        for name in self.kafka.keys() & OURS_TO_GIVE.keys():
            raise ValueError(f"{kafka_variable(name)} is no setting: {OURS_TO_GIVE[name]}")
        return self

    @model_validator(mode="after")
    def _no_other_tiers(self) -> Self:
        for name in self.tier.keys() - {_in_a_variable(tier) for tier in self.tiers}:
            raise ValueError(
                f"{PREFIX}TIER__{name.upper()}__... is about no tier; there are {', '.join(self.tiers)}"
            )
        return self

    def unknown_variables(self) -> dict[str, str | None]:
        """Variables that are named like settings and set nothing, each with the name that was probably meant."""
        known = {variable(field) for field in Settings.model_fields}
        knobs = {tier_variable(tier, knob) for tier in self.tiers for knob in TierSettings.model_fields}
        return {
            name: next(iter(get_close_matches(name.upper(), sorted(known | knobs), n=1, cutoff=0.8)), None)
            for name in sorted(os.environ)
            if name.upper().startswith(PREFIX)
            and name.upper() not in known
            and not name.upper().startswith(f"{variable('tier')}__")
            and not name.startswith(KAFKA_PREFIX)
        }

    def of_tier(self, name: str) -> TierSettings:
        """What is set for one of ``tiers``."""
        return self.tier.get(_in_a_variable(name), TierSettings())


def variable(field: str, *below: str | int) -> str:
    """The environment variable that sets ``field``, or what lies ``below`` in it."""
    alias = Settings.model_fields[field].validation_alias
    name = alias if isinstance(alias, str) else f"{PREFIX}{field.upper()}"
    return "__".join([name, *(str(part).upper() for part in below)])


def kafka_variable(name: str) -> str:
    """The environment variable that sets a property of librdkafka's."""
    return KAFKA_PREFIX + name.upper().replace(".", "_")


def tier_variable(tier: str, knob: str) -> str:
    """The environment variable that sets one knob of one tier."""
    return variable("tier", _in_a_variable(tier), knob)


def _in_a_variable(tier: str) -> str:
    """A tier's name as a variable's name can hold it."""
    return tier.lower().replace("-", "_").replace(".", "_")


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with ``changes``, for a child that reads its own ``Settings``."""
    return {**os.environ, **changes}
