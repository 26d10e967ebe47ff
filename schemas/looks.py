"""Jobs that look at a prompt and generate nothing: what they may ask for."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from headrace.schemas.options import WRITTEN, refuse_unsupported, without_nulls
from headrace.schemas.sampling import TokenId

MAX_CONTINUATIONS = 1024
MAX_INPUTS = 2048  # as OpenAI has it
MAX_TEXT_CHARS = 1_000_000
MAX_TEXT_TOKENS = 1_000_000

# By a tag (that no field is called), so that an error speaks of the form that was meant.
TextOrIds = Annotated[
    Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARS), Tag("<text>")]
    | Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TEXT_TOKENS, fail_fast=True), Tag("<ids>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<ids>"),
    Field(description="a string that is not empty, or a list of token ids"),
]
Continuations = Annotated[list[TextOrIds], Field(min_length=1, max_length=MAX_CONTINUATIONS, fail_fast=True)]
Inputs = Annotated[list[TextOrIds], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


def _given(fields: Any) -> Any:
    if not isinstance(fields, dict):
        return fields
    refuse_unsupported(fields)
    return without_nulls(fields)


class Embedding(BaseModel):
    """How the hidden states of a prompt become its vector."""

    model_config = WRITTEN

    pooling: Literal["mean", "last", "cls"] = Field(
        default="last",
        description="mean, last or cls (the first): which of the hidden states after the last norm make the vector",
    )
    normalize: bool = Field(default=True, description="true or false; true gives the vector length 1")
    encoding_format: Literal["float", "base64"] = Field(
        default="float",
        description="float or base64; base64 encodes the vector's values as little-endian fp32",
    )


EmbeddingOptions = Annotated[Embedding, BeforeValidator(_given)]
