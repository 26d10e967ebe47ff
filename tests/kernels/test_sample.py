import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.sample import NO_TOKEN, gumbel_noise, random_bits, sample, sample_reference


def parameters(rows: int, **given: Any) -> dict[str, Tensor]:
    """Sampling parameters for a number of rows; scalars are spread over them."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "positions": 0}
    dtypes = {"top_k": torch.int32, "seeds": torch.int64, "positions": torch.int64}
    return {
        name: torch.as_tensor(value, dtype=dtypes.get(name, torch.float32)).expand(rows).contiguous()
        for name, value in (defaults | given).items()
    }


def drawn(logits: list[float], draws: int = 4000, **given: Any) -> Tensor:
    """How often each token is drawn, as a share, over as many positions."""
    rows = torch.tensor(logits).expand(draws, -1).contiguous()
    tokens = sample(rows, **parameters(draws, positions=torch.arange(draws), **given))
    return torch.bincount(tokens, minlength=len(logits)) / draws


def test_temperature_zero_takes_the_lowest_id_among_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [-1.0, -2.0, -1.0]])
    assert sample(logits, **parameters(2, temperature=0.0)).tolist() == [1, 0]
    assert sample(logits, **parameters(2, temperature=0.0), all_greedy=True).tolist() == [1, 0]


def test_tokens_are_drawn_by_their_probability() -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5]
    expected = torch.tensor(logits).softmax(dim=-1)
    assert torch.allclose(drawn(logits), expected, atol=0.03)
    assert torch.allclose(drawn(logits, temperature=2.0), (torch.tensor(logits) / 2).softmax(-1), atol=0.03)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 1}, [2]),
        ({"top_k": 100}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [2]),
        ({"top_p": 0.75}, [1, 2]),
        ({"top_p": 0.0}, [2]),
        ({"min_p": 0.3}, [1, 2]),
        ({"min_p": 1.0}, [2]),
        ({"top_k": 3, "top_p": 0.85}, [1, 2]),  # of the three's mass, not of all
        ({"min_p": 0.2, "top_p": 0.9}, [1, 2, 4]),
    ],
    ids=str,
)
def test_filters_keep_the_right_tokens_in_the_right_proportion(
    filters: dict[str, float], kept: list[int]
) -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5]  # softmax: 0.08 0.22 0.58 0.03 0.13 roughly
    expected = torch.full((5,), float("-inf"))
    expected[kept] = torch.tensor(logits)[kept]
    assert torch.allclose(drawn(logits, **filters), expected.softmax(dim=-1), atol=0.03)


def test_equals_at_the_threshold_stand_together() -> None:
    assert (drawn([1.0, 0.0, 1.0, 1.0], top_k=2) > 0).tolist() == [True, False, True, True]
    assert (drawn([1.0, -3.0, 1.0, 1.0], top_p=0.5) > 0).tolist() == [True, False, True, True]


def test_noise_follows_seed_position_and_token_and_nothing_else() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 500)
    given = parameters(6, seeds=torch.arange(6), positions=torch.arange(6) * 7, top_k=[0, 3, 0, 40, 0, 0])
    together = sample(logits, **given)
    alone = [
        sample(logits[i : i + 1], **{name: value[i : i + 1] for name, value in given.items()})
        for i in range(6)
    ]
    assert together.tolist() == torch.cat(alone).tolist()

    flat = torch.zeros(3, 100_000)
    tokens = sample(flat, **parameters(3, seeds=[1, 2, 1], positions=[5, 5, 6])).tolist()
    assert len(set(tokens)) == 3


def test_seeds_use_all_of_their_64_bits() -> None:
    ids = torch.arange(64)[None]
    seeds = [0, 1, -1, 1 << 32, 1 << 62, -(1 << 63)]
    rows = {tuple(random_bits(torch.tensor([s]), torch.tensor([3]), ids)[0].tolist()) for s in seeds}
    assert len(rows) == len(seeds)


def test_random_bits_are_the_hash_that_their_docstring_names() -> None:
    word = 0xFFFFFFFF

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD & word
        x = (x ^ x >> 15) * 0x735A2D97 & word
        return x ^ x >> 15

    def expected(seed: int, position: int, token: int) -> int:
        seed &= (1 << 64) - 1
        key = mix(mix(mix(seed & word) ^ seed >> 32) ^ position & word)
        x = token * 0x9E3779B1 + key & word
        x = (x ^ x >> 16) * 0x21F0AAAD + mix(key + 0x9E3779B1 & word) & word
        x = (x ^ x >> 15) * 0x735A2D97 & word
        return x ^ x >> 15

    ids = [0, 1, 151_935]
    for seed, position in ((0, 0), (-12345678901, 17), (2**63 - 1, 2**33 + 5)):
        bits = random_bits(torch.tensor([seed]), torch.tensor([position]), torch.tensor([ids]))
        assert bits[0].tolist() == [expected(seed, position, token) for token in ids]


def test_gumbel_noise_has_the_mean_and_variance_of_its_distribution() -> None:
    noise = gumbel_noise(torch.arange(8), torch.arange(8), torch.arange(50_000).expand(8, -1))
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.02


@pytest.mark.parametrize("spread", [0.01, 3.0], ids=["flat", "peaked"])
def test_the_cpu_path_chooses_the_reference_s_tokens(spread: float) -> None:
    torch.manual_seed(0)
    rows, vocab = 32, 5000
    logits = torch.randn(rows, vocab) * spread
    kinds = torch.arange(rows)
    given = parameters(
        rows,
        temperature=torch.where(kinds % 4 == 0, 0.0, 0.3 + kinds / rows),
        top_k=torch.where(kinds % 3 == 1, kinds % 2 * 2000 + 5, 0),
        top_p=torch.where(kinds % 5 == 2, 0.95, 1.0),
        min_p=torch.where(kinds % 7 == 3, 0.1, 0.0),
        seeds=kinds,
        positions=kinds + 100,
    )
    assert sample(logits, **given).tolist() == sample_reference(logits, **given).tolist()


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((200, 50), float("-inf"))
    logits[:, [3, 30]] = 0.0
    positions = torch.arange(200)
    for filters in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.1}):
        tokens = sample(logits, **parameters(200, positions=positions, **filters))
        assert set(tokens.tolist()) == {3, 30}


@pytest.mark.parametrize("filters", [{}, {"top_k": 10}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}])
@pytest.mark.parametrize("logit", [float("nan"), float("inf")])
@pytest.mark.parametrize("places", [slice(None), 0, 4999], ids=["all", "first", "last"])
def test_no_token_is_chosen_where_a_logit_is_no_finite_number_and_others_are_as_ever(
    filters: dict[str, float], logit: float, places: int | slice
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5000)
    given, greedy = parameters(3, **filters), "temperature" in filters
    healthy = sample(logits, **given, all_greedy=greedy)
    logits[1, places] = logit
    spoilt = sample(logits, **given, all_greedy=greedy)
    assert spoilt.tolist() == [healthy[0], NO_TOKEN, healthy[2]] == sample_reference(logits, **given).tolist()


def test_lines_and_the_tokens_kept_at_them_come_together() -> None:
    given = parameters(4)
    positions = given.pop("positions")[:2]
    lines, last_tokens = torch.tensor([3, 1]), torch.full((4,), -7)
    logits = torch.tensor([[0.0, 9.0], [9.0, 0.0]])
    assert sample(logits, **given, positions=positions, lines=lines, last_tokens=last_tokens).tolist() == [
        1,
        0,
    ]
    assert last_tokens.tolist() == [-7, 0, -7, 1]
    with pytest.raises(ValueError, match="come together"):
        sample(logits, **given, positions=positions, lines=lines)
    with pytest.raises(ValueError, match="for each row"):
        sample(logits, **given, positions=positions)
