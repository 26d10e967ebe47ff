"""Text from token ids: exact, whole characters only, the same however the tokens come."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_tokenizers import KINDS, small

from headrace.engine.detokenizer import Detokenizer, detokenize
from headrace.engine.tokenizer import Tokenizer

kinds = pytest.mark.parametrize("kind", KINDS)


def ids_of(tokenizer: Tokenizer, *, min_size: int = 0) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(tokenizer.pieces()) - 1), min_size=min_size, max_size=60)


def chunks(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def backend_decode(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> str:
    return tokenizer._backend.decode(ids, skip_special_tokens=skip_special)


def is_valid(tokenizer: Tokenizer, ids: list[int]) -> bool:
    try:
        b"".join(tokenizer.pieces()[token] for token in ids).decode()
    except UnicodeDecodeError:
        return False
    return True


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_joined_deltas_equal_the_final_text(kind: str, data: st.DataObject) -> None:
    tokenizer = small(kind)
    prompt, answer = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    stream = Detokenizer(tokenizer, prompt)
    deltas = [stream.feed(chunk) for chunk in chunks(data, answer)] + [stream.close()]
    assert "".join(deltas) == detokenize(tokenizer, answer, prompt)


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_a_delta_never_takes_back_what_another_one_said(kind: str, data: st.DataObject) -> None:
    tokenizer = small(kind)
    prompt, answer = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer, min_size=1))
    end = data.draw(st.integers(0, len(answer)))
    certain = Detokenizer(tokenizer, prompt).feed(answer[:end])
    assert detokenize(tokenizer, answer, prompt).startswith(certain)


@kinds
@settings(deadline=None)
@given(text=st.text(max_size=80))
@example(text="a\u2581b")
def test_any_text_survives_the_round_trip(kind: str, text: str) -> None:
    tokenizer = small(kind)
    ids = tokenizer.encode_rendered([text])[0] if text else []
    expected = text.replace("\u2581", " ") if kind == "sentencepiece" else text  # its sign for a space
    assert detokenize(tokenizer, ids, skip_special=False) == expected


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_valid_text_is_what_the_tokenizer_itself_decodes(kind: str, data: st.DataObject) -> None:
    tokenizer = small(kind)
    ids = data.draw(ids_of(tokenizer).filter(lambda ids: is_valid(tokenizer, ids)))
    assert detokenize(tokenizer, ids) == backend_decode(tokenizer, ids)


@kinds
@settings(deadline=None)
@given(text=st.text(min_size=1, max_size=40), cut=st.integers(1, 200))
def test_prompt_and_answer_join_to_the_whole_text_wherever_the_border_lies(
    kind: str, text: str, cut: int
) -> None:
    tokenizer = small(kind)
    ids = tokenizer.encode_rendered([text])[0]
    prompt, answer = ids[: min(cut, len(ids))], ids[min(cut, len(ids)) :]
    said = Detokenizer(tokenizer).feed(prompt)  # whole characters only
    assert said + detokenize(tokenizer, answer, prompt) == (text if answer else said)


@kinds
def test_a_character_spread_over_tokens_comes_whole(kind: str) -> None:
    tokenizer = small(kind)
    ids = [tokenizer.pieces().index(bytes([byte])) for byte in "𝄞".encode()]
    stream = Detokenizer(tokenizer)
    assert [stream.feed([token]) for token in ids] == ["", "", "", "𝄞"]
    assert stream.close() == ""


@kinds
def test_a_prompt_that_ends_inside_a_character_leaks_nothing(kind: str) -> None:
    tokenizer = small(kind)
    first, second, third = (tokenizer.pieces().index(bytes([byte])) for byte in "€".encode())
    letter = tokenizer.pieces().index(b"a")
    assert detokenize(tokenizer, [], prompt=[letter, first, second]) == ""
    assert detokenize(tokenizer, [letter], prompt=[letter, first, second]) == "a"
    assert detokenize(tokenizer, [third, letter], prompt=[letter, first, second]) == "€a"
    assert detokenize(tokenizer, [second, third, letter], prompt=[first]) == "€a"


@kinds
def test_an_unfinished_character_at_the_end_becomes_one_replacement(kind: str) -> None:
    tokenizer = small(kind)
    ids = [tokenizer.pieces().index(bytes([byte])) for byte in "𝄞".encode()[:3]]
    stream = Detokenizer(tokenizer)
    assert stream.feed(ids) == ""
    assert stream.close() == "\ufffd"


@kinds
def test_special_tokens_are_skipped_or_kept(kind: str) -> None:
    tokenizer = small(kind)
    ids = tokenizer.encode("water<sep>")
    assert detokenize(tokenizer, [*ids, 1], skip_special=False).replace(" ", "") == "<s>water<sep></s>"
    assert detokenize(tokenizer, [*ids, 1]) == "water<sep>"


@kinds
@settings(deadline=None)
@given(data=st.data())
def test_skipping_special_tokens_is_leaving_them_out(kind: str, data: st.DataObject) -> None:
    tokenizer = small(kind)
    ids = data.draw(
        st.lists(st.sampled_from([0, 1]) | st.integers(0, len(tokenizer.pieces()) - 1), max_size=40)
    )
    for shown in (frozenset[int](), frozenset((1,))):
        left = [token for token in ids if token not in tokenizer.special_ids - shown]
        text = detokenize(tokenizer, left, skip_special=False)
        stream = Detokenizer(tokenizer, shown=shown)
        assert "".join([*(stream.feed(chunk) for chunk in chunks(data, ids)), stream.close()]) == text


def test_an_answer_keeps_the_space_between_it_and_the_prompt() -> None:
    tokenizer = small("sentencepiece")
    prompt, answer = tokenizer.encode("the"), tokenizer.encode("wheel")[1:]
    assert detokenize(tokenizer, answer, prompt) == " wheel"
    assert detokenize(tokenizer, answer, prompt=[0]) == "wheel", "behind BOS alone a text begins"


def test_bytes_that_went_wrong_spoil_no_character_before_them() -> None:
    tokenizer = small("sentencepiece")
    euro = [tokenizer.pieces().index(bytes([byte])) for byte in "€".encode()]
    assert detokenize(tokenizer, [*euro, euro[0]]) == "€\ufffd"
    assert backend_decode(tokenizer, [*euro, euro[0]]) == "\ufffd" * 4, (
        "why the table does not follow it here"
    )


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    tokenizer = Tokenizer(small("byte_level")._chat)
    known = len(tokenizer.pieces())
    tokenizer.cover(known + 64)
    tokenizer.cover(10)
    water = tokenizer.encode_rendered(["water"])[0]
    assert detokenize(tokenizer, [known, *water, known + 63]) == "water"
