import torch

from headrace.kernels.step_inputs import step_inputs


def test_ids_positions_and_cache_slots_are_gathered_from_the_slot_table() -> None:
    ids, positions, mapping = step_inputs(
        token_ids=torch.tensor([5, -1, 7, 8, 9, 3, 4]),
        query_start=torch.tensor([0, 1, 2, 5, 5, 6], dtype=torch.int32),  # the fourth row is empty
        slots=torch.tensor(
            [2, 0, 1, 3, -1], dtype=torch.int32
        ),  # the fifth is padding, and so is the last token
        starts=torch.tensor([3, 40, 31, 0, 7], dtype=torch.int32),
        last_tokens=torch.tensor([100, 101, 102, 103]),
        block_tables=torch.tensor([[10, 11], [12, 13], [14, 15], [16, 17]], dtype=torch.int32),
        block_size=32,
    )
    assert ids.tolist() == [5, 100, 7, 8, 9, 0, 0]
    assert positions.tolist() == [3, 40, 31, 32, 33, 0, 0]
    assert mapping.tolist() == [14 * 32 + 3, 11 * 32 + 8, 12 * 32 + 31, 13 * 32, 13 * 32 + 1, -1, -1]


def test_a_slot_for_which_no_token_could_be_chosen_is_fed_a_token_of_the_vocabulary() -> None:
    ints = torch.arange(2, dtype=torch.int32)
    pages = torch.full((1, 16), -9, dtype=torch.int32)
    last_tokens, block_tables = torch.tensor([-1]), torch.zeros(1, 1, dtype=torch.int32)
    ids, _, mapping = step_inputs(
        torch.tensor([-1]), ints, ints[:1], ints[1:] + 2, last_tokens, block_tables, 16, pages
    )
    assert (ids.tolist(), mapping.tolist()) == ([0], [3])
    assert pages[0, 3] == 0


def test_a_step_of_padding_alone_writes_nowhere() -> None:
    none = torch.full((3,), -1, dtype=torch.int32)
    ids, positions, mapping = step_inputs(
        torch.full((3,), -1), torch.arange(4).int(), none, none, torch.tensor([9]), none[None], 16
    )
    assert ids.tolist() == positions.tolist() == [0, 0, 0]
    assert mapping.tolist() == [-1, -1, -1]
