"""Edits of logits: the logits read and written wider, against the copy bandwidth.  python bench/kernels/edit_logits.py"""

import torch
from timing import DEVICE, cases_for, copies_for, report_bandwidth, seconds_per_call

from headrace.kernels.edit_logits import EditTable, edit_logits, programs

BLOCK_SIZE, LISTED, WORDS, WORD_LEN = 32, 64, 32, 4

# rows, vocabulary, tokens that each row has
CASES = [(256, 151_936, 1024), (1024, 151_936, 512), (16, 151_936, 8192)]
TINY = (2, 100, 40)


def table_of(rows: int, vocab: int, *, penalised: bool, listed: bool, words: bool) -> EditTable:
    """The same kinds of edits for every row."""

    def each(value: int) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.int32, device=DEVICE)

    penalties = [1.2, 0.5, 0.5] if penalised else [1.0, 0.0, 0.0]
    return EditTable(
        prompt_lens=each(16), only_listed=each(0), num_listed=each(LISTED * listed), num_words=each(WORDS * words),
        penalties=torch.tensor(penalties, device=DEVICE).repeat(rows, 1),
        listed=torch.arange(LISTED, dtype=torch.int32, device=DEVICE).repeat(rows, 1),
        until=torch.zeros(rows, LISTED, dtype=torch.int32, device=DEVICE),
        bias=torch.ones(rows, LISTED, device=DEVICE),
        words=torch.randint(0, vocab, (rows, WORDS, WORD_LEN), device=DEVICE).int(),
    )  # fmt: skip


def main() -> None:
    for rows, vocab, said in cases_for(CASES, TINY):
        num_bytes = rows * vocab * (2 + 4)
        all_logits = [
            torch.randn(rows, vocab, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(copies_for(num_bytes))
        ]
        lines = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        tables = -(-said // BLOCK_SIZE)
        pages = torch.randint(0, vocab, (rows * tables, BLOCK_SIZE), device=DEVICE).int()
        block_tables = torch.randperm(rows * tables, device=DEVICE).int().view(rows, tables)
        counts = torch.zeros(programs(torch.device(DEVICE)), vocab, dtype=torch.int32, device=DEVICE)
        kinds = {
            "copied": table_of(rows, vocab, penalised=False, listed=False, words=False),
            "penalties": table_of(rows, vocab, penalised=True, listed=False, words=False),
            "bias": table_of(rows, vocab, penalised=False, listed=True, words=False),
            "words": table_of(rows, vocab, penalised=False, listed=False, words=True),
        }
        for kind, table in kinds.items():
            arguments = (lines, lines, torch.full_like(lines, said), pages, block_tables, table, counts)
            calls = [lambda x=logits, a=arguments: edit_logits(x, *a) for logits in all_logits]
            shape = f"{rows} x {vocab} after {said} tokens: {kind}"
            report_bandwidth("edit_logits", shape, num_bytes, seconds_per_call(calls))


if __name__ == "__main__":
    main()
