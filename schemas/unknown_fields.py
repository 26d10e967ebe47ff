"""Fields that no job has: workers pass over them, since producers may be newer, and whoever submits is told.

Looked at are the fields of a job, its sampling and embedding options, and the fields of a batch line and its body. What is
below them is left alone: much of it is the producer's own (metadata, JSON schemas, arguments).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from headrace.schemas.batch_line import BODY_FIELDS, LINE_FIELDS, is_batch_line
from headrace.schemas.job import JOB_FIELDS, SAMPLING_OPTIONS
from headrace.schemas.looks import Embedding
from headrace.schemas.options import NOT_YET
from headrace.schemas.wire import clean_text

MOST_NAMED = 100  # of the fields of a file, which may have another in each line
_SHOWN_CHARS = 64
_EMBEDDING_OPTIONS = frozenset(Embedding.model_fields)
# OpenAI has these, and an answer is none the worse without them.
_HARMLESS = {
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
}


class _Place(NamedTuple):
    """An object with fields of ours. known: those that are read there, refused there, or harmless. meant: paths by name."""

    path: str
    known: frozenset[str]
    meant: Mapping[str, str]


def _place(path: str, fields: Collection[str], known: Collection[str], **others: Collection[str]) -> _Place:
    """others: fields of the objects of these names, which someone may have meant here."""
    meant = {name: f"{other}.{name}" for other, names in others.items() for name in names}
    return _Place(
        path, frozenset({*fields, *known, *NOT_YET}), meant | {name: f"{path}{name}" for name in fields}
    )


_JOB = _place("", JOB_FIELDS, SAMPLING_OPTIONS, sampling=SAMPLING_OPTIONS)
_SAMPLING = _place("sampling.", SAMPLING_OPTIONS, JOB_FIELDS)
_EMBEDDING = _place("embedding.", _EMBEDDING_OPTIONS, ())
_BODY_OPTIONS = {"model", "messages", "prompt", "input", *_EMBEDDING_OPTIONS, *BODY_FIELDS}
_BODY = _place("body.", _BODY_OPTIONS, _HARMLESS)
_LINE = _place("", {"method", "url", "body", *LINE_FIELDS}, BODY_FIELDS, body=_BODY_OPTIONS)


@dataclass(slots=True)
class UnknownField:
    """A field that no job has. path: where it stands. meant: the path of the known one most like it. line: the first with it.

    more: how many other lines have it.
    """

    path: str
    meant: str | None
    line: int
    more: int = 0

    def __str__(self) -> str:
        meant = f"; did you mean {self.meant}?" if self.meant else ""
        lines = "line" if self.more == 1 else "lines"
        more = f" (and {self.more:,} more {lines})" if self.more else ""
        return f"line {self.line}: {self.path} is no field of a job and is ignored{meant}{more}"


@dataclass(slots=True)
class UnknownFields:
    """Those of the lines of a file, each once, the first MOST_NAMED of them."""

    _found: dict[str, UnknownField] = field(default_factory=dict)

    @property
    def found(self) -> list[UnknownField]:
        """In the order in which they were met."""
        return list(self._found.values())

    def note(self, record: Mapping[str, Any], number: int) -> list[UnknownField]:
        """Take in the ``number``-th line, as its JSON says. Returns those that no line had before."""
        fresh = []
        for place, fields in _places(record):
            if isinstance(fields, dict) and not place.known.issuperset(fields):
                for name in _unknown(fields, place):
                    if (known := self._found.get(place.path + name)) is not None:
                        known.more += 1
                    elif len(self._found) < MOST_NAMED:
                        found = UnknownField(place.path + name, _meant(name, place), number)
                        self._found[found.path] = found
                        fresh.append(found)
        return fresh


def _places(record: Mapping[str, Any]) -> tuple[tuple[_Place, Any], ...]:
    if is_batch_line(record):
        return (_LINE, record), (_BODY, record.get("body"))
    return (_JOB, record), (_SAMPLING, record.get("sampling")), (_EMBEDDING, record.get("embedding"))


def _unknown(fields: Mapping[str, Any], place: _Place) -> Iterator[str]:
    """Names as they can be printed; null is another way to leave a field out."""
    for name, value in fields.items():
        if name not in place.known and value is not None:
            yield clean_text(name[:_SHOWN_CHARS])


def _meant(name: str, place: _Place) -> str | None:
    return next((place.meant[like] for like in get_close_matches(name, place.meant, n=1)), None)
