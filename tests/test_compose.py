"""compose.yaml, as far as it can be judged without Docker: the specification's schema, and what a user counts on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from headrace.settings import Settings, variable

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DEFAULT = {name for name, service in SERVICES.items() if not service.get("profiles")}
OURS = {name for name, service in SERVICES.items() if service["image"].startswith("headrace:")}


def unset(text: str) -> str:
    """What Compose makes of ``${NAME:-default}`` where NAME is not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def published(service: dict[str, Any]) -> list[tuple[str, ...]]:
    """Published ports as (address, host port, container port)."""
    return [tuple(unset(port).rsplit(":", 2)) for port in service.get("ports", [])]


def environment(name: str) -> dict[str, str]:
    return {
        key: unset(str(value)) for key, value in SERVICES[name]["environment"].items() if value is not None
    }


def test_the_file_is_valid_by_the_compose_specification() -> None:
    schema = json.loads((ROOT / "tests/data/compose-spec.json").read_text())
    errors = [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(COMPOSE)]
    assert errors == []


def test_up_starts_the_whole_pipeline_and_neither_gpu_nor_command_line() -> None:
    assert {"kafka", "postgres", "migrate", "topics", "recorder", "worker"} == DEFAULT


@pytest.mark.parametrize("name", ["kafka", "postgres"])
def test_a_server_that_others_wait_for_says_when_it_is_ready(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"]
    assert check["retries"] > 1


@pytest.mark.parametrize("name", ["recorder", "worker", "worker-gpu"])
def test_what_runs_for_good_is_healthy_once_it_is_ready_for_jobs(name: str) -> None:
    port = environment(name)["HEADRACE_HEALTH_PORT"]
    assert f"http://localhost:{port}/ready" in SERVICES[name]["healthcheck"]["test"]


@pytest.mark.parametrize("name", ["recorder", "worker", "worker-gpu"])
def test_what_runs_for_good_waits_for_topics_and_tables_and_comes_back_after_a_crash(name: str) -> None:
    conditions = {other: wait["condition"] for other, wait in SERVICES[name]["depends_on"].items()}
    assert conditions == {
        "kafka": "service_healthy",
        "postgres": "service_healthy",
        "migrate": "service_completed_successfully",
        "topics": "service_completed_successfully",
    }
    assert SERVICES[name]["restart"] == "unless-stopped"


@pytest.mark.parametrize(("name", "server"), [("migrate", "postgres"), ("topics", "kafka")])
def test_a_one_shot_waits_for_its_server_and_is_not_restarted(name: str, server: str) -> None:
    assert SERVICES[name]["depends_on"] == {server: {"condition": "service_healthy"}}
    assert "restart" not in SERVICES[name]


def test_every_dependency_can_meet_its_condition() -> None:
    for name, service in SERVICES.items():
        for other, wait in service.get("depends_on", {}).items():
            assert other in DEFAULT, f"{name} waits for {other}, which a plain up does not start"
            if wait["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other]


def test_the_gpu_worker_reserves_a_device_and_has_an_image_of_its_own() -> None:
    worker = SERVICES["worker-gpu"]
    assert worker["profiles"] == ["gpu"]
    assert worker["build"]["args"] == {"DEVICE": "gpu"}
    assert worker["image"] != SERVICES["worker"]["image"]
    assert worker["environment"]["HEADRACE_DEVICE"] == "cuda"
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert device["driver"] == "nvidia"


def test_one_image_serves_everything_that_needs_no_gpu() -> None:
    assert {SERVICES[name]["image"] for name in OURS - {"worker-gpu"}} == {"headrace:cpu"}


def test_each_image_of_ours_is_built_once_and_asked_of_no_registry() -> None:
    built = {name: SERVICES[name]["image"] for name in OURS if "build" in SERVICES[name]}
    assert built == {"migrate": "headrace:cpu", "worker-gpu": "headrace:gpu"}
    assert {SERVICES[name]["pull_policy"] for name in OURS} == {"never"}


def test_no_two_services_publish_one_port_and_all_stay_on_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in published(service)]
    assert ports
    assert len({host for _, host, _ in ports}) == len(ports)
    assert {address for address, _, _ in ports} == {"127.0.0.1"}


def test_foreign_images_are_pinned_to_a_major_version_at_least() -> None:
    foreign = {name: SERVICES[name]["image"] for name in SERVICES.keys() - OURS}
    assert foreign
    for name, image in foreign.items():
        assert re.fullmatch(r"[\w./-]+:\d[\w.-]*", image), f"{name}: {image}"


def test_the_broker_is_of_the_version_that_the_tests_run_against() -> None:
    (version,) = re.findall(
        r"<kafka.version>(.+)</kafka.version>", (ROOT / "tests/broker/pom.xml").read_text()
    )
    assert SERVICES["kafka"]["image"] == f"apache/kafka:{version}"


def test_the_only_password_is_the_demo_database_s() -> None:
    secret = re.compile(r"password|passwd|secret|token|api_?key", re.IGNORECASE)
    given = {
        (name, key): value
        for name in SERVICES
        for key, value in environment(name).items()
        if secret.search(key) or re.search(r"//[^/]*:[^/]*@", value)
    }
    assert given.pop(("postgres", "POSTGRES_PASSWORD")) == "headrace"
    assert {key for _, key in given} == {"DATABASE_URL"}


def test_our_services_reach_the_broker_and_the_database_that_this_file_starts() -> None:
    kafka, postgres = environment("kafka"), environment("postgres")
    advertised = dict(address.split("://") for address in kafka["KAFKA_ADVERTISED_LISTENERS"].split(","))
    user, password, database = (postgres[f"POSTGRES_{key}"] for key in ("USER", "PASSWORD", "DB"))
    for name in OURS:
        assert environment(name)["KAFKA_BOOTSTRAP_SERVERS"] == advertised["INSIDE"]
        assert environment(name)["DATABASE_URL"] == f"postgresql://{user}:{password}@postgres:5432/{database}"


def test_a_program_on_this_machine_is_sent_back_to_the_published_port() -> None:
    kafka = environment("kafka")
    listeners = dict(address.split("://:") for address in kafka["KAFKA_LISTENERS"].split(","))
    advertised = dict(address.split("://") for address in kafka["KAFKA_ADVERTISED_LISTENERS"].split(","))
    ((_, host, container),) = published(SERVICES["kafka"])
    assert container == listeners["HOST"]
    assert advertised["HOST"] == f"localhost:{host}"


def test_every_listener_of_the_broker_has_a_protocol_and_a_port_of_its_own() -> None:
    kafka = environment("kafka")
    listeners = dict(address.split("://:") for address in kafka["KAFKA_LISTENERS"].split(","))
    protocols = dict(entry.split(":") for entry in kafka["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(","))
    assert listeners.keys() == protocols.keys()
    assert len(set(listeners.values())) == len(listeners)
    assert kafka["KAFKA_CONTROLLER_QUORUM_VOTERS"].endswith(
        f":{listeners[kafka['KAFKA_CONTROLLER_LISTENER_NAMES']]}"
    )


def test_data_and_models_outlive_a_container() -> None:
    mounts = {name: service.get("volumes", []) for name, service in SERVICES.items()}
    used = {mount.split(":")[0] for service in mounts.values() for mount in service} - {"."}
    assert used == COMPOSE["volumes"].keys()
    (cache,) = re.findall(r"XDG_CACHE_HOME=(\S+)", (ROOT / "deploy/Dockerfile").read_text())
    assert f"cache:{cache}" in mounts["worker"]
    assert f"cache:{cache}" in mounts["worker-gpu"]


def test_the_command_line_sees_the_files_of_this_folder() -> None:
    (workdir,) = re.findall(r"^WORKDIR (/work)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert f".:{workdir}:ro" in SERVICES["headrace"]["volumes"]


def test_a_worker_gets_longer_to_stop_than_its_own_grace_time() -> None:
    grace = Settings.model_fields["grace_seconds"].default
    for name in ("worker", "worker-gpu"):
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > grace


def test_every_setting_given_to_our_services_exists() -> None:
    known = {variable(field) for field in Settings.model_fields} | {"LOG_LEVEL", "HF_TOKEN"}
    for name in OURS:
        assert SERVICES[name]["environment"].keys() <= known


def test_the_image_runs_as_a_user_other_than_root() -> None:
    users = re.findall(r"^USER (\S+)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert users
    assert users[-1] not in {"root", "0"}


def test_the_image_holds_every_package() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    packages = {path.name for path in (ROOT / "headrace").iterdir() if path.is_symlink()}
    assert packages
    assert {f"!{name}" for name in packages} <= set(ignored)
