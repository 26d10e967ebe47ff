"""The form that an answer must have: OpenAI's ``response_format``, and vLLM's ways to say the same.

``AnswerForm`` is what all of them come to.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from headrace.schemas.errors import ErrorCode
from headrace.schemas.explain import LONE_SURROGATE
from headrace.schemas.options import WRITTEN, refusal, without_nulls
from headrace.schemas.wire import is_unicode

MAX_FORM_CHARS = 128 * 1024
MAX_FORM_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer must be. path: where the producer wrote it. kind: the language of ``value``.

    value: an object for ``json_schema``, a list of strings for ``choice``, else a string. strict: whether keywords of a
    schema that cannot be enforced are refused.
    """

    path: str
    kind: Literal["json_schema", "regex", "choice", "grammar"]
    value: Any
    strict: bool = True


ANY_OBJECT = {"type": "object"}


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_FORM_CHARS:
        raise refusal(ErrorCode.INVALID_VALUE, f"must have at most {MAX_FORM_CHARS:,} characters as JSON")
    if not is_unicode(text):
        raise refusal(ErrorCode.INVALID_TEXT, LONE_SURROGATE)
    return schema


def _check_choices(choices: list[str]) -> list[str]:
    if sum(map(len, choices)) > MAX_FORM_CHARS // 2:
        raise refusal(
            ErrorCode.INVALID_VALUE, f"must have at most {MAX_FORM_CHARS // 2:,} characters together"
        )
    return choices


def _from_text(schema: Any) -> Any:
    """vLLM takes a schema as text, too."""
    if isinstance(schema, str):
        try:
            return orjson.loads(schema)
        except ValueError:
            raise refusal(ErrorCode.INVALID_VALUE, "must be a JSON Schema, as an object or as text") from None
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(_check_schema)]
SchemaOrText = Annotated[Schema, BeforeValidator(_from_text, json_schema_input_type=dict[str, Any] | str)]
Source = Annotated[str, Field(min_length=1, max_length=MAX_FORM_CHARS)]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1, description="a string that is not empty")]],
    Field(min_length=1, max_length=MAX_FORM_CHOICES, fail_fast=True),
    AfterValidator(_check_choices),
]
SCHEMA_IS = f"a JSON Schema, an object of up to {MAX_FORM_CHARS:,} characters as JSON"
REGEX_IS = f"a regular expression of 1 to {MAX_FORM_CHARS:,} characters; the whole answer matches it"
CHOICES_ARE = f"a list of 1 to {MAX_FORM_CHOICES:,} strings; the answer is one of them"
GRAMMAR_IS = f"a grammar in Lark's notation, of 1 to {MAX_FORM_CHARS:,} characters; the answer is its `start`"


