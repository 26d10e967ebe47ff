"""Nothing that we read may bring code along: no pickle, and no Python out of a checkpoint."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "headrace",
    "engine",
    "kernels",
    "worker",
    "ledger",
    "client",
    "schemas",
    "migrations",
    "store",
    "bench",
)
SOURCES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not any(folder.is_symlink() for folder in path.parents)
)
RUNS_WHAT_IT_READS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Calls of anything that ends in this name: ``torch.load`` for ``load``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name:
            yield node


def given(call: ast.Call, argument: str) -> object:
    """A literal keyword argument; None where it is not there or no literal."""
    for keyword in call.keywords:
        if keyword.arg == argument and isinstance(keyword.value, ast.Constant):
            return keyword.value.value
    return None


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_tree_is_looked_at() -> None:
    assert {"engine/convert.py", "engine/tokenizer.py", "worker/worker.py"} <= set(map(named, SOURCES))


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_nothing_is_unpickled_but_tensors_and_no_checkpoint_runs_code(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for call in calls(tree, "load"):
        if ast.unparse(call.func) == "torch.load":
            assert given(call, "weights_only") is True, (
                f"line {call.lineno}: torch.load without weights_only=True"
            )
    for call in calls(tree, "from_pretrained"):
        trusted = next((each for each in call.keywords if each.arg == "trust_remote_code"), None)
        assert trusted is None or given(call, "trust_remote_code") is False, f"line {call.lineno}"
    used = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in RUNS_WHAT_IT_READS
    }
    assert used <= {"pickle.UnpicklingError"}  # which torch raises when it refuses a file
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported & RUNS_WHAT_IT_READS <= {"pickle"}
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not froms & RUNS_WHAT_IT_READS
    assert not any(
        ast.unparse(call.func) in ("eval", "exec") for name in ("eval", "exec") for call in calls(tree, name)
    )
