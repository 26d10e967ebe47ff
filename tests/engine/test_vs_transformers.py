"""Greedy output equals Transformers', token for token, whatever the batch, the chunks, the cache or the pool do.

SmolLM2-135M-Instruct in fp32. A difference is excused only where Transformers' two best logits lie within 1e-3.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.request import Completion, FinishReason, Request, SamplingParams

NEW_TOKENS = 64
NEAR_TIE = 1e-3
BLOCK = 32
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=NEW_TOKENS, ignore_eos=True, seed=11)
TEXT = Path(__file__).parents[2] / "LICENSE"
QUESTIONS = [
    "What is the capital of France?",
    "Name three rivers in Europe.",
    "Translate to Spanish: the water drives the mill.",
    "Is 97 a prime number? Answer yes or no.",
    "Write a haiku about rain.",
    "Summarise in one sentence: The headrace brings water from the river to the wheel, and the tailrace takes it back.",
    "Write a Python function that reverses a string.",
    "Classify the sentiment as positive or negative: I would buy it again.",
    "What comes after Monday?",
    "Extract the year: The bridge was finished in 1932 after six years.",
    "Explain gravity to a child.",
    "Give a synonym of quick.",
]  # fmt: skip


class Reference:
    """Transformers' own greedy choice, each prompt computed once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._known: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def check(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Assert that ``tokens`` are the greedy answer, up to a near-tie at the first difference."""
        expected, margins = self.greedy(prompt, tokens)
        assert len(tokens) == NEW_TOKENS
        for i, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
            if token != wanted:
                assert margins[i] <= NEAR_TIE, (
                    f"{token} instead of {wanted} at {i}, with a margin of {margins[i]}"
                )
                return

    def greedy(self, prompt: Sequence[int], draft: Sequence[int]) -> tuple[list[int], list[float]]:
        """The greedy tokens, and for each the distance from the second best logit.

        One forward over prompt and draft gives the choice after every prefix of the draft, so all is known up to the
        draft's first mistake. From there on the model decodes for itself: a wrong draft costs time, nothing else.
        """
        key = tuple(prompt)
        if key not in self._known:
            with torch.inference_mode():
                ids = torch.tensor([[*prompt, *draft[:-1]]])
                logits = self.model(ids, logits_to_keep=NEW_TOKENS, use_cache=False).logits[0]
            mistakes = (logits.argmax(dim=-1) != torch.tensor(draft)).nonzero().flatten().tolist()
            if mistakes and mistakes[0] + 1 < NEW_TOKENS:
                logits = logits[: mistakes[0] + 1]
                logits = torch.cat(
                    (logits, self.decode([*prompt, *logits.argmax(dim=-1).tolist()], len(logits)))
                )
            best = logits.topk(2)
            margins = (best.values[:, 0] - best.values[:, 1]).tolist()
            self._known[key] = best.indices[:, 0].tolist(), margins
        return self._known[key]

    def decode(self, ids: list[int], done: int = 0) -> torch.Tensor:
        """The logits of what is left to generate, by Transformers' own loop over its KV cache."""
        prompt = torch.tensor([ids])
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW_TOKENS - done,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.cat(output.logits)


@pytest.fixture(scope="module")
def reference(smollm: Path) -> Reference:
    model = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # always NEW_TOKENS tokens, as ignore_eos asks of the engine
    return Reference(model)


@pytest.fixture(scope="module")
def text(smollm: Path) -> list[int]:
    """Token ids of 2,000 tokens of English and more."""
    ids: list[int] = AutoTokenizer.from_pretrained(smollm)(TEXT.read_text())["input_ids"]
    assert len(ids) > 2100
    return ids


@pytest.fixture(scope="module")
def prompts(smollm: Path, text: list[int]) -> list[list[int]]:
    """64 prompts of 1 to 2,000 tokens: chats, and pieces of a text, the short ones more than the long ones."""
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)[
            "input_ids"
        ]
        for question in QUESTIONS
    ]
    count, rng = 64 - len(chats), random.Random(0)
    lengths = [round(2000 ** (i / (count - 1)) ** 1.5) for i in range(count)]
    starts = [rng.randrange(len(text) - length) for length in lengths]
    pieces = [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    assert (min(lengths), max(lengths)) == (1, 2000)
    return chats + pieces


def short(prompts: list[list[int]], count: int, longest: int = 250) -> list[list[int]]:
    return [prompt for prompt in prompts if len(prompt) <= longest][::-1][:count]


@pytest.fixture
def engine(request: pytest.FixtureRequest, smollm: Path) -> Iterator[Engine]:
    """An fp32 engine; the indirect parameter gives what differs from a roomy one."""
    options = {"block_size": BLOCK, "kv_tokens": 24_576} | getattr(request, "param", {})
    engine = Engine(EngineConfig(model=str(smollm), device="cpu", dtype="float32", **options))
    yield engine
    assert not engine.has_work
    engine.check()
    stats = engine.stats()
    assert stats.blocks_live == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    engine.close()


def requests(
    prompts: Iterable[list[int]], sampling: SamplingParams = GREEDY, name: str = ""
) -> list[Request]:
    return [Request(f"{name}{i}", prompt, sampling) for i, prompt in enumerate(prompts)]


def complete(engine: Engine) -> dict[str, Completion]:
    done = {}
    while engine.has_work:
        done |= {completion.id: completion for completion in engine.step().completions}
    return done


def generate(engine: Engine, prompts: Sequence[list[int]]) -> list[Completion]:
    engine.add_many(requests(prompts))
    done = complete(engine)
    return [done[str(i)] for i in range(len(prompts))]


def test_the_reference_is_what_generate_gives(reference: Reference, prompts: list[list[int]]) -> None:
    for prompt in (prompts[0], prompts[20]):
        tokens = reference.decode(prompt).argmax(dim=-1).tolist()
        half_right = tokens[:32] + [0] * 32
        for draft in (tokens, half_right):
            assert Reference(reference.model).greedy(prompt, draft)[0] == tokens


@pytest.mark.parametrize("engine", [{"max_batched_tokens": 300, "lag": 1}], ids=str, indirect=True)
def test_64_prompts_of_1_to_2000_tokens_at_once(
    engine: Engine, reference: Reference, prompts: list[list[int]]
) -> None:
    for prompt, completion in zip(prompts, generate(engine, prompts), strict=True):
        reference.check(prompt, completion.token_ids)
        assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "engine",
    [{"max_batched_tokens": 1024, "lag": 0}, {"max_batched_tokens": 41, "lag": 2}],
    ids=str,
    indirect=True,
)
def test_large_and_small_chunks_give_the_same(
    engine: Engine, reference: Reference, prompts: list[list[int]]
) -> None:
    chosen = short(prompts, 24)
    for prompt, completion in zip(chosen, generate(engine, chosen), strict=True):
        reference.check(prompt, completion.token_ids)


