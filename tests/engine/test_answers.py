"""What a request may ask of its answers: several of them, their log-probabilities, the prompt before them."""

from typing import Any

import asking
import pytest
from scripted_engine import ScriptedEngine
from small_tokenizers import small

from headrace.engine.answers import bad_word_ids
from headrace.engine.request import FinishReason, Pooling, Request, SamplingParams
from headrace.engine.text import LocalTextEngine
from headrace.engine.text_engine import TextCompletion, TextRequest

TOKENIZER = small("byte_level")
STORY = "Once the mill 🙂 ground corn.\nThen it stopped. The end."


def said(text: str) -> list[int]:
    return TOKENIZER.encode_rendered([text])[0]


def numbered(request: Request) -> list[int]:
    """Every answer after the first says that it is another."""
    return said(f"answer {request.id.partition('#')[2] or 0}. The end")


def scripted(
    script: Any = lambda request: said(STORY), **options: Any
) -> tuple[LocalTextEngine, ScriptedEngine]:
    inner = ScriptedEngine(script, len(TOKENIZER.pieces()), **options)
    return LocalTextEngine(inner, TOKENIZER), inner


def run(engine: LocalTextEngine, *requests: TextRequest) -> dict[str, TextCompletion]:
    ended = asking.run(engine, requests)
    assert not engine._running
    assert not engine._answers
    return ended


def one(engine: LocalTextEngine, **fields: Any) -> TextCompletion:
    return run(engine, TextRequest("x", **fields))["x"]


@pytest.mark.parametrize("burst", [1, 1000])
def test_several_answers_come_together_in_their_order_and_the_prompt_counts_once(burst: int) -> None:
    engine, inner = scripted(numbered, burst=burst)
    ended = run(engine, TextRequest("x", prompt="go", n=3), TextRequest("y", prompt="go"))
    assert [c.index for c in ended["x"].choices] == [0, 1, 2]
    assert [c.text for c in ended["x"].choices] == [
        "answer 0. The end",
        "answer 1. The end",
        "answer 2. The end",
    ]
    assert ended["x"].prompt_tokens == ended["y"].prompt_tokens == len(TOKENIZER.encode("go"))
    assert ended["x"].completion_tokens == sum(len(c.token_ids) for c in ended["x"].choices)
    assert len(inner.seen) == 4


def test_each_answer_has_a_seed_of_its_own_and_the_first_has_the_requests() -> None:
    engine, inner = scripted()
    run(engine, TextRequest("x", prompt="go", n=4, sampling=SamplingParams(seed=7)))
    seeds = [request.sampling.seed for request in inner.seen]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    again, inner_again = scripted()
    run(again, TextRequest("other", prompt="go", n=4, sampling=SamplingParams(seed=7)))
    assert [request.sampling.seed for request in inner_again.seen] == seeds
    unseeded, inner_unseeded = scripted()
    run(unseeded, TextRequest("x", prompt="go", n=2))
    assert [(r.id, r.sampling.seed) for r in inner_unseeded.seen] == [("x", None), ("x#1", None)]


def test_each_answer_stops_at_its_own_stop_string() -> None:
    engine, _ = scripted(numbered)
    choices = one(engine, prompt="go", n=3, stop=("1", ". The")).choices
    assert [(c.text, c.stop_reason) for c in choices] == [
        ("answer 0", ". The"),
        ("answer ", "1"),
        ("answer 2", ". The"),
    ]


def test_aborting_a_request_aborts_all_its_answers() -> None:
    engine, _ = scripted()
    engine.add_many([TextRequest("x", prompt="go", n=3), TextRequest("y", prompt="go")])
    assert engine.poll(0.0) == []
    engine.abort(["x"])
    (ended,) = engine.poll(0.0)
    assert (ended.id, [c.finish_reason for c in ended.choices]) == ("x", [FinishReason.ABORT] * 3)


def test_an_id_that_another_requests_answer_has_is_refused() -> None:
    engine, _ = scripted()
    ended = run(engine, TextRequest("x#1", prompt="go"), TextRequest("x", prompt="go", n=2))
    assert ended["x"].error is not None
    assert (ended["x"].error.code, ended["x#1"].error) == ("duplicate_id", None)


def test_a_request_that_the_engine_refuses_is_refused_once() -> None:
    engine, _ = scripted()
    ended = run(engine, TextRequest("x", prompt="go", n=3, priority=13), TextRequest("y", prompt="go"))
    assert ended["x"].error is not None
    assert (ended["x"].error.param, ended["y"].error) == ("priority", None)


def test_the_stop_string_may_stay() -> None:
    engine, inner = scripted()
    done = one(engine, prompt="go", stop=("stopped",), sampling=SamplingParams(include_stop=True)).choices[0]
    assert done.text == "Once the mill 🙂 ground corn.\nThen it stopped"
    assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, "stopped")
    assert inner.seen[0].sampling.include_stop


def test_special_tokens_may_be_written_out() -> None:
    special = next(iter(sorted(TOKENIZER.special_ids)))
    written = TOKENIZER.pieces(skip_special=False)[special].decode()
    for skip, expected in ((True, "ab"), (False, f"a{written}b")):
        engine, _ = scripted(lambda request: [*said("a"), special, *said("b")])
        assert one(engine, prompt="go", skip_special_tokens=skip).choices[0].text == expected


