"""What ends up on a user's machine: the wheel, its names, and what importing a part of it pulls in."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.name for path in (ROOT / "headrace").iterdir() if path.is_symlink())
BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


def python(*arguments: object, cwd: Path, path: Path | None = None) -> str:
    """Run Python in ``cwd``, our checkout not on its path by accident; return what it printed."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_context() -> list[str]:
    """What the image's build sees of the checkout: the lines that .dockerignore lets in."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line.removeprefix("!") for line in lines if line.startswith("!")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the build context, links kept as links."""
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in build_context():
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, tree / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, tree / name)
    python("-c", BUILD, dist, cwd=tree)
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel unpacked, as an installer would leave it."""
    target = tmp_path_factory.mktemp("site")
    with ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def test_the_checkout_has_the_packages_that_these_tests_are_about() -> None:
    assert {"client", "engine", "kernels", "ledger", "migrations", "schemas", "store", "worker"} == set(
        PACKAGES
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_every_module_of(package: str, wheel: Path) -> None:
    modules = {path.relative_to(ROOT): path for path in (ROOT / package).rglob("*.py")}
    with ZipFile(wheel) as archive:
        packed = {
            name: archive.read(name) for name in archive.namelist() if name.startswith(f"headrace/{package}/")
        }
    assert modules
    for relative, path in modules.items():
        assert packed[f"headrace/{relative.as_posix()}"] == path.read_bytes()


def test_the_wheel_holds_files_and_no_links(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    assert modes
    assert [name for name, mode in modes.items() if stat.S_ISLNK(mode)] == []


def test_the_wheel_takes_one_name_in_site_packages(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"headrace"}


def test_the_wheel_carries_the_licence_and_the_command(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert "headrace = headrace.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_an_installed_headrace_finds_its_migrations(installed: Path, tmp_path: Path) -> None:
    code = """
import headrace, sys
from alembic.config import Config
from alembic.script import ScriptDirectory
assert headrace.__file__.startswith(sys.argv[1]), headrace.__file__
config = Config()
config.set_main_option("script_location", "headrace:migrations")
print(*ScriptDirectory.from_config(config).get_heads())
"""
    heads = python("-c", code, installed, cwd=tmp_path, path=installed).split()
    assert len(heads) == 1


@pytest.mark.parametrize("package", PACKAGES)
def test_outside_the_checkout_no_bare_name_leads_to(package: str, tmp_path: Path) -> None:
    code = "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); print(s.origin if s else None)"
    origin = python("-c", code, package, cwd=tmp_path).strip()
    assert not origin.startswith(str(ROOT))


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import headrace", {"torch", "pydantic", "confluent_kafka", "sqlalchemy"}),
        (
            "import headrace.engine",
            {"pydantic", "confluent_kafka", "sqlalchemy", "psycopg", "headrace.schemas"},
        ),
        ("from headrace import Engine", {"pydantic", "confluent_kafka", "sqlalchemy"}),
        ("import headrace.kernels", {"transformers", "pydantic", "confluent_kafka", "sqlalchemy"}),
        ("import headrace.client", {"torch", "transformers", "sqlalchemy"}),
        ("from headrace import Client", {"torch", "transformers"}),
        ("import headrace.ledger", {"torch", "transformers"}),
        ("from headrace.worker import Worker", {"torch", "transformers"}),
        ("import headrace.worker.admission", {"torch", "pydantic", "confluent_kafka", "sqlalchemy"}),
        (
            "import headrace.engine.text",
            {"torch", "transformers", "pydantic", "confluent_kafka", "sqlalchemy"},
        ),
        ("from headrace.local.model import default_model", {"torch", "transformers"}),
        ("import headrace.cli", {"torch", "transformers", "confluent_kafka", "sqlalchemy"}),
        ("import headrace.schemas", {"torch", "transformers", "sqlalchemy"}),
    ],
)
def test_importing_one_part_leaves_the_others_alone(statement: str, absent: set[str], tmp_path: Path) -> None:
    code = f"{statement}\nimport sys; print(*sys.modules)"
    loaded = set(python("-c", code, cwd=tmp_path).split())
    assert "headrace" in loaded
    assert loaded & absent == set()


def test_imports_between_packages_only_point_downwards() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    assert "0 broken" in python("-c", code, cwd=ROOT)
