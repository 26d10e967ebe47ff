"""How to choose tokens: what a job may ask for under ``sampling``."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from headrace.schemas.errors import ErrorCode
from headrace.schemas.options import refusal, refuse_unsupported, without_nulls
from headrace.schemas.wire import is_unicode

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
INT64 = 2**63


def _check_unicode(text: str) -> str:
    if not is_unicode(text):
        raise refusal(
            ErrorCode.INVALID_TEXT, "holds a lone surrogate, which is no character; send valid Unicode"
        )
    return text


# A description says what is allowed; an error message is the field's path, "must be" and that.
Text = Annotated[str, AfterValidator(_check_unicode)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, description="a token id of the model, 0 or more")]
Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARS)]
# Lists fail fast: a million wrong items would else cost seconds, and gigabytes, of errors that nobody reads.
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _all_as_zero(top_k: Any) -> Any:
    return 0 if top_k == -1 else top_k


class Sampling(BaseModel):
    """How to choose tokens. What is left out is the model's own default (generation_config.json)."""

    model_config = ConfigDict(strict=True, extra="ignore")

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
    ] = Field(default=None, description="a whole number, 1 or more; 0 or -1 keeps all tokens")
    min_p: float | None = Field(
        default=None, ge=0, le=1, allow_inf_nan=False, description="a number from 0 to 1; 0 keeps all tokens"
    )
    seed: int | None = Field(
        default=None,
        ge=-INT64,
        lt=INT64,
        description="a whole number of 64 bits; the same seed gives the same answer",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        lt=2**31,
        description="a whole number, 1 or more; left out: what the model's context leaves",
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, lt=2**31, description="a whole number, 1 or more; another name of max_tokens"
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
