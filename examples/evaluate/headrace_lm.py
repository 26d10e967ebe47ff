"""Drives the engine with EleutherAI's evaluation harness (``pip install lm_eval``), in place of its Hugging Face backend.

    python examples/evaluate/headrace_lm.py MODEL --tasks facts --include examples/evaluate [--against-hf]

From the root of a checkout, this scores SmolLM2-135M-Instruct on 40 questions that lie beside this file; the harness's own
tasks go by their names. ``--against-hf`` runs the harness's Hugging Face backend on the same, and prints both tables.
"""

import argparse
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

from headrace.engine.config import EngineConfig
from headrace.engine.hub import resolve
from headrace.engine.request import SamplingParams
from headrace.engine.text import open_text_engine
from headrace.engine.text_engine import TextCompletion, TextRequest
from headrace.engine.tokenizer import Tokenizer

Encoded = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation as texts, and each as token ids."""


class HeadraceLM(TemplateLM):  # type: ignore[misc]
    """The three kinds of request that the harness makes, each a whole task's worth at once.

    The harness tokenises and cuts; the engine gets token ids, and shares the blocks of contexts that begin alike.
    """

    def __init__(self, model: str, *, device: str = "auto", dtype: str = "bfloat16", **options: Any) -> None:
        super().__init__()
        self._engine = open_text_engine(EngineConfig(model=model, device=device, dtype=dtype, **options))
        self._tokens = Tokenizer.load(resolve(model))
        self.max_length = self._engine.max_context - 1

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, and stands for an empty context where there is none that begins one."""
        assert self._tokens.eos_id is not None, "the tokenizer has no token that ends a text"
        return self._tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context."""
        return self.eot_token_id if self._tokens.bos_id is None else self._tokens.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text, without special tokens unless asked: as the harness's Hugging Face backend has it."""
        return (
            self._tokens.encode(string) if add_special_tokens else self._tokens.encode_rendered([string])[0]
        )

    def _loglikelihood_tokens(self, requests: Sequence[Encoded], **_: Any) -> list[tuple[float, bool]]:
        def cut(context: list[int], continuation: list[int]) -> TextRequest:
            continuation = continuation[-self.max_length :]
            room = self.max_length + 1 - len(continuation)
            return TextRequest("", prompt_token_ids=context[-room:], continuations=[continuation])

        done = self._run(cut(context, continuation) for _, context, continuation in requests)
        scores = [completion.scores[0] for completion in done if completion.scores]
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows as long as the context."""
        windows: list[tuple[int, Encoded]] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(number, (("", ""), *make_disjoint_window(window))) for window in rolling]
        sums = [0.0] * len(requests)
        scores = self._loglikelihood_tokens([encoded for _, encoded in windows])
        for (number, _), (logprob, _) in zip(windows, scores, strict=True):
            sums[number] += logprob
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Each context's answer, up to the first of its stop texts."""
        return [completion.choices[0].text for completion in self._run(map(self._to_answer, requests))]

    def _to_answer(self, request: Instance) -> TextRequest:
        context, options = request.args
        asked = normalize_gen_kwargs(options, default_max_gen_toks=256)
        until = asked.get("until") or ()
        return TextRequest(
            "",
            prompt_token_ids=self.tok_encode(context)[-(self.max_length - asked["max_gen_toks"]) :],
            stop=(until,) if isinstance(until, str) else tuple(until),
            sampling=SamplingParams(
                temperature=asked.get("temperature", 0.0),
                top_p=asked.get("top_p"),
                max_tokens=asked["max_gen_toks"],
            ),
        )

    def _run(self, requests: Iterable[TextRequest]) -> list[TextCompletion]:
        named = [replace(request, id=str(number)) for number, request in enumerate(requests)]
        self._engine.add_many(named)
        ended: dict[str, TextCompletion] = {}
        while len(ended) < len(named):
            for completion in self._engine.poll(1.0):
                if completion.error is not None:
                    raise ValueError(completion.error.message)
                ended[completion.id] = completion
        return [ended[request.id] for request in named]


def main() -> None:
    """The script's command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a Hugging Face directory or hub id")
    parser.add_argument("--tasks", nargs="+", default=["facts"])
    parser.add_argument("--include", help="a directory with tasks of your own")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--against-hf", action="store_true")
    args = parser.parse_args()
    tasks = {"tasks": args.tasks, "task_manager": TaskManager(include_path=args.include)}
    with closing(HeadraceLM(args.model, device=args.device, dtype=args.dtype)) as lm:
        print(make_table(simple_evaluate(model=lm, **tasks)))
    if args.against_hf:
        hf = {"pretrained": str(resolve(args.model)), "dtype": args.dtype}
        device = None if args.device == "auto" else args.device
        print(make_table(simple_evaluate(model="hf", model_args=hf, device=device, **tasks)))


if __name__ == "__main__":
    main()