def test_a_long_prompt_may_be_cut_to_its_last_tokens() -> None:
    engine, inner = scripted(max_context=64)
    done = one(engine, prompt="long " * 10_000, truncate_prompt_tokens=10)
    assert done.error is None
    assert list(inner.seen[0].prompt) == TOKENIZER.encode("long " * 10_000)[-10:]
    assert one(engine, prompt="short", truncate_prompt_tokens=50).prompt_tokens == len(
        TOKENIZER.encode("short")
    )


def test_the_prompt_may_stand_before_the_answer() -> None:
    engine, _ = scripted()
    assert one(engine, prompt="go: ", echo=True).choices[0].text == f"go: {STORY}"
    assert one(engine, prompt_token_ids=said("go: 🙂"), echo=True).choices[0].text == f"go: 🙂{STORY}"
    cut = one(engine, prompt="here we go", echo=True, truncate_prompt_tokens=1).choices[0].text
    assert cut.endswith(STORY)
    assert "here we go".endswith(cut.removesuffix(STORY))


def test_a_character_over_the_border_of_prompt_and_answer_is_echoed_whole() -> None:
    fish = said("🙂")
    assert len(fish) > 1
    engine, _ = scripted(lambda request: fish[1:])
    assert one(engine, prompt_token_ids=[*said("go"), fish[0]], echo=True).choices[0].text == "go🙂"


def test_log_probabilities_end_where_the_text_ends() -> None:
    engine, _ = scripted()
    done = one(engine, prompt="go", stop=("stopped",), sampling=SamplingParams(logprobs=2)).choices[0]
    assert done.logprobs is not None
    assert [token.token_id for token in done.logprobs] == done.token_ids
    assert [token.logprob for token in done.logprobs] == [-float(token) for token in done.token_ids]
    assert b"".join(token.data for token in done.logprobs).decode().startswith(done.text)
    assert [[other.token_id for other in token.top] for token in done.logprobs] == [[0, 1]] * len(
        done.token_ids
    )
    assert one(engine, prompt="go").choices[0].logprobs is None


def test_bad_words_are_forbidden_at_a_beginning_and_after_a_space() -> None:
    engine, inner = scripted()
    one(engine, prompt="go", bad_words=("mill", " ground", " "))
    expected = {tuple(said(text)) for text in ("mill", " mill", "ground", " ground", " ")}
    assert set(inner.seen[0].sampling.bad_words) == expected
    assert bad_word_ids((), TOKENIZER) == ()


@pytest.mark.parametrize(
    ("fields", "sampling", "param"),
    [
        ({"n": 0}, {}, "n"),
        ({"n": True}, {}, "n"),
        ({"n": 129}, {}, "n"),
        ({"truncate_prompt_tokens": 0}, {}, "truncate_prompt_tokens"),
        ({"skip_special_tokens": 1}, {}, "skip_special_tokens"),
        ({"echo": "yes"}, {}, "echo"),
        ({"prompt_logprobs": 21}, {}, "prompt_logprobs"),
        ({"continuations": []}, {}, "continuations"),
        ({"continuations": ["a", ""]}, {}, "continuations[1]"),
        ({"continuations": ["a", 5]}, {}, "continuations[1]"),
        ({"continuations": [[1, 10**6]]}, {}, "continuations[0][1]"),
        ({"continuations": ["a"], "pooling": Pooling.LAST}, {}, "continuations"),
        ({"continuations": ["a"], "n": 2}, {}, "n"),
        ({"pooling": Pooling.LAST, "echo": True}, {}, "echo"),
        ({"bad_words": ("",)}, {}, "bad_words[0]"),
        ({"bad_words": (5,)}, {}, "bad_words[0]"),
        ({}, {"repetition_penalty": 0}, "repetition_penalty"),
        ({}, {"repetition_penalty": "1"}, "repetition_penalty"),
        ({}, {"presence_penalty": 2.5}, "presence_penalty"),
        ({}, {"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({}, {"logit_bias": ((1_000_000, 1.0),)}, "logit_bias.1000000"),
        ({}, {"logit_bias": ((1, 101.0),)}, "logit_bias"),
        ({}, {"allowed_token_ids": ()}, "allowed_token_ids"),
        ({}, {"allowed_token_ids": (-1,)}, "allowed_token_ids[0]"),
        ({}, {"banned_token_ids": (10**6,)}, "banned_token_ids[0]"),
        ({}, {"logprobs": 21}, "logprobs"),
        ({}, {"logprobs": True}, "logprobs"),
        ({}, {"include_stop": 1}, "include_stop"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_by_its_name(
    fields: dict[str, Any], sampling: dict[str, Any], param: str
) -> None:
    engine, inner = scripted()
    error = one(engine, prompt="go", sampling=SamplingParams(**sampling), **fields).error
    assert error is not None
    assert error.param == param
    assert error.message.startswith(param)
    assert not inner.seen


def test_a_chat_has_no_prompt_to_echo() -> None:
    engine, _ = scripted()
    error = one(engine, messages=[{"role": "user", "content": "go"}], echo=True).error
    assert error is not None
    assert (error.code, error.param) == ("invalid_value", "echo")
