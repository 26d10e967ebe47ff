"""A conversation on the wire: messages, the tools a model may call, and the calls that it made."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from headrace.schemas.errors import ErrorCode
from headrace.schemas.options import WRITTEN, refusal, without_nulls

MAX_MESSAGES = 10_000
MAX_TOOLS = 128
MAX_TOOL_NAME_CHARS = 64


class TextPart(BaseModel):
    """A piece of a message."""

    model_config = WRITTEN

    type: Literal["text"] = Field(description='"text"; other kinds of content are not supported yet')
    text: str = Field(description="a string")


# By a tag (that no field is called), so that an error speaks of the form that was meant.
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("<parts>")],
    Discriminator(lambda content: "<text>" if isinstance(content, str) else "<parts>"),
]
ToolName = Annotated[
    str,
    Field(
        pattern=rf"^[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}$",
        description=f"a string of 1 to {MAX_TOOL_NAME_CHARS} letters, digits, _ and -",
    ),
]


def _as_json(arguments: Any) -> Any:
    """OpenAI has arguments as JSON in a string; the object itself, as Transformers has it, is taken as well."""
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, str) and not is_json_object(arguments):
        raise refusal(ErrorCode.INVALID_VALUE, "must be a JSON object, as a string or as it is")
    return arguments


def is_json_object(text: str) -> bool:
    """Whether the text is one JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class FunctionCall(BaseModel):
    """Which function to call, with what."""

    model_config = WRITTEN

    name: str = Field(min_length=1, description="a string that is not empty: the function's name")
    arguments: Annotated[str, BeforeValidator(_as_json, json_schema_input_type=str | dict[str, Any])] = Field(
        default="{}", description="a JSON object, as a string (OpenAI) or as it is"
    )


class ToolCall(BaseModel):
    """A call that the model made."""

    model_config = WRITTEN

    id: str | None = Field(default=None, description="a string; the tool's answer names it")
    type: Literal["function"] = Field(default="function", description='"function"')
    function: FunctionCall = Field(description="an object with the function's name and its arguments")


def _developer_as_system(role: Any) -> Any:
    # OpenAI's newer name. Chat templates do not know it, and some drop a message whose role they do not know.
    return "system" if role == "developer" else role


class Message(BaseModel):
    """A turn of a conversation."""

    model_config = WRITTEN

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(
            _developer_as_system,
            json_schema_input_type=Literal["system", "developer", "user", "assistant", "tool"],
        ),
    ] = Field(description="one of system, user, assistant and tool; developer is another name of system")
    content: Content | None = Field(
        default=None,
        description="a string or a list of text parts; only a message with tool_calls may have none",
    )
    name: str | None = Field(
        default=None, description="a string; it says who speaks, for templates that show it"
    )
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list,
        description=f"a list of up to {MAX_TOOLS} calls that the assistant made; only in an assistant's message",
    )
    tool_call_id: str | None = Field(
        default=None, description="a string; it names the call that this answers; only in a tool's message"
    )
    reasoning_content: str | None = Field(
        default=None,
        description="a string: what the assistant thought, for templates that show it; only in an assistant's message",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for field in ("function_call", "audio"):
            if data.get(field):
                raise refusal(ErrorCode.UNSUPPORTED_OPTION, "is not supported yet; leave it out", field)
        return without_nulls(data)

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            message = "is missing; it must be a string or a list of text parts"
            raise refusal(ErrorCode.MISSING_FIELD, message, "content")
        for field, role in (
            ("tool_calls", "assistant"),
            ("tool_call_id", "tool"),
            ("reasoning_content", "assistant"),
        ):
            if getattr(self, field) and self.role != role:
                message = f"must be left out of a message with another role than {role}"
                raise refusal(ErrorCode.INVALID_VALUE, message, field)
        return self

    @property
    def text(self) -> str:
        """The content; parts are joined by line ends."""
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)


class Function(BaseModel):
    """A function that the model may call. What else it says is shown to the model as it is."""

    model_config = WRITTEN | ConfigDict(extra="allow")

    name: ToolName = Field(
        description=f"a string of 1 to {MAX_TOOL_NAME_CHARS} letters, digits, _ and -, unlike the other tools'"
    )
    description: str | None = Field(
        default=None, description="a string; it tells the model when to call the function"
    )
    parameters: dict[str, Any] | None = Field(
        default=None, description="an object: the JSON Schema of the arguments, which are an object"
    )
    strict: bool | None = Field(
        default=None,
        description="true or false; true makes every call's arguments fit the schema; so does a tool_choice that"
        " makes the model call a function",
    )

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Self:
        if (self.parameters or {}).get("type", "object") != "object":
            message = 'must be "object": arguments have names'
            raise refusal(ErrorCode.INVALID_VALUE, message, "parameters", "type")
        return self


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = WRITTEN

    type: Literal["function"] = Field(description='"function"')
    function: Function = Field(description="an object with the function's name, description and parameters")


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = WRITTEN

    name: str = Field(description="a string: the name of one of the tools")


class NamedTool(BaseModel):
    """The one tool to call."""

    model_config = WRITTEN

    type: Literal["function"] = Field(description='"function"')
    function: NamedFunction = Field(description="an object with the function's name")


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[NamedTool, Tag("<named>")],
    Discriminator(lambda choice: "<named>" if isinstance(choice, dict | NamedTool) else "<word>"),
]
