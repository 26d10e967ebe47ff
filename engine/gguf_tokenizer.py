"""Rebuilds a fast tokenizer (tokenizer.json) from the vocabulary that a GGUF file carries."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headrace.engine.errors import UnsupportedModel

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types that are matched whole, before any splitting

# How each pre-tokenizer that GGUF names cuts text before byte-level BPE.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"llama-bpe": _WORDS.format(digits="{1,3}"), "qwen2": _WORDS.format(digits="")}


def write(fields: Mapping[str, Any], dst: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. ``fields`` are GGUF's ``tokenizer.*`` without that prefix."""
    tokens: list[str] = fields["ggml.tokens"]
    kind = fields["ggml.model"]
    if kind == "gpt2":
        tokenizer = _byte_level(tokens, fields["ggml.merges"], fields.get("ggml.pre", "default"))
    elif kind == "llama":
        tokenizer = _sentencepiece(tokens, fields["ggml.scores"], fields.get("ggml.add_space_prefix", True))
    else:
        raise UnsupportedModel(f"GGUF tokenizer {kind!r}; supported are gpt2 and llama")
    whole = zip(tokens, fields.get("ggml.token_type", ()), strict=False)
    added = [
        AddedToken(token, special=token_type == _CONTROL, normalized=False)
        for token, token_type in whole
        if token_type in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    names = {
        f"{ours}_token": tokens[fields[f"ggml.{theirs}_token_id"]]
        for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk"))
        if f"ggml.{theirs}_token_id" in fields
    }
    # GGUF's own default: a SentencePiece model starts every text with its first token.
    if fields.get("ggml.add_bos_token", kind == "llama") and "bos_token" in names:
        bos = names["bos_token"]
        tokenizer.post_processor = processors.Sequence(
            [
                *([tokenizer.post_processor] if tokenizer.post_processor else []),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
                ),
            ]
        )
    tokenizer.save(str(dst / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    if "chat_template" in fields:
        config["chat_template"] = fields["chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (dst / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_level(tokens: list[str], merges: list[str], pre: str) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre in ("default", "gpt-2"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre in _SPLITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        raise UnsupportedModel(
            f"GGUF pre-tokenizer {pre!r}; supported are default, gpt-2, smollm, {', '.join(_SPLITS)}"
        )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: list[str], scores: list[float], space_prefix: bool) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab, merges=_merges(vocab, scores), byte_fallback=True, fuse_unk=True, unk_token="<unk>"
        )
    )
    prepend = [normalizers.Prepend("▁")] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: any two pieces that make a third may merge, the best scored first."""
    found = []
    for token, i in vocab.items():
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in splits if left in vocab and right in vocab]
        found += [(-scores[i], vocab[left], vocab[right], left, right) for left, right in pairs]
    return [(left, right) for *_, left, right in sorted(found)]