@pytest.mark.parametrize("engine", [{"prefix_cache": False}], indirect=True)
def test_a_prompt_alone_gives_what_it_gives_in_a_batch(
    engine: Engine, reference: Reference, prompts: list[list[int]]
) -> None:
    for prompt in short(prompts, 3):
        (completion,) = generate(engine, [prompt])
        reference.check(prompt, completion.token_ids)


@pytest.mark.parametrize("engine", [{"lag": lag} for lag in (0, 1, 2)], ids=str, indirect=True)
def test_greedy_prompts_are_untouched_by_sampled_aborted_and_late_ones(
    engine: Engine, reference: Reference, prompts: list[list[int]]
) -> None:
    chosen = short(prompts, 12)
    greedy = requests(chosen, name="greedy")
    sampled = requests(chosen, SAMPLED, "sampled")
    arrivals = [pair for pairs in zip(greedy, sampled, strict=True) for pair in pairs]
    done: dict[str, Completion] = {}
    for step in range(0, len(arrivals), 4):
        engine.add_many(arrivals[step : step + 4])
        for _ in range(5):
            done |= {completion.id: completion for completion in engine.step().completions}
        engine.abort(sampled[step // 4].id)
    done |= complete(engine)
    for request in greedy:
        reference.check(request.prompt, done[request.id].token_ids)
    aborted = [request.id for request in sampled if done[request.id].finish_reason is FinishReason.ABORT]
    assert len(aborted) == len(arrivals) // 4


@pytest.fixture(scope="module")
def at_borders(text: list[int]) -> list[list[int]]:
    """Prompts that end just before, at and just after the end of a block; each begins as the longer ones do."""
    return [text[: blocks * BLOCK + off] for blocks in (1, 2, 7) for off in (-1, 0, 1)]


@pytest.mark.parametrize("engine", [{"prefix_cache": False}], ids=str, indirect=True)
def test_prompts_that_share_a_prefix_are_right_without_a_prefix_cache(
    engine: Engine, reference: Reference, at_borders: list[list[int]]
) -> None:
    for prompt, completion in zip(at_borders, generate(engine, at_borders), strict=True):
        assert completion.cached_tokens == 0
        reference.check(prompt, completion.token_ids)


@pytest.mark.parametrize("engine", [{"lag": lag} for lag in (0, 1, 2)], ids=str, indirect=True)
def test_a_prefix_hit_changes_nothing_at_any_block_border(
    engine: Engine, reference: Reference, at_borders: list[list[int]]
) -> None:
    engine.add_many(requests(at_borders[-1:], SamplingParams(temperature=0, max_tokens=1)))
    complete(engine)
    for prompt, completion in zip(at_borders, generate(engine, at_borders), strict=True):
        assert completion.cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
        reference.check(prompt, completion.token_ids)


@pytest.mark.parametrize("engine", [{"lag": 1}], ids=str, indirect=True)
def test_a_prefix_computed_in_the_same_step_changes_nothing(
    engine: Engine, reference: Reference, at_borders: list[list[int]]
) -> None:
    completions = generate(engine, at_borders)
    assert any(completion.cached_tokens for completion in completions)
    for prompt, completion in zip(at_borders, completions, strict=True):
        reference.check(prompt, completion.token_ids)


@pytest.mark.parametrize(
    "engine", [{"lag": lag, "kv_tokens": 576} for lag in (0, 1, 2)], ids=str, indirect=True
)
def test_a_tiny_pool_preempts_again_and_again_and_changes_nothing(
    engine: Engine, reference: Reference, prompts: list[list[int]]
) -> None:
    chosen = short(prompts, 10, longest=120)
    completions = generate(engine, chosen)
    for prompt, completion in zip(chosen, completions, strict=True):
        reference.check(prompt, completion.token_ids)
    assert engine.stats().preemptions >= 5
