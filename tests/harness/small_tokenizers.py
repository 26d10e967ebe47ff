"""Three kinds of tokenizers, trained on a few lines in a blink: what real models use, without their files."""

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from headrace.engine import tokenizer as engine

KINDS = ("byte_level", "sentencepiece", "tiktoken")
LINES = [
    "The headrace brings water to the mill wheel, and the wheel turns the stone.",
    "Naïve café owners écrivent 12,345 Zeichen über größere Mühlräder.",
    "水は水車に流れる。水车转动石磨。물레방아가 돈다.",
    "Smile 🙂🙃 and wave 👋🏽, family 👨‍👩‍👧, done ✅.",
    "def turn(wheel):\n    return wheel + 1\n",
] * 4
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'refuse' %}{{ raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}[/]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@cache
def small(kind: str, *, template: bool = True) -> engine.Tokenizer:
    """A small tokenizer of one of KINDS, with BOS ``<s>`` (id 0), EOS ``</s>`` (1) and two added
    tokens that are not special, ``<sep>`` and, matched after the normalizer, ``<note>``."""
    return engine.Tokenizer(transformers_tokenizer(kind, template=template))


@cache
def small_chat(template: str, tokens: tuple[str, ...] = (), *, special: bool = True) -> engine.Tokenizer:
    """A byte-level one with this chat template, and these texts as tokens, ``special`` or not."""
    wrapped = transformers_tokenizer("byte_level", template=False)
    added = [AddedToken(text, special=special, normalized=False) for text in tokens]
    (wrapped.backend_tokenizer.add_special_tokens if special else wrapped.backend_tokenizer.add_tokens)(added)
    wrapped.chat_template = template
    return engine.Tokenizer(wrapped)


def transformers_tokenizer(kind: str, *, template: bool = True) -> PreTrainedTokenizerFast:
    """The same as Transformers sees it."""
    backend = {"byte_level": _byte_level, "sentencepiece": _sentencepiece, "tiktoken": _tiktoken}[kind]()
    backend.add_tokens([AddedToken("<sep>", normalized=False), AddedToken("<note>", normalized=True)])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    if template:
        wrapped.chat_template = TEMPLATE
    return wrapped


def _byte_level() -> Tokenizer:
    """As GPT-2, SmolLM and Qwen: bytes written in an alphabet of 256 characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _train(backend, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"])
    return backend


def _sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral: a space in front, spaces as a letter, unknown characters as byte tokens."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    # Trained on the plain lines only, so that other characters must fall back to bytes.
    plain = [line for line in LINES if line.isascii()]
    _train(backend, plain, special_tokens=["<s>", "</s>", "<unk>", *byte_tokens])
    return _only_special(backend, {"<s>", "</s>", "<unk>"})


def _tiktoken() -> Tokenizer:
    """As Llama 3: a tiktoken vocabulary converted, whole words looked up before merging."""
    backend = Tokenizer(models.BPE(ignore_merges=True))
    pattern = Regex(r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    _train(backend, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"])
    return backend


def _train(backend: Tokenizer, lines: list[str] = LINES, **options: object) -> None:
    backend.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=700, show_progress=False, **options))


def _only_special(backend: Tokenizer, special: set[str]) -> Tokenizer:
    """The trainer made every byte token special; in real files they are ordinary vocabulary."""
    import json

    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    return Tokenizer.from_str(json.dumps(state))
