"""examples/evaluate: the evaluation harness finds with the engine what it finds with its own Hugging Face backend."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="brings some 45 packages: pip install lm_eval[hf]")
pytest.importorskip("accelerate", reason="the harness's own backend needs it: pip install lm_eval[hf]")

ROOT = Path(__file__).parents[1]
PASSAGE = "A headrace brings water from the river to the wheel, and a tailrace takes it back to the river."


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("headrace_lm", ROOT / "examples/evaluate/headrace_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ours(example: ModuleType, smollm: Path) -> Iterator[Any]:
    """The adapter; closed also when a test fails, since the engine's process would be waited for."""
    with contextlib.closing(
        example.HeadraceLM(str(smollm), device="cpu", dtype="float32", kv_tokens=8192)
    ) as lm:
        yield lm


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_the_harness_finds_the_same_as_with_its_hugging_face_backend(
    example: ModuleType, ours: Any, smollm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    monkeypatch.chdir(ROOT)
    theirs = HFLM(pretrained=str(smollm), device="cpu", dtype="float32", batch_size=8)
    tasks = example.TaskManager(include_path=str(ROOT / "examples/evaluate"))
    found = [
        example.simple_evaluate(model=lm, tasks=["facts"], task_manager=tasks)["results"]["facts"]
        for lm in (ours, theirs)
    ]
    assert found[0]["sample_len"] == 40
    for figure in ("acc,none", "acc_norm,none"):
        assert found[0][figure] == found[1][figure]
        assert 0.25 < found[0][figure] < 1

    def ask(kind: str, *arguments: tuple[object, ...]) -> list[Instance]:
        return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]

    pairs = ask("loglikelihood", ("The capital of France is ", "Paris"), ("", PASSAGE), (PASSAGE, " It was"))
    for (mine, greedy), (other, same) in zip(
        ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True
    ):
        assert mine == pytest.approx(other, abs=2e-3)
        assert greedy is same
    whole = ask("loglikelihood_rolling", (PASSAGE,))
    assert ours.loglikelihood_rolling(whole) == pytest.approx(theirs.loglikelihood_rolling(whole), abs=2e-3)
    options = {"until": ["\n", "."], "max_gen_toks": 16}
    answers = ask(
        "generate_until", (PASSAGE + " A mill", options), ("Question: What is ice?\nAnswer:", options)
    )
    assert ours.generate_until(answers) == theirs.generate_until(answers)
