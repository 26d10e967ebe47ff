"""Prompts and chats to ids, as Transformers does it, with errors a user can act on."""

import subprocess
import sys
from pathlib import Path

import pytest
from small_tokenizers import KINDS, LINES, small, transformers_tokenizer
from tokenizers import decoders

from headrace.engine.errors import BadCheckpoint, InvalidRequest, UnsupportedModel
from headrace.engine.tokenizer import Tokenizer

kinds = pytest.mark.parametrize("kind", KINDS)
HELLO = [{"role": "user", "content": "water"}]


@kinds
def test_prompts_get_the_ids_that_transformers_gives(kind: str) -> None:
    tokenizer, reference = small(kind), transformers_tokenizer(kind)
    assert tokenizer.encode_many(LINES) == [reference.encode(line) for line in LINES]
    assert tokenizer.encode_many([]) == []


@kinds
def test_a_batch_larger_than_a_group_keeps_its_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.tokenizer._GROUP_CHARS", 100)
    tokenizer = small(kind)
    assert tokenizer.encode_many(LINES) == [tokenizer.encode(line) for line in LINES]


@kinds
def test_chats_get_the_ids_that_transformers_gives_with_one_bos(kind: str) -> None:
    tokenizer, reference = small(kind), transformers_tokenizer(kind)
    ids = tokenizer.encode_rendered([tokenizer.render_chat(HELLO)])[0]
    expected = reference.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    assert ids == expected
    assert ids.count(0) == 1


@kinds
def test_a_prompt_that_brings_its_bos_gets_no_second_one(kind: str) -> None:
    tokenizer = small(kind)
    assert tokenizer.encode("<s>water").count(0) == 1
    assert tokenizer.encode("water").count(0) == 1


def test_the_final_message_can_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "It is"}]
    text = small("byte_level").render_chat(messages, continue_final_message=True)
    assert text == "<s>[user]water[/][assistant]It is"


def test_text_parts_are_joined_by_line_ends() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "[user]one\ntwo[/]" in small("byte_level").render_chat([{"role": "user", "content": parts}])


def test_a_model_without_a_template_says_what_to_send_instead() -> None:
    with pytest.raises(InvalidRequest, match=r"no chat template: send `prompt`") as caught:
        small("byte_level", template=False).render_chat(HELLO)
    assert (caught.value.code, caught.value.param) == ("no_chat_template", "messages")


def test_what_the_template_refuses_is_told_in_its_words() -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages: no such role") as caught:
        small("byte_level").render_chat([{"role": "refuse", "content": ""}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "no role"}, "messages[0]"),
        ({"role": 3, "content": "x"}, "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
    ],
)
def test_a_malformed_message_is_named(message: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        small("byte_level").render_chat([message])
    assert caught.value.param == param


def test_special_ids_and_the_space_in_front_are_known() -> None:
    assert small("byte_level").special_ids == {0, 1}
    assert small("byte_level").strips == 0
    assert small("sentencepiece").strips == 1


def test_a_decoder_that_is_not_understood_is_refused_by_name() -> None:
    wrapped = transformers_tokenizer("byte_level")
    wrapped.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer(wrapped)


def test_a_directory_without_a_tokenizer_is_a_bad_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=f"{tmp_path} cannot be loaded: there is no tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_a_part_that_a_tokenizer_lacks_is_told_as_what_it_is(tmp_path: Path) -> None:
    transformers_tokenizer("byte_level").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Nope"}}')
    with pytest.raises(BadCheckpoint, match=f"{tmp_path} cannot be loaded: KeyError: 'added_tokens'"):
        Tokenizer.load(tmp_path)


def test_a_saved_tokenizer_loads_the_same(tmp_path: Path) -> None:
    transformers_tokenizer("tiktoken").save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert loaded.encode_many(LINES) == small("tiktoken").encode_many(LINES)
    assert loaded.has_chat_template


def test_a_real_models_ids_are_those_of_transformers(smollm: Path) -> None:
    from transformers import AutoTokenizer

    reference, tokenizer = AutoTokenizer.from_pretrained(smollm), Tokenizer.load(smollm)
    assert tokenizer.encode_many(LINES) == [reference.encode(line) for line in LINES]
    chat = tokenizer.encode_rendered([tokenizer.render_chat(HELLO)])[0]
    assert chat == reference.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)


def test_a_process_that_leaves_torch_out_tokenizes_alike_and_may_load_torch_later(tmp_path: Path) -> None:
    transformers_tokenizer("byte_level").save_pretrained(tmp_path)
    code = """
import sys
from pathlib import Path
from headrace.engine.tokenizer import Tokenizer, leave_torch_out
leave_torch_out()
tokenizer = Tokenizer.load(Path(sys.argv[1]))
print(tokenizer.encode("water"), tokenizer.render_chat([{"role": "user", "content": "water"}]), "torch" in sys.modules)
import torch
leave_torch_out()
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    tokenizer = small("byte_level")
    expected = f"{tokenizer.encode('water')} {tokenizer.render_chat(HELLO)} False\nTrue\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")
