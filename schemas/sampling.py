"""How to choose tokens: what a job may ask for under ``sampling``."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from headrace.schemas.errors import ErrorCode
from headrace.schemas.options import WRITTEN, refusal, refuse_unsupported, without_nulls

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 24  # an engine keeps 32 a sequence, the model's own end tokens among them
MAX_CHOICES = 128
MAX_BAD_WORDS = 128
MAX_LISTED = 1024
MAX_LOGPROBS = 20
INT64 = 2**63


# A description says what is allowed; an error message is the field's path, "must be" and that.
TokenId = Annotated[
    int, Field(ge=0, lt=2**31, description=f"a whole number from 0 to {2**31 - 1:,}: a token id of the model")
]
Stop = Annotated[
    str,
    Field(
        min_length=1, max_length=MAX_STOP_CHARS, description=f"a string of 1 to {MAX_STOP_CHARS} characters"
    ),
]
# Lists fail fast: a million wrong items would else cost seconds, and gigabytes, of errors that nobody reads.
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _check_bias(bias: Any) -> Any:
    """Entry by entry, before pydantic would: there is no failing fast for objects."""
    if not isinstance(bias, dict):
        return bias
    if len(bias) > MAX_LISTED:
        raise refusal(ErrorCode.INVALID_VALUE, f"must have at most {MAX_LISTED:,} entries")
    for token, value in bias.items():
        if not (
            isinstance(token, str)
            and token.isascii()
            and token.isdigit()
            and len(token) <= 10
            and int(token) < 2**31
        ):
            raise refusal(ErrorCode.INVALID_VALUE, "must have token ids for names, as strings")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refusal(ErrorCode.INVALID_TYPE, "must have numbers from -100 to 100 for values")
        if not -100 <= value <= 100:
            raise refusal(ErrorCode.INVALID_VALUE, "must have numbers from -100 to 100 for values")
    return bias


def _check_logprobs(logprobs: bool | int | None) -> bool | int | None:
    # Here and not in the type: pydantic would tell of the union's first member, that 21 is not true or false.
    if logprobs is not None and not 0 <= logprobs <= MAX_LOGPROBS:
        raise refusal(
            ErrorCode.INVALID_VALUE, f"must be true or false, or a whole number from 0 to {MAX_LOGPROBS}"
        )
    return logprobs


def _all_as_zero(top_k: Any) -> Any:
    return 0 if top_k == -1 else top_k


class Sampling(BaseModel):
    """How to choose tokens. What is left out is the model's own default (generation_config.json)."""

    model_config = WRITTEN

    temperature: float | None = Field(
        default=None,
        ge=0,
        le=2,
        allow_inf_nan=False,
        description="a number from 0 to 2; 0 always takes the likeliest token",
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="a number above 0 and up to 1; 1 keeps all tokens",
    )
    top_k: Annotated[
        Annotated[int, Field(ge=0, lt=2**31)] | None,
        BeforeValidator(_all_as_zero, json_schema_input_type=Annotated[int, Field(ge=-1, lt=2**31)] | None),
    ] = Field(default=None, description="a whole number, 1 or more, or else 0 or -1, which keep all tokens")
    min_p: float | None = Field(
        default=None, ge=0, le=1, allow_inf_nan=False, description="a number from 0 to 1; 0 keeps all tokens"
    )
    seed: int | None = Field(
        default=None,
        ge=-INT64,
        lt=INT64,
        description="a whole number from -2^63 to 2^63 - 1; the same seed gives the same answer",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        lt=2**31,
        description=f"a whole number from 1 to {2**31 - 1:,}; left out, or above what fits, it is what the context leaves",
    )
    max_completion_tokens: int | None = Field(
        default=None,
        ge=1,
        lt=2**31,
        description=f"a whole number from 1 to {2**31 - 1:,}; this is another name of max_tokens",
    )
    min_tokens: int = Field(
        default=0, ge=0, lt=2**31, description="a whole number, 0 or more, and at most max_tokens"
    )
    stop: Annotated[
        Stops,
        BeforeValidator(_as_list, json_schema_input_type=Stop | Stops),
    ] = Field(
        default_factory=list,
        description=f"a string or a list of up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters",
    )
    stop_token_ids: list[TokenId] = Field(
        default_factory=list,
        max_length=MAX_STOP_TOKEN_IDS,
        fail_fast=True,
        description=f"a list of up to {MAX_STOP_TOKEN_IDS} token ids",
    )
    ignore_eos: bool = Field(
        default=False, description="true or false; true goes on past the model's own end tokens"
    )
    include_stop_str_in_output: bool = Field(
        default=False,
        description="true or false; true keeps the stop string or stop token that ended the answer",
    )
    n: int = Field(
        default=1,
        ge=1,
        le=MAX_CHOICES,
        description=f"a whole number from 1 to {MAX_CHOICES}; it says how many answers to give",
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        le=10,
        allow_inf_nan=False,
        description="a number above 0 and up to 10; above 1 makes all tokens of prompt and answer less likely",
    )
    presence_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        allow_inf_nan=False,
        description="a number from -2 to 2; it is subtracted from the logits of the answer's tokens",
    )
    frequency_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        allow_inf_nan=False,
        description="a number from -2 to 2; it is subtracted as often as the token stands in the answer",
    )
    logit_bias: Annotated[dict[str, float], BeforeValidator(_check_bias)] = Field(
        default_factory=dict,
        max_length=MAX_LISTED,
        description=f"an object of up to {MAX_LISTED:,} token ids, as strings, with numbers from -100 to 100 to add to logits",
    )
    allowed_token_ids: Annotated[
        list[TokenId] | None, Field(min_length=1, max_length=MAX_LISTED, fail_fast=True)
    ] = Field(default=None, description=f"a list of 1 to {MAX_LISTED:,} token ids; no other token may come")
    banned_token_ids: list[TokenId] = Field(
        default_factory=list,
        max_length=MAX_LISTED,
        fail_fast=True,
        description=f"a list of up to {MAX_LISTED:,} token ids, none of which may come",
    )
    bad_words: list[Stop] = Field(
        default_factory=list,
        max_length=MAX_BAD_WORDS,
        fail_fast=True,
        description=f"a list of up to {MAX_BAD_WORDS} strings, each of 1 to {MAX_STOP_CHARS} characters, that may not come",
    )
    logprobs: Annotated[bool | int | None, AfterValidator(_check_logprobs)] = Field(
        default=None,
        json_schema_extra={"minimum": 0, "maximum": MAX_LOGPROBS},
        description=f"true or false, or a whole number from 0 to {MAX_LOGPROBS}: how many of the likeliest tokens to report"
        " beside each chosen one",
    )
    top_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description=f"a whole number from 0 to {MAX_LOGPROBS}: how many of the likeliest tokens to report, beside logprobs: true",
    )
    skip_special_tokens: bool = Field(
        default=True, description="true or false; false writes special tokens out in the answer"
    )
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        lt=2**31,
        description="a whole number, 1 or more; only so many tokens of the prompt's end are used",
    )
    echo: bool = Field(
        default=False,
        description="true or false; true puts the prompt before the answer, with its logprobs where those are asked for;"
        " not for messages",
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description=f"a whole number from 0 to {MAX_LOGPROBS}: how many of the likeliest tokens to report beside each token of the"
        " prompt",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        refuse_unsupported(data)
        return without_nulls(data)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        """Fold max_completion_tokens into max_tokens, the only one that readers look at."""
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise refusal(
                    ErrorCode.INVALID_VALUE,
                    "must equal max_tokens, or one of the two be left out",
                    "max_completion_tokens",
                )
            self.max_tokens, self.max_completion_tokens = self.max_completion_tokens, None
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refusal(
                ErrorCode.INVALID_VALUE, f"must be at most max_tokens ({self.max_tokens})", "min_tokens"
            )
        return self

    @model_validator(mode="after")
    def _consistent_logprobs(self) -> Self:
        if self.top_logprobs and self.logprobs is not True and self.logprobs != self.top_logprobs:
            raise refusal(ErrorCode.INVALID_VALUE, "must stand beside logprobs: true", "top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report; 0 is the chosen ones alone, None nothing."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return (self.top_logprobs or 0) if self.logprobs is True else self.logprobs