class _Form(BaseModel):
    model_config = WRITTEN | ConfigDict(populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        return without_nulls(data) if isinstance(data, dict) else data


class JsonSchema(_Form):
    """A schema, as OpenAI wraps it."""

    name: str | None = Field(default=None, description="a string; it names the schema, for people")
    schema_: Schema = Field(alias="schema", description=SCHEMA_IS)
    strict: bool = Field(
        default=True,
        description="true or false; false passes over keywords of the schema that cannot be enforced",
    )


class ResponseFormat(_Form):
    """OpenAI's types, and after them ours."""

    type: Literal["text", "json_object", "json_schema", "regex", "choice", "grammar"] = Field(
        description="one of text, json_object, json_schema, regex, choice and grammar; what each of the last four asks for stands"
        " in the field of its name"
    )
    json_schema: JsonSchema | None = Field(default=None, description="an object with the schema")
    regex: Source | None = Field(default=None, description=REGEX_IS)
    choice: Choices | None = Field(default=None, description=CHOICES_ARE)
    grammar: Source | None = Field(default=None, description=GRAMMAR_IS)

    @model_validator(mode="after")
    def _one_of_its_type(self) -> Self:
        for field in ("json_schema", "regex", "choice", "grammar"):
            given = getattr(self, field) is not None
            if field == self.type and not given:
                raise refusal(ErrorCode.MISSING_FIELD, f"is missing; type {self.type} needs it", field)
            if field != self.type and given:
                raise refusal(ErrorCode.INVALID_VALUE, f"must be left out where type is {self.type}", field)
        return self

    def forms(self, path: str) -> Iterable[AnswerForm]:
        """What it asks for: nothing, or one form."""
        if self.type == "json_object":
            yield AnswerForm(path, "json_schema", ANY_OBJECT)
        elif self.json_schema is not None:
            schema = self.json_schema
            yield AnswerForm(f"{path}.json_schema.schema", "json_schema", schema.schema_, schema.strict)
        elif self.type != "text":
            yield AnswerForm(f"{path}.{self.type}", self.type, getattr(self, self.type))


class StructuredOutputs(_Form):
    """vLLM's name for the same. Exactly one of the fields is given."""

    json_: SchemaOrText | None = Field(
        default=None, alias="json", description=f"{SCHEMA_IS}, or that as text"
    )
    regex: Source | None = Field(default=None, description=REGEX_IS)
    choice: Choices | None = Field(default=None, description=CHOICES_ARE)
    grammar: Source | None = Field(default=None, description=GRAMMAR_IS)
    json_object: bool = Field(default=False, description="true or false; true asks for any JSON object")

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [form.path.removeprefix(".") for form in self.forms("")]
        if not given:
            raise refusal(
                ErrorCode.MISSING_FIELD,
                "must have one of json, regex, choice, grammar and json_object",
            )
        if len(given) > 1:
            message = f"must not stand beside {given[0]}: give only one of them"
            raise refusal(ErrorCode.INVALID_VALUE, message, given[1])
        return self

    def forms(self, path: str) -> Iterable[AnswerForm]:
        """Each form that is given."""
        if self.json_ is not None:
            yield AnswerForm(f"{path}.json", "json_schema", self.json_)
        if self.regex is not None:
            yield AnswerForm(f"{path}.regex", "regex", self.regex)
        if self.choice is not None:
            yield AnswerForm(f"{path}.choice", "choice", self.choice)
        if self.grammar is not None:
            yield AnswerForm(f"{path}.grammar", "grammar", self.grammar)
        if self.json_object:
            yield AnswerForm(f"{path}.json_object", "json_schema", ANY_OBJECT)


class AsksForAForm(BaseModel):
    """The fields by which a job may say what form its answer has: at most one of them."""

    response_format: ResponseFormat | None = Field(
        default=None,
        description="an object that says what form the answer has; type text asks for none",
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="an object that says what form the answer has, as vLLM writes it"
    )
    guided_json: SchemaOrText | None = Field(
        default=None,
        description=f"{SCHEMA_IS}, or that as text; this is an older name of structured_outputs.json",
    )
    guided_regex: Source | None = Field(
        default=None, description=f"{REGEX_IS}; this is an older name of structured_outputs.regex"
    )
    guided_choice: Choices | None = Field(
        default=None, description=f"{CHOICES_ARE}; this is an older name of structured_outputs.choice"
    )
    guided_grammar: Source | None = Field(
        default=None, description=f"{GRAMMAR_IS}; this is an older name of structured_outputs.grammar"
    )

    @property
    def answer_form(self) -> AnswerForm | None:
        """The form that the answer must have."""
        return next(iter(self._forms()), None) if self._names_a_form else None

    @property
    def _names_a_form(self) -> bool:
        return not self.model_fields_set.isdisjoint(FORM_FIELDS)

    def _forms(self) -> Iterable[AnswerForm]:
        if self.response_format is not None:
            yield from self.response_format.forms("response_format")
        if self.structured_outputs is not None:
            yield from self.structured_outputs.forms("structured_outputs")
        if self.guided_json is not None:
            yield AnswerForm("guided_json", "json_schema", self.guided_json)
        if self.guided_regex is not None:
            yield AnswerForm("guided_regex", "regex", self.guided_regex)
        if self.guided_choice is not None:
            yield AnswerForm("guided_choice", "choice", self.guided_choice)
        if self.guided_grammar is not None:
            yield AnswerForm("guided_grammar", "grammar", self.guided_grammar)

    @model_validator(mode="after")
    def _at_most_one_form(self) -> Self:
        if not self._names_a_form:
            return self
        fields = list(dict.fromkeys(form.path.partition(".")[0] for form in self._forms()))
        if len(fields) > 1:
            message = f"must not stand beside {fields[0]}: give only one of them"
            raise refusal(ErrorCode.INVALID_VALUE, message, fields[1])
        return self


FORM_FIELDS = tuple(AsksForAForm.model_fields)  # once: pydantic makes it anew each time that it is asked for
