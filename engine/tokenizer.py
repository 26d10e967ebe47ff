"""Text and chat messages to token ids, through a Transformers tokenizer."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.engine.errors import BadCheckpoint, InvalidRequest, UnsupportedModel
from headrace.engine.token_bytes import token_bytes

_GROUP_CHARS = 1 << 20


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
        self._pieces = {False: table.pieces, True: table.without_special()}
        self.special_ids = table.special
        self.strips = table.strips
        self.longest_piece = max(map(len, table.pieces), default=1)
        self.bos_id: int | None = transformers_tokenizer.bos_token_id
        self.eos_id: int | None = transformers_tokenizer.eos_token_id

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Load from a model directory. Raises BadCheckpoint or UnsupportedModel."""
        from transformers import AutoTokenizer  # slow to import, and not needed to look at this module

        try:
            loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # Transformers and tokenizers raise whatever their parsers meet
            missing = not (directory / "tokenizer.json").is_file()
            why = (
                "there is no tokenizer.json, and none could be made from its files" if missing else str(error)
            )
            raise BadCheckpoint(f"the tokenizer in {directory} cannot be loaded: {why}") from error
        return cls(loaded)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return bool(self._chat.chat_template)

    def pieces(self, *, skip_special: bool = True) -> list[bytes]:
        """Each id's bytes; special tokens have none if ``skip_special``. Shared: not to be changed."""
        return self._pieces[skip_special]

    def cover(self, vocab_size: int) -> None:
        """Know all ids of a model's vocabulary; those padded beyond the tokenizer's have no text."""
        for pieces in self._pieces.values():
            pieces += [b""] * (vocab_size - len(pieces))

    def encode(self, text: str) -> list[int]:
        """A prompt's ids, special tokens (such as BOS) added as the tokenizer is set up to."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` for many prompts, in parallel without the interpreter's lock.

        A prompt that already begins with the BOS token's text gets no second one.
        """
        return [self._one_bos(ids) for ids in self._encode(texts, add_special_tokens=True)]

    def encode_rendered(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of rendered chats: the template wrote all special tokens, so none is added."""
        return list(self._encode(texts, add_special_tokens=False))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Messages as one text, by the model's own template. Raises InvalidRequest when there is none or it refuses.

        A message's content is a string or a list of ``{"type": "text", "text": ...}`` parts, joined by line ends.
        """
        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template: send `prompt` or `prompt_token_ids`, not `messages`",
                param="messages",
                code="no_chat_template",
            )
        conversation = [_plain_message(n, message) for n, message in enumerate(messages)]
        try:
            text: str = self._chat.apply_chat_template(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
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
            for encoding in self._backend.encode_batch_fast(group, add_special_tokens=add_special_tokens):
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
