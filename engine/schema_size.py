"""How long the shortest JSON is that fits a schema: a lower bound, infinite where no finite value can fit.

References make the bounds a system of equations: a schema that needs itself (a required property that is the schema again)
is as long as itself and more. Bounds begin at infinity and fall until none changes, so what has a finite value gets one.
Keywords that only a search could weigh (``not``, ``pattern``, ``if``) count for nothing.
"""

import json
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from headrace.engine.grammar import JSON_FORM

_COMMA, _COLON = len(str(JSON_FORM["item_separator"])), len(str(JSON_FORM["key_separator"]))
_ATOMS = {"string": 2, "number": 1, "integer": 1, "boolean": 4, "null": 4}
_SHORTEST_PROPERTY = len('""') + _COLON + 1


def least_chars(schema: Any) -> float:
    """No JSON that fits has fewer characters. Infinite: none fits."""
    return _Bounds(schema).of_all()


class _Bounds:
    """Bounds of a document's references, by what they lead to."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._known: dict[str, float] = {}
        # References inside a part with an $id of its own lead elsewhere: then none is followed.
        own = isinstance(document, dict) and "$id" in document
        self._is_one = _written(document).count('"$id"') == own

    def of_all(self) -> float:
        met = self._references()
        while True:
            before = dict(self._known)
            for reference in reversed(met):  # the last met depend on the fewest others
                self._known[reference] = self._of(_at(self._document, reference))
            if self._known == before:
                return self._of(self._document)

    def _references(self) -> list[str]:
        """All references that the document's own bound depends on, in the order in which they are met."""
        self._of(self._document)
        met = list(self._known)
        for reference in met:  # grows
            self._of(_at(self._document, reference))
            met += list(self._known)[len(met) :]
        return met

    def _of(self, schema: Any) -> float:
        """The bound of one schema, as far as those of its references are known."""
        if schema is False:
            return inf
        if not isinstance(schema, dict):
            return 1
        if isinstance(reference := schema.get("$ref"), str):
            follows = self._is_one and _leads(self._document, reference)
            return self._known.setdefault(reference, inf) if follows else 1
        bounds = [self._of_types(schema)]
        if "const" in schema:
            bounds.append(len(_written(schema["const"])))
        if values := _list(schema.get("enum")):
            bounds.append(min(len(_written(value)) for value in values))
        bounds += [self._of(part) for part in _list(schema.get("allOf"))]
        for keyword in ("anyOf", "oneOf"):
            if parts := _list(schema.get(keyword)):
                bounds.append(min(map(self._of, parts)))
        return max(bounds)

    def _of_types(self, schema: Mapping[str, Any]) -> float:
        types = schema.get("type", [*_ATOMS, "object", "array"])
        sizes: dict[str, Callable[[Mapping[str, Any]], float]] = {
            "object": self._of_object,
            "array": self._of_array,
            "string": lambda schema: 2 + _count(schema.get("minLength")),
        }
        names = (
            [types] if isinstance(types, str) else [name for name in _list(types) if isinstance(name, str)]
        )
        return min(
            (sizes[name](schema) if name in sizes else _ATOMS.get(name, 1) for name in names), default=1
        )

    def _of_object(self, schema: Mapping[str, Any]) -> float:
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        required = {name for name in _list(schema.get("required")) if isinstance(name, str)}
        sizes = [len(_written(name)) + _COLON + self._of(known.get(name, True)) for name in required]
        return _enclosed(sum(sizes), len(sizes), _count(schema.get("minProperties")), _SHORTEST_PROPERTY)

    def _of_array(self, schema: Mapping[str, Any]) -> float:
        first, rest = _list(schema.get("prefixItems")), schema.get("items", True)
        if isinstance(rest, list):  # as drafts before 2020-12 have it
            first, rest = rest, schema.get("additionalItems", True)
        least = _count(schema.get("minItems"))
        if not least:
            return 2
        sizes = [self._of(item) for item in first[:least]]
        return _enclosed(sum(sizes), len(sizes), least, self._of(rest) if least > len(sizes) else 0)


def _enclosed(size: float, count: int, least: int, size_of_more: float) -> float:
    """The size between brackets of so many members, with commas, filled up to the least number of them."""
    more = max(0, least - count)
    members = count + more
    return 2 + size + (more * size_of_more if more else 0) + max(0, members - 1) * _COMMA


def _leads(document: Any, reference: str) -> bool:
    """Whether a reference leads inside its document by a path of names; others are not followed."""
    try:
        _at(document, reference)
    except (KeyError, IndexError, ValueError, TypeError):
        return False
    return True


def _at(document: Any, reference: str) -> Any:
    """What a reference (``#/$defs/node``) leads to. Raises where it leads nowhere."""
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(reference)
    part = document
    for name in reference.split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        part = part[int(key)] if isinstance(part, list) else part[key]
    return part


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
