"""Text and chat messages to token ids, through a Transformers tokenizer."""

import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.engine.errors import BadCheckpoint, InvalidRequest, UnsupportedModel
from headrace.engine.panics import panics_as_errors
from headrace.engine.token_bytes import token_bytes

_GROUP_CHARS = 1 << 20
_ALL = frozenset((-1,))
"""Stands for all special tokens."""


def leave_torch_out() -> None:
    """Import Transformers as if torch were not installed: for a process that tokenizes and computes nothing.

    Where Transformers finds torch it imports it with its tokenizers: 320 MB, and seconds before the engine's own process is
    started. It makes no models here any more. Nothing happens where either has been imported before.
    """
    if sys.modules.keys() & {"torch", "transformers"}:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it warns that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # so Python has what is not to be imported
    try:
        import transformers  # noqa: F401 (it looks for torch now, and never again)
    finally:
        del sys.modules["torch"]


class Tokenizer:
    """A model's tokenizer and chat template.

    special_ids: tokens that answers leave out by default. strips: leading spaces a text loses at its very beginning.
    longest_piece: bytes of the longest token, which bounds how few tokens a text can have.
    """

    def __init__(self, transformers_tokenizer: Any) -> None:
        if not getattr(transformers_tokenizer, "is_fast", False):
            raise UnsupportedModel("the model has no tokenizer.json, and none could be made from its files")
        self._chat = transformers_tokenizer
        # Straight to the Rust tokenizer: the same ids as Transformers' wrapper gives, without its bookkeeping.
        self._backend = transformers_tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        table = token_bytes(self._backend)
        self._pieces = {_ALL: table.pieces, frozenset[int](): table.without_special()}
        self.special_ids = table.special
        self.strips = table.strips
        self.longest_piece = max(map(len, table.pieces), default=1)
        self.bos_id: int | None = transformers_tokenizer.bos_token_id
        self.eos_id: int | None = transformers_tokenizer.eos_token_id

    @classmethod
    def load(cls, directory: Path, chat_template: str | None = None) -> "Tokenizer":
        """Load from a model directory. Raises BadCheckpoint or UnsupportedModel.

        chat_template: a template in place of the model's own.
        """
        from transformers import AutoTokenizer  # slow to import, and not needed to look at this module

        try:
            with panics_as_errors:
                loaded = AutoTokenizer.from_pretrained(
                    directory, local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # Transformers and tokenizers raise whatever their parsers meet
            missing = not (directory / "tokenizer.json").is_file()
            # With its class, since the text of some is no more than a key.
            why = f"{type(error).__name__}: {error}"
            if missing:
                why = "there is no tokenizer.json, and none could be made from its files"
            raise BadCheckpoint(f"the tokenizer in {directory} cannot be loaded: {why}") from error
        if chat_template is not None:
            loaded.chat_template = chat_template
        return cls(loaded)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return bool(self._chat.chat_template)

    def chat_template(self, *, tools: bool = False) -> str:
        """The text of the chat template, the one for tools if there are two; empty if there is none."""
        try:
            return str(self._chat.get_chat_template(tools=[] if tools else None))
        except ValueError:
            return ""

    def ids_of(self, texts: Iterable[str]) -> dict[str, int]:
        """The tokens that stand for these texts, for those that are one token."""
        ids = {text: self._backend.token_to_id(text) for text in texts}
        return {text: id for text, id in ids.items() if id is not None}

    def pieces(self, *, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> list[bytes]:
        """Each id's bytes; special tokens but those ``shown`` have none if ``skip_special``. Shared: not to be changed."""
        key = shown if skip_special else _ALL
        if key not in self._pieces:
            every, pieces = self._pieces[_ALL], list(self._pieces[frozenset()])
            for token in shown:
                pieces[token] = every[token]
            self._pieces[key] = pieces
        return self._pieces[key]

    def to_json(self) -> str:
        """The tokenizer as its own library writes it, added tokens included."""
        text: str = self._backend.to_str()
        return text

    def cover(self, vocab_size: int) -> None:
        """Know all ids of a model's vocabulary; those padded beyond the tokenizer's have no text."""
        for pieces in self._pieces.values():
            pieces += [b""] * (vocab_size - len(pieces))

    def encode(self, text: str) -> list[int]:
        """A prompt's ids, special tokens (such as BOS) added as the tokenizer is set up to."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` for many prompts, in parallel without the interpreter's lock.

        A prompt that already begins with the BOS token's text gets no second one. Raises LibraryPanic.
        """
        return [self._one_bos(ids) for ids in self._encode(texts, add_special_tokens=True)]

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of rendered chats: the template wrote all special tokens, so none is added. Raises LibraryPanic."""
        return list(self._encode(texts, add_special_tokens=False))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Messages as one text, by the model's own template. Raises InvalidRequest when there is none or it refuses.

        A message's content is a string or a list of ``{"type": "text", "text": ...}`` parts, joined by line ends.
        template_kwargs: values that the template knows by name; not what ``apply_chat_template`` itself takes.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template: send `prompt` or `prompt_token_ids`, not `messages`",
                param="messages",
                code="no_chat_template",
            )
        for name in sorted(template_kwargs.keys() & _not_the_templates()):
            param = f"chat_template_kwargs.{name}"
            problem = "must be left out: it is no value that a template knows by name"
            raise InvalidRequest(f"{param} {problem}", param=param, code="invalid_value")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        conversation = [_plain_message(n, message) for n, message in enumerate(messages)]
        try:
            text: str = self._chat.apply_chat_template(
                conversation,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **template_kwargs,
            )
        except Exception as error:  # a template is a program of the model's: it may raise anything
            reason = str(error) or type(error).__name__
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {reason}",
                param="messages",
                code="invalid_value",
            ) from error
        return text

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> Iterator[list[int]]:
        for group in _groups(texts):
            with panics_as_errors:
                encodings = self._backend.encode_batch_fast(group, add_special_tokens=add_special_tokens)
            for encoding in encodings:
                yield encoding.ids

    def _one_bos(self, ids: list[int]) -> list[int]:
        return ids[1:] if self.bos_id is not None and ids[:2] == [self.bos_id] * 2 else ids


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts in groups of bounded size: encodings weigh some hundred bytes a token until their ids are taken."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= _GROUP_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


@cache
def _not_the_templates() -> frozenset[str]:
    """What a request may not hand to its template: names that Transformers takes for itself, or sets."""
    from transformers import PreTrainedTokenizerBase

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its text parts joined, since most templates expect a string."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise _refused(where, "must be an object with a string `role`")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "\n".join(_text_part(f"{where}.content[{n}]", part) for n, part in enumerate(content))
    if content is not None and not isinstance(content, str):
        raise _refused(f"{where}.content", "must be a string or a list of text parts")
    return {**message, "content": content}


def _text_part(where: str, part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    raise _refused(where, 'must be {"type": "text", "text": "..."}')


def _refused(param: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{param} {problem}", param=param, code="invalid_type")
