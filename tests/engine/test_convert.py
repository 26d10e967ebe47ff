"""GGUF and pickled checkpoints become Hugging Face directories that Transformers and this engine read alike."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from one_step import OneSequence
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headrace.engine import convert as convert_module
from headrace.engine import gguf_tokenizer
from headrace.engine.convert import convert
from headrace.engine.errors import BadCheckpoint, EngineError, UnsupportedModel
from headrace.engine.models.config import ModelConfig
from headrace.engine.weights import load_model

TEXTS = [
    "The mill wheel turns while water runs, 12 buckets at 345 turns a day.",
    "It's  spaced\n\n\toddly; naïve café — 水車 🎉 1234567",
    "don't We'LL\r\nend ",
]
SPECIAL = ["<|end|>", "<|start|>"]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"head_dim": 16}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
}


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A byte-level BPE tokenizer, trained small."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def random_model(family: str, vocab_size: int) -> PreTrainedModel:
    model_class, config_class, options = FAMILIES[family]
    torch.manual_seed(3)
    model = model_class(config_class(vocab_size=vocab_size, **SIZES, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.15)
            parameter.copy_(parameter.bfloat16())  # what the conversion keeps
    return model


def write_gguf(
    path: Path,
    family: str,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    pre: str = "gpt-2",
    experts: int = 0,
    rope_freqs: np.ndarray | None = None,
) -> None:
    """What llama.cpp's own converter would write for this model."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(experts)
    state = json.loads(tokenizer.to_str())["model"]
    vocab = sorted(state["vocab"], key=state["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocab])
    writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if family == "llama":
            tensor = _permuted(name, tensor, config)
        writer.add_tensor(_gguf_name(name), tensor.numpy())
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permuted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp pairs neighbours where Transformers pairs halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for projection, count in heads.items():
        if projection in name:
            return (
                tensor.reshape(count, 2, -1, *tensor.shape[1:])
                .transpose(1, 2)
                .reshape(tensor.shape)
                .contiguous()
            )
    return tensor


def _gguf_name(name: str) -> str:
    parts = name.removeprefix("model.layers.").split(".")
    if parts[0].isdigit():
        return f"blk.{parts[0]}.{GGUF_NAMES['.'.join(parts[1:-1])]}.{parts[-1]}"
    return f"{GGUF_NAMES['.'.join(parts[:-1])]}.{parts[-1]}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_model_answers_as_the_one_it_was_made_from(
    family: str, byte_level: Tokenizer, tmp_path: Path
) -> None:
    original = random_model(family, byte_level.get_vocab_size())
    write_gguf(tmp_path / "model.gguf", family, original, byte_level)
    directory = convert(tmp_path / "model.gguf", tmp_path / "converted")
    ids = byte_level.encode(TEXTS[0]).ids
    with torch.inference_mode():
        expected = original(torch.tensor([ids])).logits[0]
        theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(torch.tensor([ids]))
    ours = OneSequence(load_model(directory, "cpu", torch.float32), len(ids)).logits(ids)
    torch.testing.assert_close(theirs.logits[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_a_gguf_tokenizer_keeps_its_ids_its_specials_and_its_template(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    write_gguf(
        tmp_path / "model.gguf", "llama", random_model("llama", byte_level.get_vocab_size()), byte_level
    )
    directory = convert(tmp_path / "model.gguf", tmp_path / "converted")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == byte_level.encode(text).ids
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("<|start|>x<|end|>")["input_ids"][::2] == [1, 0]
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|end|>", "<|start|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|start|>hi<|end|>"
    config = ModelConfig.from_directory(directory)
    assert (config.eos_ids, config.bos_id) == ((0,), 1)


def test_a_large_model_is_written_in_shards(
    byte_level: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_module, "SHARD_BYTES", 50_000)
    original = random_model("qwen3", byte_level.get_vocab_size())
    write_gguf(tmp_path / "model.gguf", "qwen3", original, byte_level)
    directory = convert(tmp_path / "model.gguf", tmp_path / "converted")
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ours = load_model(directory, "cpu", torch.float32)
    assert torch.equal(theirs.model.norm.weight, ours.norm)


def test_a_gguf_of_another_architecture_is_refused_and_leaves_nothing(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    write_gguf(
        tmp_path / "model.gguf", "gemma3", random_model("qwen3", byte_level.get_vocab_size()), byte_level
    )
    with pytest.raises(UnsupportedModel, match="gemma3"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_a_gguf_mixture_of_experts_is_refused(byte_level: Tokenizer, tmp_path: Path) -> None:
    model = random_model("llama", byte_level.get_vocab_size())
    write_gguf(tmp_path / "model.gguf", "llama", model, byte_level, experts=8)
    with pytest.raises(UnsupportedModel, match="mixture of experts"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")


def test_an_unknown_pre_tokenizer_is_refused_by_name(byte_level: Tokenizer, tmp_path: Path) -> None:
    model = random_model("llama", byte_level.get_vocab_size())
    write_gguf(tmp_path / "model.gguf", "llama", model, byte_level, pre="tekken")
    with pytest.raises(UnsupportedModel, match="'tekken'"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")


def test_bytes_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(BadCheckpoint, match=r"model\.gguf"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")


def test_an_existing_directory_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="exists already"):
        convert(tmp_path / "model.gguf", tmp_path)


def test_a_directory_that_needs_no_converting_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").touch()
    with pytest.raises(BadCheckpoint, match="nothing to convert"):
        convert(tmp_path / "model", tmp_path / "converted")


def pickled(directory: Path, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=tied, **SIZES))
    directory.mkdir()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(directory)
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_pickled_weights_become_safetensors(tied: bool, tmp_path: Path) -> None:
    model = pickled(tmp_path / "old", tied)
    directory = convert(tmp_path / "old", tmp_path / "new")
    ours = load_model(directory, "cpu", torch.float32)
    assert torch.equal(ours.head.weight, model.lm_head.weight)
    assert ("lm_head.weight" in load_file(directory / "model.safetensors")) is not tied


def test_what_a_trainer_leaves_beside_pickled_weights_is_no_weights(tmp_path: Path) -> None:
    model = pickled(tmp_path / "old")
    torch.save(SIZES, tmp_path / "old" / "training_args.bin")
    directory = convert(tmp_path / "old", tmp_path / "new")
    ours = load_model(directory, "cpu", torch.float32)
    assert torch.equal(ours.head.weight, model.lm_head.weight)
    torch.save(SIZES, directory / "training_args.bin")
    with pytest.raises(BadCheckpoint, match="holds safetensors already"):
        convert(directory, tmp_path / "newer")


def test_a_damaged_config_beside_pickled_weights_is_a_bad_checkpoint(tmp_path: Path) -> None:
    pickled(tmp_path / "old")
    (tmp_path / "old" / "config.json").write_text("{")
    with pytest.raises(BadCheckpoint, match=r"config\.json cannot be read"):
        convert(tmp_path / "old", tmp_path / "new")


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("owned",))


def test_a_pickle_that_would_run_code_is_refused_unrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pickled(tmp_path / "old")
    torch.save({"model.norm.weight": Payload()}, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin"):
        convert(tmp_path / "old", tmp_path / "new")
    assert os.listdir(tmp_path) == ["old"]


def llama3_divisors(factor: float, head_dim: int, theta: float) -> np.ndarray:
    """What llama.cpp stores of a llama3 scaling with its usual numbers (1, 4, 8192)."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (8192 / wavelength - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < 2048, 1.0, np.where(wavelength > 8192, factor, between)).astype(np.float32)


def test_the_llama3_scaling_of_a_gguf_is_recognised(byte_level: Tokenizer, tmp_path: Path) -> None:
    original = random_model("llama", byte_level.get_vocab_size())
    divisors = llama3_divisors(8.0, 16, original.config.rope_parameters["rope_theta"])
    write_gguf(tmp_path / "model.gguf", "llama", original, byte_level, rope_freqs=divisors)
    rope = ModelConfig.from_directory(convert(tmp_path / "model.gguf", tmp_path / "converted")).rope
    assert (rope.kind, rope.factor, rope.original_context) == ("llama3", 8.0, 8192)


def test_frequencies_of_an_unknown_rule_are_refused(byte_level: Tokenizer, tmp_path: Path) -> None:
    original = random_model("llama", byte_level.get_vocab_size())
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(tmp_path / "model.gguf", "llama", original, byte_level, rope_freqs=divisors)
    with pytest.raises(UnsupportedModel, match="RoPE frequencies"):
        convert(tmp_path / "model.gguf", tmp_path / "converted")


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A BPE model with byte fallback, as Llama 2 and Mistral have, trained small."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXTS[0], TEXTS[2]] * 20),
        model_prefix=str(folder / "sp"),
        model_type="bpe",
        vocab_size=320,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "sp.model"))


def test_a_sentencepiece_tokenizer_gives_its_own_ids(
    sentence_piece: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    pieces = range(sentence_piece.get_piece_size())
    types = [
        2
        if sentence_piece.is_unknown(i)
        else 3
        if sentence_piece.is_control(i)
        else 6
        if sentence_piece.is_byte(i)
        else 1
        for i in pieces
    ]
    fields = {
        "ggml.model": "llama",
        "ggml.tokens": [sentence_piece.id_to_piece(i) for i in pieces],
        "ggml.scores": [sentence_piece.get_score(i) for i in pieces],
        "ggml.token_type": types,
        "ggml.bos_token_id": sentence_piece.bos_id(),
        "ggml.eos_token_id": sentence_piece.eos_id(),
        "ggml.unknown_token_id": sentence_piece.unk_id(),
    }
    gguf_tokenizer.write(fields, tmp_path, max_length=128)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == [sentence_piece.bos_id(), *sentence_piece.encode(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
