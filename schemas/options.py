"""Options that are known but not carried out yet: refused by name, never dropped in silence.

The one list that grows shorter as the engine learns: an option moves from here to a field of ``Sampling`` or
``PromptJob``. Names are OpenAI's, or vLLM's where OpenAI has none.
"""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ConfigDict
from pydantic_core import PydanticCustomError

from headrace.schemas.errors import ErrorCode

# Of every model of what producers write. With a length to check, be it 0, pydantic looks at a text's characters, and so
# refuses lone surrogates; else it takes a str as it is. A validator of ours would cost a call for each text of each job.
WRITTEN = ConfigDict(strict=True, extra="ignore", str_min_length=0)

# Each option with the values that ask for nothing (null never does), which generic clients send along.
NOT_YET: Mapping[str, tuple[object, ...]] = {
    # Sampling
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "spaces_between_special_tokens": (True, False),  # only tokenizers without a tokenizer.json ever wrote any
    "logits_processors": ([],),
    "thinking_token_budget": (),
    "guided_whitespace_pattern": (),
    # What comes back
    "suffix": ("",),
    "stream": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "audio": (),
    # Chat
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "chat_template": (),
    "documents": ([],),
    "web_search_options": (),
    # Prompts
    "add_special_tokens": (True,),
    "prompt_embeds": (),
    "mm_processor_kwargs": (),
    "dimensions": (),
}


def refuse_unsupported(fields: Mapping[str, Any]) -> None:
    """Raise for the first of ``fields`` that asks for something in NOT_YET."""
    for name, value in fields.items():
        if name in NOT_YET and not _asks_for_nothing(value, NOT_YET[name]):
            raise refusal(ErrorCode.UNSUPPORTED_OPTION, "is not supported yet; leave it out", name)


def refuse_misplaced(fields: Mapping[str, Any], sampling_options: Collection[str]) -> None:
    """Raise for the first sampling option that stands beside ``sampling`` and would be ignored there."""
    for name in fields:
        if name in sampling_options:
            raise refusal(
                ErrorCode.MISPLACED_OPTION, f"belongs inside `sampling`: write sampling.{name}", name
            )


def without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` but for those that are null, which is another way to leave one out."""
    return {name: value for name, value in fields.items() if value is not None}


def refusal(code: ErrorCode, message: str, *param: str | int) -> PydanticCustomError:
    """An error for a validator to raise. The message reads on from the path of the field: "n is not supported"."""
    return PydanticCustomError("refused", "{message}", {"message": message, "code": code, "param": param})


def _asks_for_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    # By type as well: 0 and false are equal, and need not both ask for nothing.
    return value is None or any(type(value) is type(none) and value == none for none in neutral)
