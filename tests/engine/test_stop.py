"""Stop strings: the first to complete wins, text and tokens are cut together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, small

from headrace.engine.detokenizer import Detokenizer, detokenize
from headrace.engine.stop import StopHit, StopWatch
from headrace.engine.tokenizer import Tokenizer

kinds = pytest.mark.parametrize("kind", KINDS)


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each byte."""
    return [tokenizer.pieces().index(bytes([byte])) for byte in text.encode()]


def watch(
    tokenizer: Tokenizer, ids: list[int], *stops: str, min_tokens: int = 0, include: bool = False
) -> StopHit | None:
    watched = StopWatch(Detokenizer(tokenizer), stops, min_tokens, include=include)
    watched.feed(ids)
    return watched.close()


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_text_and_tokens_are_cut_at_the_stop_that_completes_first(kind: str, data: st.DataObject) -> None:
    tokenizer = small(kind)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer.pieces()) - 1), max_size=40))
    text = detokenize(tokenizer, ids)
    pieces = st.text("ab the wheel€🙂\ufffd", min_size=1, max_size=3)
    if text:
        start = st.integers(0, len(text) - 1)
        pieces |= st.tuples(start, st.integers(1, 6)).map(lambda at: text[at[0] : at[0] + at[1]])
    stops = data.draw(st.lists(pieces, min_size=1, max_size=4))

    hit = watch(tokenizer, ids, *stops)

    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert hit is None
        return
    end, _, stop = min(ends)
    assert hit is not None
    assert (hit.stop, hit.chars) == (stop, end - len(stop))
    assert detokenize(tokenizer, ids[: hit.tokens]).startswith(text[: hit.chars]) or "\ufffd" in text
    fewer = Detokenizer(tokenizer).feed(ids[: hit.tokens - 1]) if hit.tokens else ""
    assert hit.chars == 0 or len(fewer) < hit.chars, "one token fewer would not hold the text"


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_a_hit_does_not_depend_on_how_tokens_are_grouped(kind: str, data: st.DataObject) -> None:
    tokenizer = small(kind)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer.pieces()) - 1), max_size=40))
    stops = data.draw(st.lists(st.text("abtheé ", min_size=1, max_size=3), min_size=1, max_size=3))
    grouped = StopWatch(Detokenizer(tokenizer), stops)
    rest = list(ids)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        grouped.feed(rest[:size])
        rest = rest[size:]
    assert grouped.close() == watch(tokenizer, ids, *stops)


def test_a_stop_string_is_found_across_token_borders() -> None:
    tokenizer = small("byte_level")
    assert watch(tokenizer, letters(tokenizer, "one STOP two"), "STOP") == StopHit("STOP", chars=4, tokens=4)


def test_the_string_that_completes_first_wins_though_another_began_earlier() -> None:
    tokenizer = small("byte_level")
    assert watch(tokenizer, letters(tokenizer, "xabcdef"), "abcdef", "cd") == StopHit("cd", chars=3, tokens=3)


def test_of_two_that_complete_together_the_longer_wins() -> None:
    tokenizer = small("byte_level")
    assert watch(tokenizer, letters(tokenizer, "xabc"), "c", "abc", "bc") == StopHit("abc", chars=1, tokens=1)


def test_a_token_that_holds_text_and_the_beginning_of_a_stop_stays() -> None:
    tokenizer = small("byte_level")
    ids = tokenizer.encode_rendered([" water"])[0]
    assert len(ids) == 1, "the test needs a token of several characters"
    assert watch(tokenizer, ids, "ter") == StopHit("ter", chars=3, tokens=1)


def test_a_stop_at_the_very_beginning_leaves_no_token() -> None:
    tokenizer = small("byte_level")
    assert watch(tokenizer, letters(tokenizer, "\n\nmore"), "\n\n") == StopHit("\n\n", chars=0, tokens=0)


def test_strings_completed_within_min_tokens_do_not_count() -> None:
    tokenizer = small("byte_level")
    ids = letters(tokenizer, "a.b.c.")
    assert watch(tokenizer, ids, ".", min_tokens=1) == StopHit(".", chars=1, tokens=1)
    assert watch(tokenizer, ids, ".", min_tokens=2) == StopHit(".", chars=3, tokens=3)
    assert watch(tokenizer, ids, ".b", min_tokens=2) == StopHit(".b", chars=1, tokens=1)
    assert watch(tokenizer, ids, ".", min_tokens=6) is None


def test_the_stop_string_can_be_kept() -> None:
    tokenizer = small("byte_level")
    assert watch(tokenizer, letters(tokenizer, "a; b"), ";", include=True) == StopHit(";", chars=2, tokens=2)


def test_a_stop_of_several_bytes_waits_for_its_last_byte() -> None:
    tokenizer = small("sentencepiece")
    ids = letters(tokenizer, "a。b")
    assert watch(tokenizer, ids[:3], "。") is None
    assert watch(tokenizer, ids, "。") == StopHit("。", chars=1, tokens=1)


def test_the_prompt_is_not_searched() -> None:
    tokenizer = small("byte_level")
    watched = StopWatch(Detokenizer(tokenizer, letters(tokenizer, "STO")), ["STOP"])
    assert watched.feed(letters(tokenizer, "P and on")) is None
