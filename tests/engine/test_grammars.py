"""Answers under a grammar: whatever the model would say, they have the form, and fit their limit."""

import errno
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import pytest
import tiny_model
import torch
from small_tokenizers import KINDS, small, transformers_tokenizer
from torch import Tensor

from headrace.engine import Completion, Engine, EngineConfig, FinishReason, Request, SamplingParams, guidance
from headrace.engine.build import build
from headrace.engine.closing import Closing
from headrace.engine.detokenizer import detokenize
from headrace.engine.errors import InvalidRequest
from headrace.engine.grammar import Grammar, GrammarKind
from headrace.engine.grammars import Grammars, Vocabulary
from headrace.engine.guide import Guide
from headrace.engine.masks import FEW
from headrace.engine.request import ModelInfo
from headrace.engine.tool_grammar import Thought, literal

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "kind": {"enum": ["a", "bb", "a much longer kind"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    TREE,
    {"type": "object"},
    {},
    {"type": "array"},
    {"type": "array", "items": PERSON, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
    {"type": "string"},
    {"type": "string", "minLength": 9, "maxLength": 20},
    {"type": "string", "pattern": "^[a-z]{2,}-[0-9]{4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "email"},
    {"type": "string", "format": "ipv4"},
    {"type": "number"},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "integer", "multipleOf": 7},
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["string", "null"]},
    {"const": {"a": [1, None, True]}},
    {"enum": [1, "two", None, [3], {"four": 5}]},
    {"anyOf": [{"type": "integer"}, {"type": "object", "required": ["x"], "properties": {"x": {"type": "null"}}}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"required": ["a"]}]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]},
    {"type": "object", "patternProperties": {"^n_": {"type": "number"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": PERSON, "b": TREE["$defs"]["node"] | {"properties": {}, "required": []}}},
    {"type": "object", "properties": {"ü": {"const": "水🙂"}, 'q"': {"type": "boolean"}}, "required": ["ü", 'q"']},
    {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}},
    {"type": "array", "minItems": 4, "maxItems": 5, "items": {"type": "boolean"}},
]  # fmt: skip
LAGS = [0, 1, 2]


class Guided:
    """An engine with a tiny model of random weights, whose tokens are a small tokenizer's."""

    def __init__(self, directory: Path, kind: str = "byte_level", **config: Any) -> None:
        self.kind = kind
        self.tokenizer = small(kind)
        vocab = len(self.tokenizer.pieces())
        model = tiny_model.write(directory, vocab_size=vocab, bos_token_id=0, eos_token_id=1)
        settings = {"kv_tokens": 4096, "max_context": 512} | config
        config_ = EngineConfig(model=model, weights="random", device="cpu", dtype="float32", **settings)
        parts = build(config_)
        self.loads = 0
        self.grammars = Grammars(parts.info, self._vocabulary, limit_s=3.0)
        self.engine = Engine(config_, replace(parts, grammars=self.grammars))
        self._ids = count()

    def _vocabulary(self, info: ModelInfo) -> Vocabulary:
        self.loads += 1
        loaded = llguidance.LLTokenizer(self.tokenizer.to_json(), n_vocab=info.vocab_size, eos_token=[1])
        return Vocabulary(loaded, Closing(self.tokenizer.pieces()))

    def ask(self, grammar: Grammar | None, **sampling: Any) -> Request:
        name = str(next(self._ids))
        params = SamplingParams(**{"temperature": 1.0, "max_tokens": 40} | sampling)
        return Request(name, [3, 4, 5], params, grammar=grammar)

    def compile(self, requests: list[Request]) -> None:
        """Have their grammars ready before they come."""
        for request in requests:
            self.grammars._compiled(request.grammar).result()

    def run(self, requests: list[Request]) -> list[Completion]:
        """How they ended, in the order of the requests."""
        self.engine.add_many(requests)
        ended: dict[str, Completion] = {}
        while len(ended) < len(requests):
            ended |= {done.id: done for done in self.engine.poll(60.0).completions}
        self.engine.check()
        return [ended[request.id] for request in requests]

    def text(self, done: Completion) -> str:
        return detokenize(self.tokenizer, done.token_ids, skip_special=True)


@pytest.fixture
def guided(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Guided]:
    made = Guided(tmp_path, **getattr(request, "param", {}))
    yield made
    made.engine.close()


def each(**configs: list[Any]) -> Any:
    """Engines of these configurations."""
    values = [dict(zip(configs, each, strict=True)) for each in zip(*configs.values(), strict=True)]
    return pytest.mark.parametrize("guided", values, indirect=True, ids=str)


@each(
    kind=["sentencepiece", "tiktoken", "byte_level"],
    lag=[0, 1, 2],
    kv_tokens=[4096, 640, 512],
)
def test_json_fits_its_schema_wherever_its_limit_falls_and_whoever_is_preempted(guided: Guided) -> None:
    rng = random.Random(7)
    asked: list[tuple[dict[str, Any] | None, Request]] = []
    for schema in SCHEMAS:
        for _ in range(2):
            limit = rng.choice([60, 80, 120, 200])
            options = rng.choice([
                {}, {"temperature": 0.0}, {"temperature": 3.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2},
                {"repetition_penalty": 1.5}, {"frequency_penalty": 2.0, "presence_penalty": 2.0}, {"logprobs": 2},
                {"min_tokens": 30}, {"ignore_eos": True}, {"logit_bias": ((1, -100.0), (9, 30.0), (10, 100.0))},
                {"stop_token_ids": (7, 8, 9)},
            ])  # fmt: skip
            asked.append(
                (
                    schema,
                    guided.ask(
                        Grammar.json_schema(schema), max_tokens=limit, seed=rng.getrandbits(60), **options
                    ),
                )
            )
        asked.append((None, guided.ask(None, max_tokens=rng.randint(1, 60))))
    ended = guided.run([request for _, request in asked])
    refused = 0
    for (schema, request), done in zip(asked, ended, strict=True):
        if schema is None:
            continue
        if done.error:
            assert done.error.param == "max_tokens", done.error
            refused += 1
            continue
        text = guided.text(done)
        assert done.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        jsonschema.validate(json.loads(text), schema)
        assert len(done.token_ids) <= request.sampling.max_tokens
        if request.sampling.logprobs is not None:
            assert len(done.logprobs.chosen) == len(done.token_ids)
            assert (done.logprobs.chosen <= 0).all()
    assert refused <= len(asked) // 8, "hardly any limit is too small for a short answer"
    assert {done.finish_reason for done in ended} >= {FinishReason.STOP, FinishReason.LENGTH}
    assert guided.loads == 1


@pytest.mark.parametrize("lag", LAGS)
def test_free_rows_say_what_they_say_without_guided_neighbours(tmp_path: Path, lag: int) -> None:
    made = Guided(tmp_path, lag=lag)
    free = [
        replace(made.ask(None, temperature=t, seed=n), prompt=[n + 3, 4])
        for n, t in enumerate([0.0, 1.0] * 5)
    ]
    alone = [done.token_ids for done in made.run(free)]
    others = [made.ask(Grammar.json_schema(schema)) for schema in SCHEMAS[:12]]
    mixed = [request for pair in zip(free, others, strict=False) for request in pair]
    assert [done.token_ids for done in made.run(mixed)][::2] == alone
    made.engine.close()


def test_an_answer_is_the_same_at_every_lag_and_after_a_preemption(tmp_path: Path) -> None:
    def answers(n: int, lag: int, kv_tokens: int) -> tuple[list[list[int]], int]:
        made = Guided(tmp_path / str(n), lag=lag, kv_tokens=kv_tokens)
        requests = [made.ask(Grammar.json_schema(schema), max_tokens=70, seed=5) for schema in SCHEMAS[::2]]
        made.compile(requests)  # so that all begin together, however slow the machine
        ended = made.run(requests)
        made.engine.close()
        return [done.token_ids for done in ended], sum(done.preemptions for done in ended)

    expected, none = answers(0, 0, 8192)
    assert none == 0
    for n, (lag, kv_tokens) in enumerate([(1, 8192), (2, 8192), (0, 288), (1, 288), (2, 288)]):
        got, preemptions = answers(n + 1, lag, kv_tokens)
        assert got == expected
        assert (preemptions > 0) == (kv_tokens == 288)


@each(kind=list(KINDS))
def test_choices_and_expressions_are_matched_from_end_to_end(guided: Guided) -> None:
    choices = ["yes", "no", "yes, but", "größer 水\n", 'quote " and \\ slash', "🙂"]
    patterns = ["[A-Z][a-z]+ [0-9]{3}", "(ab|cd){2,4}x", "[^\\n]{5}", "水+🙂?", "a*b"]
    requests = [guided.ask(Grammar.choice(choices), seed=n) for n in range(30)]
    requests += [guided.ask(Grammar.regex(pattern), seed=n) for pattern in patterns for n in range(6)]
    requests += [
        guided.ask(Grammar.lark('start: greeting " " NAME\ngreeting: "hi" | "ho"\nNAME: /[a-z]{1,5}/'))
    ]
    texts = [guided.text(done) for done in guided.run(requests)]
    assert set(texts[:30]) <= set(choices)
    assert len(set(texts[:30])) > 2, "the model chooses"
    for n, text in enumerate(texts[30:60]):
        assert re.fullmatch(patterns[n // 6], text), text
    assert re.fullmatch("h[io] [a-z]{1,5}", texts[60])


def test_the_model_chooses_also_where_its_choice_just_fits(guided: Guided) -> None:
    grammar = Grammar.choice(["a", "e", "i", "o", "u"])
    ended = guided.run([guided.ask(grammar, max_tokens=1, seed=n) for n in range(40)])
    assert {done.finish_reason for done in ended} == {FinishReason.STOP}
    assert len({guided.text(done) for done in ended}) == 5


def test_an_answer_without_room_goes_back_to_where_it_was_complete(guided: Guided) -> None:
    form = Grammar.regex("[a-z]{20}( b{60})?")
    options = {"ignore_eos": True, "seed": 5, "logprobs": 0}
    short, long = guided.run([guided.ask(form, max_tokens=most, **options) for most in (40, 120)])
    assert len(guided.text(long)) == 81
    assert guided.text(short) == guided.text(long)[:20], (
        "and not to a place before, to be completed otherwise"
    )
    assert short.finish_reason is FinishReason.LENGTH
    assert short.logprobs is not None
    assert len(short.logprobs.chosen) == len(short.token_ids)


def test_an_answer_ends_with_its_grammar_and_waits_for_no_end_token(guided: Guided) -> None:
    done, longer, endless = guided.run(
        [
            guided.ask(Grammar.choice(["ab"]), max_tokens=10, min_tokens=9),
            guided.ask(Grammar.regex("[a-z]+"), max_tokens=30, min_tokens=20),
            guided.ask(Grammar.regex("[a-z]+"), max_tokens=30, ignore_eos=True),
        ]
    )
    assert (guided.text(done), done.finish_reason) == ("ab", FinishReason.STOP)
    assert len(longer.token_ids) >= 20
    assert (len(endless.token_ids), endless.finish_reason) == (30, FinishReason.LENGTH)


BAD = {
    "expression": Grammar.regex("(a"),
    "look-around": Grammar.regex("(?=a)b"),
    "grammar": Grammar.lark("start: nothing"),
    "no grammar": Grammar.lark("}{"),
    "type": Grammar.json_schema({"type": "strin"}),
    "keyword": Grammar.json_schema({"not": {"type": "string"}}),
    "reference": Grammar.json_schema({"$ref": "https://example.com/schema"}),
    "contradiction": Grammar.json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "endless": Grammar.json_schema({"$ref": "#"}),
}


def test_requests_that_cannot_be_prepared_are_not_taken_and_may_come_again(
    guided: Guided, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [guided.ask(Grammar.regex("yes|no")), guided.ask(None), guided.ask(Grammar.regex("a{3}"))]
    compiled = guided.grammars._compiled

    def fails(grammar: Grammar) -> Any:
        if grammar == requests[2].grammar:
            raise RuntimeError("can't start new thread")
        return compiled(grammar)

    with monkeypatch.context() as patch:
        patch.setattr(guided.grammars, "_compiled", fails)
        with pytest.raises(RuntimeError):
            guided.engine.add_many(requests)
        assert not guided.engine.has_work
    assert [done.error for done in guided.run(requests)] == [None] * 3


def test_costly_masks_get_a_thread_for_each_core(monkeypatch: pytest.MonkeyPatch, guided: Guided) -> None:
    asked: list[int | None] = []
    executor = llguidance.LLExecutor

    def made(num_threads: int | None) -> Any:
        asked.append(num_threads)
        return executor(num_threads=num_threads)

    monkeypatch.setattr("llguidance.LLExecutor", made)
    guided.run([guided.ask(Grammar.regex("a{5}"))])
    assert asked == [FEW]
    monkeypatch.setattr("headrace.engine.masks.MUCH_S", 0.0)
    guided.run([guided.ask(Grammar.regex("b{5}"))])
    assert asked == [FEW, None]


def test_a_bad_grammar_fails_alone(guided: Guided) -> None:
    bad = [guided.ask(grammar.named(name)) for name, grammar in BAD.items()]
    good = [guided.ask(Grammar.json_schema(PERSON), max_tokens=90) for _ in bad]
    ended = guided.run([request for pair in zip(bad, good, strict=True) for request in pair])
    for name, done in zip(BAD, ended[::2], strict=True):
        assert done.error is not None
        assert (done.error.code, done.error.param) == ("invalid_grammar", name)
        assert done.error.message.startswith(f"{name} cannot be compiled: ")
        assert "\n" not in done.error.message
        assert done.token_ids == []
    for done in ended[1::2]:
        jsonschema.validate(json.loads(guided.text(done)), PERSON)


def test_a_form_that_nothing_has_is_refused_in_words(guided: Guided) -> None:
    for grammar in (Grammar.regex(r"[^\s\S]"), BAD["endless"]):
        (done,) = guided.run([guided.ask(grammar)])
        assert done.error is not None
        assert done.error.message == "grammar cannot be compiled: no answer can have this form"


@each(kind=list(KINDS))
def test_a_schema_that_needs_itself_again_and_again_is_refused_in_words(guided: Guided) -> None:
    endless = {
        "type": "object",
        "properties": {"id": {"type": "string"}, "a": {"$ref": "#"}},
        "required": ["id", "a"],
    }
    (done,) = guided.run([guided.ask(Grammar.json_schema(endless))])
    assert done.error is not None
    assert (done.error.code, done.error.param) == ("invalid_grammar", "grammar")
    assert done.error.message.startswith("grammar cannot be compiled: no answer of this form has an end")


@pytest.mark.parametrize(
    "source",
    [
        'start: "none" | object\nobject: %json SCHEMA',
        'start: "none"\nobject: %json SCHEMA',
        '// not %json SCHEMA\nstart: "none"',
    ],
    ids=["alternative", "unused", "comment"],
)
def test_a_grammar_may_hold_an_endless_schema_beside_what_has_an_end(guided: Guided, source: str) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    form = Grammar.lark(source.replace("SCHEMA", json.dumps(endless)))
    (none,) = guided.tokenizer.encode_rendered(["none"])
    asked = guided.ask(form, temperature=0.0, logit_bias=tuple((token, 100.0) for token in none))
    (done,) = guided.run([asked])
    assert done.error is None
    assert guided.text(done) == "none"


@each(kind=["byte_level", "sentencepiece"])
def test_long_minimum_lengths_are_kept_where_they_fit_and_refused_where_they_do_not(guided: Guided) -> None:
    schemas = [
        {"type": "array", "items": {"type": "boolean"}, "minItems": 40},
        {"type": "array", "items": PERSON, "minItems": 4},
        {"type": "string", "minLength": 250},
        {"type": "object", "properties": {n: {"type": "string", "minLength": 90} for n in "ab"}, "required": ["a", "b"]},
    ]  # fmt: skip
    hopeless = [
        {"type": "array", "items": {"type": "boolean"}, "minItems": 10**7},
        {"type": "string", "minLength": 10**6},
    ]
    asked = [guided.ask(Grammar.json_schema(schema), max_tokens=300, seed=5) for schema in schemas]
    tight = [guided.ask(Grammar.json_schema(schema), max_tokens=20) for schema in hopeless]
    ended = guided.run([*asked, *tight])
    for schema, done in zip(schemas, ended, strict=False):
        assert done.error is None
        jsonschema.validate(json.loads(guided.text(done)), schema)
    for done in ended[len(schemas) :]:
        assert done.error is not None
        assert (done.error.code, done.error.param) == ("invalid_value", "max_tokens")


LONG = {
    "type": "object",
    "properties": {f"field{n}": {"type": "string"} for n in range(12)},
    "required": [f"field{n}" for n in range(12)],
    "additionalProperties": False,
}


@each(kind=["byte_level", "sentencepiece"])
@pytest.mark.parametrize("short", [{"type": "null"}, {"type": "boolean"}, {"type": "array"}], ids=str)
def test_where_a_long_object_has_a_short_alternative_that_is_what_fits(
    guided: Guided, short: dict[str, Any]
) -> None:
    either = {"anyOf": [LONG, short]}
    inside = {"type": "object", "properties": {"a": either}, "required": ["a"], "additionalProperties": False}
    for schema in (either, inside):
        asked = [guided.ask(Grammar.json_schema(schema), max_tokens=40, seed=seed) for seed in range(5)]
        for done in guided.run(asked):
            assert done.error is None
            jsonschema.validate(json.loads(guided.text(done)), schema)


def test_no_limit_is_refused_that_an_answer_fits_into_although_none_was_found(guided: Guided) -> None:
    form = Grammar.choice(["b", "abcdefghij" * 5])
    (short,) = guided.tokenizer.encode_rendered(["b"])
    toward_it = {"temperature": 0.0, "logit_bias": tuple((token, 100.0) for token in short)}
    done, cut = guided.run([guided.ask(form, max_tokens=len(short), **toward_it), guided.ask(
        Grammar.regex("[a-z]*[^a]{30}b"), max_tokens=9
    )])  # fmt: skip
    compiled = guided.grammars._compiled(form).result()
    assert compiled.way is not None
    assert len(compiled.way) > len(short), "the walk found the other one"
    assert done.error is None
    assert guided.text(done) == "b"
    assert (cut.error, cut.finish_reason, len(cut.token_ids)) == (None, FinishReason.LENGTH, 9)


def test_tokens_that_every_answer_takes_are_counted_from_the_text_it_begins_with() -> None:
    class Forces:
        """A matcher at a place where this text must come next."""

        def __init__(self, text: bytes) -> None:
            self.text = text

        def compute_ff_bytes(self) -> bytes:
            return self.text

    closing = Closing([b"", b"a", b"b", b"ab", b"bbz"])
    counts = {
        b"": 0,
        b"a": 1,
        b"abab": 2,
        b"aba": 2,
        b"aabb": 3,
        b"aaaa": 4,
        b"abb": 2,  # the last token says more than is forced
        b"ab\xff[3]b": 1,  # as far as text goes
    }
    assert {text: closing.fewest(Forces(text)) for text in counts} == counts


def test_what_the_compiler_does_not_foresee_fails_its_request_alone(guided: Guided) -> None:
    class Panic(BaseException):
        """Not an Exception, as panics of Rust are not."""

    def panic(grammar: Grammar) -> Any:
        raise Panic

    compile_, guided.grammars._compile = guided.grammars._compile, panic
    (done,) = guided.run([guided.ask(Grammar.choice(["a"]))])
    assert done.error is not None
    assert (done.error.code, done.error.message) == ("invalid_grammar", "grammar cannot be compiled: Panic")
    guided.grammars._compile = compile_
    (after,) = guided.run([guided.ask(Grammar.choice(["b"]))])
    assert guided.text(after) == "b"


@pytest.mark.parametrize("lacks", [MemoryError(), BlockingIOError(errno.EAGAIN, "no process left")], ids=repr)
def test_what_the_host_lacks_may_pass_and_is_not_held_against_the_grammar(
    guided: Guided, lacks: Exception
) -> None:
    def fail(grammar: Grammar) -> Any:
        raise lacks

    form = Grammar.choice(["quick"])
    compile_, guided.grammars._compile = guided.grammars._compile, fail
    for done in guided.run([guided.ask(form), guided.ask(form)]):
        assert done.error is not None
        assert (done.error.code, done.error.param) == ("out_of_memory", None)
    guided.grammars._compile = compile_
    (after,) = guided.run([guided.ask(form)])
    assert guided.text(after) == "quick"


class PanicException(BaseException):
    """Stands in for PyO3's, which is known by its name."""


def test_a_panic_of_the_compiler_fails_its_request_alone(
    guided: Guided, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = guidance._matcher

    def panics(tokenizer: Any, grammar: Grammar) -> Any:
        if grammar.kind is GrammarKind.REGEX:
            raise PanicException
        return compiled(tokenizer, grammar)

    monkeypatch.setattr(guidance, "_matcher", panics)
    bad, good = guided.run([guided.ask(Grammar.regex("a{3}")), guided.ask(Grammar.choice(["quick"]))])
    assert bad.error is not None
    assert (bad.error.code, bad.error.param) == ("invalid_grammar", "grammar")
    assert bad.error.message == "grammar cannot be compiled: llguidance fails on it, by a defect of its own"
    assert guided.text(good) == "quick"


def test_a_panic_of_a_matcher_that_is_copied_fails_its_request_alone(guided: Guided) -> None:
    class Matcher:
        def deep_copy(self) -> None:
            raise PanicException

    bad, good = guided.ask(Grammar.regex("a{3}")), guided.ask(Grammar.choice(["quick"]))
    guided.compile([bad])
    assert bad.grammar is not None
    done = guided.grammars._compiled(bad.grammar)
    done._result = replace(done.result(), matcher=Matcher())  # type: ignore[attr-defined]
    panicked, answered = guided.run([bad, good])
    assert panicked.error is not None
    assert panicked.error.code == "invalid_grammar"
    assert guided.text(answered) == "quick"


@each(lag=LAGS)
def test_a_panic_at_a_mask_fails_its_request_alone(guided: Guided, monkeypatch: pytest.MonkeyPatch) -> None:
    class Executor:
        """Panics at one matcher's masks, from the third on that are computed at once for four."""

        def __init__(self, num_threads: int | None) -> None:
            self.inner = executor(num_threads=num_threads)
            self.calls = 0
            self.bad: Any = None

        def unsafe_compute_mask_ptr(self, matchers: list[tuple[Any, int]], *buffer: int) -> None:
            self.calls += len(matchers) == 4
            if self.calls == 3 and self.bad is None:
                self.bad = matchers[1][0]
            if any(matcher is self.bad for matcher, _ in matchers):
                raise PanicException
            self.inner.unsafe_compute_mask_ptr(matchers, *buffer)

    executor = llguidance.LLExecutor
    monkeypatch.setattr("llguidance.LLExecutor", Executor)
    fails_alone_at_its_third_token(guided)


@each(lag=LAGS)
def test_a_panic_at_a_token_fails_its_request_alone(guided: Guided, monkeypatch: pytest.MonkeyPatch) -> None:
    panicked: list[Guide] = []
    took = Guide.took

    def panics(guide: Guide) -> None:
        if guide.length == 3 + 2 and not panicked:
            panicked.append(guide)
            raise PanicException
        took(guide)

    monkeypatch.setattr(Guide, "took", panics)
    fails_alone_at_its_third_token(guided)


def fails_alone_at_its_third_token(guided: Guided) -> None:
    """One of four answers does, and the other three are whole."""
    asked = [guided.ask(Grammar.regex("[a-z]{12} [a-z]{12}"), ignore_eos=True) for _ in range(4)]
    guided.compile(asked)
    ended = guided.run(asked)
    failed = [done for done in ended if done.error]
    assert [done.error.code for done in failed if done.error] == ["grammar_too_complex"]
    assert len(failed[0].token_ids) in (2, 3)
    assert all(re.fullmatch("[a-z]{12} [a-z]{12}", guided.text(done)) for done in ended if not done.error)


def test_a_grammar_that_would_take_for_ever_fails_alone_in_its_time(guided: Guided) -> None:
    bombs = [guided.ask(Grammar.json_schema({"type": "integer", "multipleOf": 12345678})) for _ in range(3)]
    guided.engine.add_many(bombs)
    guided.engine.add_many([guided.ask(Grammar.choice(["quick"])), guided.ask(None)])
    ended = []
    while len(ended) < 5:
        ended += guided.engine.poll(60.0).completions
    assert {done.id for done in ended[:2]} == {"3", "4"}, "nobody waits for them"
    assert {(done.error.code, done.error.param) for done in ended[2:]} == {("grammar_too_complex", "grammar")}
    (after,) = guided.run([guided.ask(Grammar.regex("a{3}"))])
    assert guided.text(after) == "aaa"


def test_a_grammar_that_outgrows_a_step_s_limits_fails_its_sequence_alone(guided: Guided) -> None:
    hard = guided.ask(Grammar.regex(r"(\p{L}{0,1000}){0,1000}"), max_tokens=200, ignore_eos=True)
    done, other = guided.run([hard, guided.ask(Grammar.choice(["quick"]))])
    assert done.error is not None
    assert (done.error.code, done.error.param) == ("grammar_too_complex", "grammar")
    assert guided.text(other) == "quick"


@each(lag=LAGS)
def test_a_prompt_of_which_no_number_comes_fails_as_that_and_alone(
    guided: Guided, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = guided.engine._executor.runner.model
    forward, separator = model.forward, 2

    def spoilt(ids: Tensor, *rest: object) -> Tensor:
        return torch.where((ids == separator)[:, None], float("nan"), forward(ids, *rest))

    monkeypatch.setattr(model, "forward", spoilt)
    form = Grammar.regex("[a-z]{12} [a-z]{12}")
    asked = [guided.ask(form, ignore_eos=True) for _ in range(3)]
    asked.append(replace(guided.ask(form), prompt=[3, separator]))
    *others, failed = guided.run(asked)
    assert failed.error is not None
    assert failed.error.code == "non_finite_values"
    assert all(re.fullmatch(form.source, guided.text(done)) for done in others)


@each(lag=LAGS)
def test_an_answer_of_which_no_number_comes_later_fails_as_that_and_alone(
    guided: Guided, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = guided.engine._executor.runner.model
    forward, long_prompt = model.forward, [3] * 50

    def spoilt(ids: Tensor, positions: Tensor, *rest: object) -> Tensor:
        hidden = forward(ids, positions, *rest)
        return torch.where((positions == len(long_prompt) + 5)[:, None], float("nan"), hidden)

    monkeypatch.setattr(model, "forward", spoilt)
    form = Grammar.regex("[a-z]{12} [a-z]{12}")
    asked = [guided.ask(form, ignore_eos=True) for _ in range(3)]
    asked.append(replace(guided.ask(form), prompt=long_prompt))
    *others, failed = guided.run(asked)
    assert failed.error is not None
    assert failed.error.code == "non_finite_values"
    assert len(failed.token_ids) == 6
    assert all(re.fullmatch(form.source, guided.text(done)) for done in others)


def test_a_limit_without_room_for_any_answer_is_refused_with_the_room_it_needs(guided: Guided) -> None:
    tight, fits = guided.run(
        [
            guided.ask(Grammar.choice(["abc abc"]), max_tokens=1),
            guided.ask(Grammar.choice(["a"]), max_tokens=1),
        ]
    )
    assert tight.error is not None
    assert (tight.error.code, tight.error.param) == ("invalid_value", "max_tokens")
    assert re.search(r"^max_tokens must leave .* has at least \d+ tokens: .* leaves 1$", tight.error.message)
    assert fits.error is None


def test_what_a_grammar_contradicts_is_refused_by_name(guided: Guided) -> None:
    plain = guided.ask(Grammar.json_object())
    for field, request in {
        "allowed_token_ids": replace(plain, sampling=SamplingParams(allowed_token_ids=(3,))),
        "banned_token_ids": replace(plain, sampling=SamplingParams(banned_token_ids=(3,))),
        "bad_words": replace(plain, sampling=SamplingParams(bad_words=((3,),))),
        "stream": replace(plain, stream=True),
    }.items():
        with pytest.raises(InvalidRequest) as refused:
            guided.engine.add_many([request])
        assert refused.value.param == field


def test_requests_may_be_aborted_while_their_grammar_is_compiled(guided: Guided) -> None:
    bomb = guided.ask(Grammar.json_schema({"type": "integer", "multipleOf": 12345678}))
    guided.engine.add_many([bomb])
    guided.engine.abort(bomb.id)
    (done,) = guided.engine.poll(60.0).completions
    assert (done.finish_reason, done.error) == (FinishReason.ABORT, None)
    assert not guided.engine.has_work


def test_equal_grammars_are_compiled_once_and_only_so_many_are_kept(guided: Guided) -> None:
    guided.grammars._max_cached = 4
    compiled: list[Grammar] = []
    plain = guided.grammars._compile

    def noting(grammar: Grammar) -> Any:
        compiled.append(grammar)
        return plain(grammar)

    guided.grammars._compile = noting
    guided.run([guided.ask(Grammar.choice([str(n % 3)])) for n in range(30)])
    assert len(compiled) == 3
    guided.run([guided.ask(Grammar.choice([f"x{n}"])) for n in range(9)])
    assert len(guided.grammars._cache) == 4
    guided.run([guided.ask(Grammar.choice(["x8"])), guided.ask(Grammar.choice(["0"]))])
    assert len(compiled) == 3 + 9 + 1


def test_a_form_behind_a_thought_is_another_grammar(guided: Guided) -> None:
    form = Grammar.choice(["yes"])
    behind = replace(form, before='before: "hm "')
    ended = guided.run([guided.ask(grammar) for grammar in (form, behind, form.named("other"))])
    assert [guided.text(done) for done in ended] == ["yes", "hm yes", "yes"]
    assert len(guided.grammars._cache) == 2


@each(kind=list(KINDS), lag=LAGS)
def test_a_thought_that_fills_the_limit_is_ended_in_time_for_the_answer(guided: Guided) -> None:
    begin, end = "<think>", "</think>"
    thoughts = tuple(map(tuple, guided.tokenizer.encode_rendered([end, begin + end])))
    forms = [
        replace(
            Grammar.json_schema(PERSON),
            before=Thought(begin, end, opened=opened).rules(literal),
            thoughts=thoughts,
        )
        for opened in (True, False)
    ]
    asked = [
        guided.ask(forms[limit % 2], max_tokens=limit, seed=limit, ignore_eos=True)
        for limit in range(90, 111, 3)
    ]
    ended = guided.run(asked)
    for request, done in zip(asked, ended, strict=True):
        assert done.error is None
        assert len(done.token_ids) <= (request.sampling.max_tokens or 0)
        _, tag, answer = guided.text(done).rpartition(end)
        assert tag or request.grammar is forms[1]
        jsonschema.validate(json.loads(answer), PERSON)
    assert {done.finish_reason for done in ended} >= {FinishReason.LENGTH}


def test_a_thought_is_ended_in_time_also_where_the_answer_may_be_empty(guided: Guided) -> None:
    begin, end = "<think>", "</think>"
    thoughts = tuple(map(tuple, guided.tokenizer.encode_rendered([end, begin + end])))
    form = replace(
        Grammar.regex("(yes|no)?"), before=Thought(begin, end, opened=True).rules(literal), thoughts=thoughts
    )
    limits = (14, 18, 25, 40)
    asked = [
        guided.ask(form, max_tokens=limit, seed=seed, ignore_eos=True)
        for limit in limits
        for seed in range(10)
    ]
    for request, done in zip(asked, guided.run(asked), strict=True):
        assert len(done.token_ids) <= (request.sampling.max_tokens or 0)
        assert guided.text(done).rpartition(end)[1:] in ((end, ""), (end, "yes"), (end, "no"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_may_have_added_tokens_beyond_the_models_vocabulary(kind: str, tmp_path: Path) -> None:
    transformers_tokenizer(kind).save_pretrained(tmp_path)
    vocab = len(small(kind).pieces()) - 2  # without <sep> and <note>
    model = tiny_model.write(tmp_path, vocab_size=vocab, bos_token_id=0, eos_token_id=1)
    engine = Engine(EngineConfig(model=model, weights="random", device="cpu", max_context=64))
    engine.add_many([Request("a", [3], SamplingParams(max_tokens=20), grammar=Grammar.choice(["yes", "no"]))])
    ended: list[Completion] = []
    while not ended:
        ended = engine.poll(60.0).completions
    engine.close()
    assert ended[0].error is None
    assert detokenize(small(kind), ended[0].token_ids, skip_special=True) in ("yes", "no")


def test_nothing_is_made_for_requests_without_a_grammar(guided: Guided) -> None:
    guided.run([guided.ask(None)])
    assert guided.loads == 0
    assert guided.grammars._threads is None
