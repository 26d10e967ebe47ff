"""JSON in and out, for readers that must not fall over: not on the user's bytes, and not on what Postgres refuses."""

import json
import math
from typing import Any

import orjson

from headrace.schemas.errors import ErrorCode, Unparsable

MAX_RECORD_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 64
TOO_DEEP = f"the value is nested too deep; at most {MAX_DEPTH} levels are allowed"
_REPLACEMENT = "\ufffd"


def load_object(value: bytes | None) -> dict[str, Any]:
    """The JSON object in a record's value. Raises Unparsable.

    More is let through than JSON allows (NaN, huge numbers, lone surrogates, a byte order mark), so that validation
    can name the field that is wrong, and the job fails under its own id.
    """
    if value is None or not value.strip():
        raise Unparsable(ErrorCode.EMPTY_VALUE, "the record has no value; send a JSON object")
    if len(value) > MAX_RECORD_BYTES:
        message = f"the value has {len(value):,} bytes; at most {MAX_RECORD_BYTES:,} are allowed"
        raise Unparsable(ErrorCode.MESSAGE_TOO_LARGE, message)
    try:
        parsed = orjson.loads(value)
    except orjson.JSONDecodeError:
        parsed = _load_leniently(value)
    if not isinstance(parsed, dict):
        raise Unparsable(ErrorCode.NOT_AN_OBJECT, f"the value is a JSON {_json_type(parsed)}; send an object")
    if nested_too_deep(value, parsed):
        raise Unparsable(ErrorCode.NESTED_TOO_DEEP, TOO_DEEP)
    return parsed


def _load_leniently(value: bytes) -> Any:
    try:
        return json.loads(value.decode("utf-8-sig"), parse_int=_parse_int)
    except UnicodeDecodeError as error:
        message = f"the value is not UTF-8 (byte {error.start})"
        raise Unparsable(ErrorCode.INVALID_ENCODING, message) from None
    except json.JSONDecodeError as error:
        # Mostly the value is a line itself, with a number of its own in its file.
        line = f"line {error.lineno}, " if "\n" in error.doc.strip() else ""
        message = f"the value is not JSON ({line}column {error.colno}: {error.msg})"
        raise Unparsable(ErrorCode.INVALID_JSON, message) from None
    except RecursionError:
        raise Unparsable(ErrorCode.NESTED_TOO_DEEP, TOO_DEEP) from None


def _parse_int(digits: str) -> int | float:
    # As orjson does: whole numbers beyond 64 bits are floats. Also spares Python's limit on digits.
    return int(digits) if len(digits) < 19 else float(digits)


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    return {bool: "boolean", str: "string", list: "array"}.get(type(value), "number")


def dump(value: Any) -> bytes:
    """JSON that Kafka's readers and Postgres' jsonb both take, whatever strings and numbers are in ``value``."""
    try:
        data = orjson.dumps(value, option=orjson.OPT_UTC_Z)
    except (orjson.JSONEncodeError, RecursionError):
        return orjson.dumps(clean_json(value), option=orjson.OPT_UTC_Z)
    # An escaped backslash before u0000 matches as well; cleaning leaves that alone.
    return orjson.dumps(clean_json(value), option=orjson.OPT_UTC_Z) if b"\\u0000" in data else data


def clean_text(text: str) -> str:
    """``text`` as Postgres takes it: U+FFFD for each NUL and each lone surrogate."""
    if text.isascii() and "\0" not in text:
        return text
    text = text.replace("\0", _REPLACEMENT)
    if is_unicode(text):
        return text
    # A pair that arrived as two escapes is one character; what is left alone after that is none.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clean_json(value: Any, depth: int = MAX_DEPTH) -> Any:
    """``value`` as jsonb takes it: clean strings and keys, null for NaN and what is nested deeper than ``depth``."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else clean_json(_as_float(value))
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth == 0:
        return None
    if isinstance(value, dict):
        return {clean_text(str(key)): clean_json(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean_json(item, depth - 1) for item in value]
    return value


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be encoded: false for lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def nested_too_deep(value: bytes, parsed: Any) -> bool:
    """Whether ``parsed``, read from ``value``, has more than MAX_DEPTH levels of objects and arrays."""
    # Few brackets cannot nest deep, and counting them costs nothing: most records are never walked.
    if value.count(b"{") + value.count(b"[") <= MAX_DEPTH:
        return False
    level = [parsed]
    for _ in range(MAX_DEPTH):
        level = [item for container in level for item in _items(container) if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _items(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container
