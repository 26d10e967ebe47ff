"""Lower bounds of what fits a schema, and schemas that nothing finite fits."""

import json
from math import inf
from typing import Any

import pytest

from headrace.engine.schema_size import least_chars

NODE = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/node"}}}


@pytest.mark.parametrize(
    ("schema", "shortest"),
    [
        ({"type": "integer"}, 0),
        ({"type": "boolean"}, True),
        ({"type": ["string", "null"]}, ""),
        ({"type": "string", "minLength": 5}, "abcde"),
        ({"const": {"a": [1, "ü"]}}, {"a": [1, "ü"]}),
        ({"enum": ["yes", 12, None]}, 12),
        ({"type": "array", "minItems": 3, "items": {"type": "boolean"}}, [True] * 3),
        ({"type": "array", "minItems": 3, "prefixItems": [{"const": "xyz"}]}, ["xyz", 0, 0]),
        ({"type": "array", "minItems": 2, "items": [{"const": "xyz"}, {"type": "null"}]}, ["xyz", None]),
        ({"type": "array", "items": False}, []),
        ({"type": "object", "required": ["a", "b"], "properties": {"b": {"type": "null"}}}, {"a": 0, "b": None}),
        ({"type": "object", "minProperties": 1}, {"": 0}),
        ({"anyOf": [{"type": "null"}, {"type": "string"}]}, ""),
        ({"allOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, "ab"),
        ({"$defs": {"n": {"type": "null"}}, "$ref": "#/$defs/n"}, None),
        ({"$defs": {"a/b": {"type": "null"}}, "$ref": "#/$defs/a~1b"}, None),
        ({"$defs": {"node": {"anyOf": [NODE, {"type": "null"}]}}, "$ref": "#/$defs/node"}, None),
        ({"type": "object", "required": ["kids"],
          "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}, {"kids": []}),
    ],
)  # fmt: skip
def test_the_bound_is_met_by_the_shortest_value(schema: dict[str, Any], shortest: Any) -> None:
    assert least_chars(schema) == len(json.dumps(shortest, ensure_ascii=False))


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"$id": "a", "$ref": "#"},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        {"$defs": {"node": NODE}, "type": "array", "minItems": 1, "items": {"$ref": "#/$defs/node"}},
        {"allOf": [{"type": "object"}, {"required": ["a"], "type": "object", "properties": {"a": {"$ref": "#"}}}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}},
         "$ref": "#/$defs/a"},
    ],
)  # fmt: skip
def test_what_needs_itself_has_no_end(schema: Any) -> None:
    assert least_chars(schema) == inf


@pytest.mark.parametrize(
    "schema",
    [
        True, 5, {}, {"type": 5}, {"type": []}, {"enum": []}, {"anyOf": {}}, {"required": "a"}, {"properties": [1]},
        {"$ref": 5}, {"$ref": "#/nowhere"}, {"$ref": "https://example.com/schema"}, {"$ref": "#anchor"},
        {"$id": "a", "$ref": "#/$defs/x", "$defs": {"x": {"$id": "b", "$ref": "#"}}},
        {"minItems": 2.0}, {"minItems": -1}, {"$ref": "#/anyOf/x", "anyOf": [1]}, {"$ref": "#/type/0", "type": ["x"]},
    ],
)  # fmt: skip
def test_what_is_not_understood_bounds_nothing(schema: Any) -> None:
    assert least_chars(schema) <= 1


def test_a_long_chain_of_references_is_followed_once() -> None:
    chain = {f"s{n}": {"$ref": f"#/$defs/s{n + 1}"} for n in range(2000)}
    assert least_chars({"$defs": chain | {"s2000": {"type": "null"}}, "$ref": "#/$defs/s0"}) == 4
