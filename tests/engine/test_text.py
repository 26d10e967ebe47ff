"""Text requests through a token engine: each ends once, as asked, or with an error that names its field."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from asking import run
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from small_tokenizers import small

from headrace.engine import Engine, EngineConfig
from headrace.engine.answers import Answer
from headrace.engine.errors import EngineDead
from headrace.engine.request import EngineStats, FinishReason, Pooling, Request, SamplingParams
from headrace.engine.text import LocalTextEngine
from headrace.engine.text_engine import RequestError, TextCompletion, TextEngine, TextRequest
from headrace.engine.tokenizer import Tokenizer

TOKENIZER = small("byte_level")
SECRET = "what nobody may read"
STORY = "Once the mill 🙂 ground corn.\nThen it stopped. The end."


def said(text: str) -> list[int]:
    return TOKENIZER.encode_rendered([text])[0]


def scripted(text: str = STORY, **options: Any) -> tuple[LocalTextEngine, ScriptedEngine]:
    tokens = said(text)
    inner = ScriptedEngine(lambda request: tokens, len(TOKENIZER.pieces()), **options)
    return LocalTextEngine(inner, TOKENIZER, model="small"), inner


def one(engine: TextEngine, **fields: Any) -> TextCompletion:
    return run(engine, [TextRequest(id="x", **fields)])["x"]


# -- text in, text out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burst", [1, 3, 1000])
def test_every_form_of_prompt_is_answered(burst: int) -> None:
    engine, inner = scripted(burst=burst)
    ids = said("water")
    ended = run(
        engine,
        [
            TextRequest("p", prompt="water"),
            TextRequest("i", prompt_token_ids=ids),
            TextRequest("m", messages=[{"role": "user", "content": "water"}]),
        ],
    )
    assert {c.choices[0].text for c in ended.values()} == {STORY}
    assert {c.choices[0].finish_reason for c in ended.values()} == {FinishReason.STOP}
    prompts = {r.id: list(r.prompt) for r in inner.seen}
    assert prompts == {"p": [0, *ids], "i": ids, "m": TOKENIZER.encode("[user]water[/][assistant]")}
    assert not any(r.stream for r in inner.seen), "without stop strings nothing is watched"
    assert ended["p"].prompt_tokens == len(ids) + 1
    assert ended["p"].completion_tokens == len(said(STORY))


@pytest.mark.parametrize("burst", [1, 4, 1000])
@pytest.mark.parametrize("overshoot", [0, 2, 50])
def test_a_stop_string_cuts_text_and_tokens_however_late_the_engine_stops(burst: int, overshoot: int) -> None:
    engine, inner = scripted(burst=burst, overshoot=overshoot)
    done = one(engine, prompt="go", stop=("stopped", ".\nThen"))
    choice = done.choices[0]
    assert choice.text == "Once the mill 🙂 ground corn"
    assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, ".\nThen")
    assert choice.token_ids == said(STORY)[: len(choice.token_ids)]
    assert done.completion_tokens == len(choice.token_ids)
    assert TOKENIZER._backend.decode(choice.token_ids).startswith(choice.text)
    assert not TOKENIZER._backend.decode(choice.token_ids[:-1]).startswith(choice.text), "one token too many"
    assert len(inner.finished) <= 1


def test_a_stop_in_the_last_token_beats_the_length_limit() -> None:
    engine, _ = scripted("a b STOP c", burst=1)
    tokens = said("a b STOP c")
    needed = next(n for n in range(len(tokens)) if "STOP" in TOKENIZER._backend.decode(tokens[:n]))
    choice = one(engine, prompt="go", stop=("STOP",), sampling=SamplingParams(max_tokens=needed)).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("a b ", FinishReason.STOP, "STOP")


def test_min_tokens_holds_for_stop_strings() -> None:
    engine, _ = scripted("a.b.c.d")
    done = one(engine, prompt="go", stop=(".",), sampling=SamplingParams(min_tokens=3))
    assert done.choices[0].text == "a.b"


@pytest.mark.parametrize("lag", [0, 2])
def test_stop_strings_are_found_across_preemptions_and_prefix_hits(tmp_path: Path, lag: int) -> None:
    """Tokens that a tiny model draws at random; each answer stops at a piece of what it says when not stopped."""
    vocab = len(TOKENIZER.pieces())
    model = tiny_model.write(tmp_path, vocab_size=vocab)

    def answers(
        stops: dict[str, tuple[str, ...]], kv_tokens: int
    ) -> tuple[dict[str, TextCompletion], EngineStats]:
        config = EngineConfig(
            model=model, weights="random", dtype="float32", device="cpu", block_size=16, max_slots=8, lag=lag,
            kv_tokens=kv_tokens, max_context=128,
        )  # fmt: skip
        inner = Engine(config)
        begin = list(range(2, 36))
        requests = [
            TextRequest(
                str(n),
                prompt_token_ids=[*begin, n + 40],
                stop=stops.get(str(n), ()),
                sampling=SamplingParams(seed=n, max_tokens=60, ignore_eos=True, min_tokens=5),
            )
            for n in range(12)
        ]
        ended = run(LocalTextEngine(inner, TOKENIZER), requests)
        inner.check()
        return ended, inner.stats()

    free, _ = answers({}, kv_tokens=4096)
    texts = {name: done.choices[0].text for name, done in free.items()}
    stops = {name: (text[-12:-8], "never said") for name, text in texts.items()}
    stopped, stats = answers(stops, kv_tokens=256)
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    for name, done in stopped.items():
        choice = done.choices[0]
        assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, stops[name][0])
        assert choice.text == texts[name][: len(choice.text)]
        assert choice.token_ids == free[name].choices[0].token_ids[: len(choice.token_ids)]
        assert stops[name][0] in texts[name][len(choice.text) :][:4]


def test_an_answer_without_its_stop_string_ends_by_itself() -> None:
    engine, inner = scripted()
    choice = one(engine, prompt="go", stop=("never",)).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (STORY, FinishReason.STOP, None)
    assert inner.finished == []


def test_aborted_requests_end_with_what_they_had() -> None:
    engine, _ = scripted()
    engine.add_many([TextRequest("a", prompt="go"), TextRequest("b", prompt="go", stop=("never",))])
    assert engine.poll(0.0) == []
    engine.abort(["a", "b", "nobody"])
    ended = {c.id: c.choices[0] for c in engine.poll(1.0)}
    assert {c.finish_reason for c in ended.values()} == {FinishReason.ABORT}
    assert ended["a"].text == ended["b"].text
    assert STORY.startswith(ended["a"].text)
    assert engine.poll(0.0) == []


@settings(deadline=None)
@given(data=st.data())
def test_watched_answers_are_the_others_cut(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(2, len(TOKENIZER.pieces()) - 1), min_size=1, max_size=40))
    burst, overshoot = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 9))
    stop = data.draw(st.text("the \ufffd🙂", min_size=1, max_size=2))
    inner = ScriptedEngine(lambda r: tokens, len(TOKENIZER.pieces()), burst=burst, overshoot=overshoot)
    engine = LocalTextEngine(inner, TOKENIZER)
    ended = run(engine, [TextRequest("plain", prompt="go"), TextRequest("cut", prompt="go", stop=(stop,))])
    plain, cut = ended["plain"].choices[0].text, ended["cut"].choices[0]
    before, found, _ = plain.partition(stop)
    assert cut.text == before
    assert cut.stop_reason == (stop if found else None)


# -- what is refused ---------------------------------------------------------------------------------------------------

HUGE = 10**400
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "prompt", "missing_field", "give one of"),
    (
        {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
        "messages",
        "invalid_value",
        "only one",
    ),
    ({"prompt": ""}, "prompt", "invalid_value", "must not be empty"),
    ({"prompt": 5}, "prompt", "invalid_type", "must be a string, not 5"),
    ({"prompt": "half \ud83d a pair"}, "prompt", "invalid_text", "surrogate"),
    ({"prompt_token_ids": []}, "prompt_token_ids", "invalid_value", "must not be empty"),
    ({"prompt_token_ids": "12"}, "prompt_token_ids", "invalid_type", "must be a list, not '12'"),
    ({"prompt_token_ids": [5, -1]}, "prompt_token_ids[1]", "invalid_value", "token id from 0 to"),
    ({"prompt_token_ids": [5, 10**6]}, "prompt_token_ids[1]", "invalid_value", "not 1000000"),
    ({"prompt_token_ids": [5, True]}, "prompt_token_ids[1]", "invalid_type", "not true"),
    ({"messages": []}, "messages", "invalid_value", "must not be empty"),
    ({"messages": ["hi"]}, "messages", "invalid_type", "list of objects"),
    ({"messages": [{"role": "refuse", "content": ""}]}, "messages", "invalid_value", "no such role"),
    ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages", "invalid_text", "surrogate"),
    ({"prompt": "wheel " * 600}, "prompt", "context_length_exceeded", "the context holds 512 tokens"),
    ({"prompt_token_ids": [5] * 512}, "prompt_token_ids", "context_length_exceeded", "has 512 tokens"),
    (
        {"prompt_token_ids": [5] * 513, "pooling": Pooling.MEAN},
        "prompt_token_ids",
        "context_length_exceeded",
        "tokens, but",
    ),
    ({"prompt": "x" * 10**6}, "prompt", "context_length_exceeded", "1,000,000 characters"),
    ({"prompt": "a", "priority": 2**40}, "priority", "invalid_value", "32 bits"),
    ({"prompt": "a", "priority": 13}, "priority", "invalid_request", "not liked"),
    ({"prompt": "a", "deadline": math.nan}, "deadline", "invalid_value", "finite"),
    ({"prompt": "a", "stop": ("",)}, "stop[0]", "invalid_value", "1 to 256 characters"),
    ({"prompt": "a", "stop": ("ok", 3)}, "stop[1]", "invalid_type", "must be a string"),
    ({"prompt": "a", "stop": "end"}, "stop", "invalid_type", "must be a list"),
    ({"prompt": "a", "stop": ("x",) * 17}, "stop", "invalid_value", "at most 16"),
    ({"prompt": "a", "stop": ("\ud800",)}, "stop[0]", "invalid_text", "surrogate"),
]
REFUSED_SAMPLING: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", "a number from 0 to 2, not -0.1"),
    ({"temperature": 2.1}, "temperature", "a number from 0 to 2"),
    ({"temperature": math.nan}, "temperature", "not nan"),
    ({"temperature": "hot"}, "temperature", "not 'hot'"),
    ({"temperature": True}, "temperature", "not true"),
    ({"temperature": HUGE}, "temperature", "beyond 64 bits"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.5}, "top_p", "up to 1"),
    ({"top_k": -1}, "top_k", "1 or more; 0 keeps all tokens"),
    ({"top_k": 1.5}, "top_k", "a whole number"),
    ({"min_p": 1.01}, "min_p", "from 0 to 1"),
    ({"max_tokens": 0}, "max_tokens", "from 1 to 2,147,483,647"),
    ({"min_tokens": -1}, "min_tokens", "0 or more"),
    ({"seed": 2**64}, "seed", "64 bits"),
    ({"ignore_eos": "yes"}, "ignore_eos", "true or false"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "must not be above max_tokens (8), but is 9"),
    ({"min_tokens": 600}, "prompt", "needs at least 600"),
    ({"stop_token_ids": (10**6,)}, "stop_token_ids[0]", "token id from 0 to"),
    ({"stop_token_ids": (5,) * 25}, "stop_token_ids", "at most 24"),
    ({"logit_bias": ((10**6, 1.0),)}, "logit_bias.1000000", "is of no token of the model: ids go from 0 to"),
]


@pytest.mark.parametrize(("fields", "param", "code", "says"), REFUSED)
def test_a_bad_request_ends_with_an_error_that_names_its_field(
    fields: dict[str, Any], param: str, code: str, says: str
) -> None:
    engine, inner = scripted()
    done = one(engine, **fields)
    assert done.error is not None
    assert (done.error.param, done.error.code) == (param, code)
    assert says in done.error.message
    assert done.choices == []
    assert inner.seen == []


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED_SAMPLING)
def test_a_bad_sampling_option_is_named_with_what_is_allowed(
    fields: dict[str, Any], param: str, says: str
) -> None:
    engine, inner = scripted()
    error = one(engine, prompt="a", sampling=SamplingParams(**fields)).error
    assert error is not None
    assert error.param == param
    assert says in error.message
    assert inner.seen == []


def test_the_edges_of_what_is_allowed_are_allowed() -> None:
    engine, _ = scripted()
    edges = SamplingParams(
        temperature=2,
        top_p=1,
        top_k=0,
        min_p=1,
        max_tokens=1,
        min_tokens=1,
        seed=-(2**63),
        stop_token_ids=(5,) * 24,
    )
    low = SamplingParams(temperature=0, top_p=1e-9, top_k=1, min_p=0, seed=2**63 - 1, ignore_eos=True)
    assert one(engine, prompt="a", sampling=edges).error is None
    assert one(engine, prompt_token_ids=[5] * 511, sampling=low, stop=("x" * 256,) * 16).error is None


def test_bad_requests_take_no_neighbour_with_them() -> None:
    engine, inner = scripted()
    good = [TextRequest(f"good {n}", prompt="go") for n in range(3)]
    bad = [TextRequest(f"bad {n}", **fields) for n, (fields, *_) in enumerate(REFUSED)]
    mixed = [r for pair in zip(bad, (good * 20)[: len(bad)], strict=True) for r in pair]
    mixed = list({r.id: r for r in mixed}.values())
    ended = run(engine, mixed)
    assert all(ended[r.id].error for r in bad)
    assert [ended[r.id].choices[0].text for r in good] == [STORY] * 3
    assert sorted(r.id for r in inner.seen) == sorted(r.id for r in good)


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [(RecursionError, "internal_error", "failed with RecursionError"), (MemoryError, "out_of_memory", "found no memory left")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("owner", "method", "doing", "is_bad"),
    [
        (Tokenizer, "encode_many", "reading the prompt", lambda _, texts: SECRET in texts),
        (LocalTextEngine, "_token_requests", "preparing the request", lambda _, request, prompt: request.id == "bad"),
        (ScriptedEngine, "add_many", "handing the request to the engine", lambda _, parts: "bad" in [p.id for p in parts]),
        (Answer, "feed", "reading the answer", lambda answer, tokens: answer.request_id == "bad" and answer.index == 1),
        (Answer, "choice", "reading the answer", lambda answer, done: done.id == "bad#1"),
    ],
)  # fmt: skip
def test_a_defect_of_ours_or_a_want_of_memory_fails_the_request_that_meets_it_and_no_other(
    owner: type, method: str, doing: str, is_bad: Callable[..., bool], raised: type[Exception], code: str, told: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    sound = getattr(owner, method)

    def defective(self: object, *args: Any) -> Any:
        if is_bad(self, *args):
            raise raised(SECRET)
        return sound(self, *args)

    monkeypatch.setattr(owner, method, defective)
    caplog.set_level("INFO")
    engine, inner = scripted()
    good = [TextRequest(f"good {n}", prompt="go", stop=("stopped",)) for n in range(2)]
    bad = TextRequest("bad", prompt=SECRET, n=3, stop=("stopped",))
    ended = run(engine, [good[0], bad, good[1]])

    assert ended["bad"].error == RequestError(code, f"{doing} {told}")
    assert ended["bad"].choices == []
    assert [ended[request.id].choices[0].text for request in good] == [STORY.partition("stopped")[0]] * 2
    assert SECRET not in caplog.text
    engine.poll(5.0)
    assert inner.stats().running == 0, "what nobody awaits was aborted"


def test_an_id_in_use_is_refused_and_its_owner_runs_on() -> None:
    engine, _ = scripted()
    engine.add_many([TextRequest("twin", prompt="go"), TextRequest("twin", prompt="again")])
    refused = engine.poll(1.0)
    assert [c.error.code for c in refused if c.error] == ["duplicate_id"]
    ended = engine.poll(5.0)
    assert [(c.id, c.choices[0].text) for c in ended] == [("twin", STORY)]


def test_a_model_without_a_chat_template_fails_chats_alone() -> None:
    tokenizer = small("byte_level", template=False)
    engine = LocalTextEngine(ScriptedEngine(lambda r: said("ok"), len(tokenizer.pieces())), tokenizer)
    chat = TextRequest("chat", messages=[{"role": "user", "content": "hi"}])
    ended = run(engine, [chat, TextRequest("plain", prompt="hi")])
    assert ended["chat"].error is not None
    assert ended["chat"].error.code == "no_chat_template"
    assert ended["plain"].choices[0].text == "ok"


def test_ids_that_the_model_has_no_row_for_are_refused() -> None:
    smaller = said("water")[0]
    engine = LocalTextEngine(ScriptedEngine(lambda r: [], vocab_size=smaller), TOKENIZER)
    error = one(engine, prompt="water").error
    assert error is not None
    assert "vocabulary ends at" in error.message


def test_a_dead_engine_is_told_to_the_caller() -> None:
    engine, inner = scripted()
    engine.add_many([TextRequest("x", prompt="go")])
    inner.dead = True
    with pytest.raises(EngineDead):
        engine.poll(1.0)


def test_an_idle_engine_is_polled_once() -> None:
    engine, _ = scripted()
    assert engine.poll(3600.0) == []


def test_everything_else_reaches_the_engine_as_it_was_asked() -> None:
    engine, inner = scripted()
    sampling = SamplingParams(temperature=0.5, seed=7)
    one(engine, prompt="go", sampling=sampling, priority=3, deadline=9e9, salt="s", stop=("never",))
    expected = Request("x", TOKENIZER.encode("go"), sampling, priority=3, deadline=9e9, stream=True, salt="s")
    seen = dataclasses.replace(inner.seen[0], prompt=list(inner.seen[0].prompt))
    assert dataclasses.asdict(seen) == dataclasses.asdict(expected)
