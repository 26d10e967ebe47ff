"""Pydantic's errors, told to people: which field, and what is allowed there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from headrace.schemas.errors import ErrorCode

LONE_SURROGATE = "holds a lone surrogate, which is no character; send valid Unicode"


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is wrong with a job: ``param`` is the dotted path of the field, as the producer wrote it."""

    code: ErrorCode
    message: str
    param: str | None


def explain(
    error: ValidationError, model: type[BaseModel], rename: Callable[[str], str] | None = None
) -> Wrong:
    """The first of ``error``, with the path as ``rename`` gives it."""
    first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {}) if first["type"] == "refused" else {}
    path, allowed = _locate(model, first["loc"])
    path = ".".join(filter(None, (path, *map(str, context.get("param", ())))))
    param = rename(path) if rename else path
    if context:
        return Wrong(context["code"], f"{param} {context['message']}", param)
    if first["type"] == "missing":
        return Wrong(ErrorCode.MISSING_FIELD, f"{param} is missing; it must be {allowed}", param)
    if first["type"] == "string_unicode":
        return Wrong(ErrorCode.INVALID_TEXT, f"{param} {LONE_SURROGATE}", param)
    code = ErrorCode.INVALID_TYPE if first["type"].endswith("_type") else ErrorCode.INVALID_VALUE
    return Wrong(code, f"{param} must be {allowed}" if allowed else f"{param}: {first['msg']}", param)


def _locate(model: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[str, str | None]:
    """The path that ``loc`` stands for, and the description of the innermost field, or item of a list, on it."""
    path: list[str] = []
    allowed: str | None = None
    inside: type[BaseModel] | None = model
    kind: Any = None
    for step in loc:
        if isinstance(step, int):
            path.append(str(step))
            kind = _item_of(kind)
            allowed = _description(kind) or allowed
        elif inside is not None and (field := _field(inside, step)):
            path.append(step)
            kind, allowed, inside = field.annotation, field.description, _model_in(field.annotation)
        # The rest are tags of a union's members and keys of the user's own: neither belongs in a message.
    return ".".join(path), allowed


def _field(model: type[BaseModel], name: str) -> FieldInfo | None:
    """The model's field that is written so."""
    found = (field for field_name, field in model.model_fields.items() if (field.alias or field_name) == name)
    return next(found, None)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def _item_of(annotation: Any) -> Any:
    """What the list in ``annotation`` is made of."""
    if get_origin(annotation) is list:
        return get_args(annotation)[0]
    return next((found for part in get_args(annotation) if (found := _item_of(part)) is not None), None)


def _description(item: Any) -> str | None:
    if get_origin(item) is Annotated:
        described = (part.description for part in item.__metadata__ if isinstance(part, FieldInfo))
        return next(filter(None, described), None)
    return "an object" if isinstance(item, type) and issubclass(item, BaseModel) else None
