"""A panic of a library in Rust costs the request that provokes it, and nothing else."""

import json
from typing import Any

import pytest
import tokenizers
from asking import run
from scripted_engine import ScriptedEngine
from small_tokenizers import transformers_tokenizer

from headrace.engine.panics import LibraryPanic, panics_as_errors
from headrace.engine.request import Pooling
from headrace.engine.text import LocalTextEngine
from headrace.engine.text_engine import RequestError, TextRequest
from headrace.engine.tokenizer import Tokenizer

LONG = "0123456789" * 3


def panicking_on_long_texts() -> Tokenizer:
    """A tokenizer that really panics, on texts of more than 16 tokens: its file asks for what its library asserts not to be."""
    tokenizer = Tokenizer(transformers_tokenizer("byte_level"))
    state = json.loads(tokenizer.to_json())
    state["truncation"] = {
        "direction": "Right",
        "max_length": 16,
        "strategy": "LongestFirst",
        "stride": 20,
    }
    tokenizer._backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    return tokenizer


def test_a_panic_is_raised_as_an_error() -> None:
    tokenizer = panicking_on_long_texts()
    assert tokenizer.encode("wheel")
    with pytest.raises(LibraryPanic) as raised:
        tokenizer.encode(LONG)
    assert type(raised.value.__cause__).__name__ == "PanicException"
    assert not isinstance(raised.value.__cause__, Exception)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_what_is_no_panic_passes_as_it_is(kind: type[BaseException]) -> None:
    with pytest.raises(kind), panics_as_errors:
        raise kind


@pytest.mark.parametrize(
    ("doing", "fields"),
    [
        ("reading the prompt", {"prompt": LONG}),
        ("reading the prompt", {"messages": [{"role": "user", "content": LONG}]}),
        ("preparing the request", {"prompt": "go", "bad_words": (LONG,)}),
        ("preparing the request", {"prompt": "go", "continuations": [LONG]}),
        ("preparing the request", {"inputs": ["go", LONG], "pooling": Pooling.LAST}),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_a_text_that_makes_the_tokenizer_panic_fails_its_request_alone(
    doing: str, fields: dict[str, Any]
) -> None:
    tokenizer = panicking_on_long_texts()
    said = tokenizer.encode_rendered(["Yes."])[0]
    engine = LocalTextEngine(ScriptedEngine(lambda request: said, len(tokenizer.pieces())), tokenizer)
    good = [TextRequest(name, prompt="go") for name in "ab"]
    ended = run(engine, [good[0], TextRequest("bad", **fields), good[1]])
    assert ended["bad"].error == RequestError("internal_error", f"{doing} failed with LibraryPanic")
    assert [ended[name].choices[0].text for name in "ab"] == ["Yes.", "Yes."]
