"""How the fields of a record stand in a JSON object, and how they are read back: from the class itself.

Rules:

1. Words stand as words, bytes as base64, numbers as whole numbers.
2. A field that is None is left out, every other one is there. No other key is taken.
"""

import base64
import binascii
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Final, TypeAlias, get_args

import attrs

from runtara.records import CompensationSpec, Named

Json: TypeAlias = dict[str, Any]


# ---------------------------------------------------------------- values


@attrs.frozen
class Codec:
    """How values of one type are written and read."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    """Raises `ValueError` with what must be the case."""


def as_it_is(value: Any) -> Any:
    return value


def read_int(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("must be a whole number")
    return value


def read_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def read_text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate") from None
    return value


def write_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def read_bytes(value: Any) -> bytes:
    try:
        return base64.b64decode(read_text(value), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("must be base64 text") from None


def word_codec(kind: type[Named]) -> Codec:
    words = {member.word: member for member in kind}

    def write(value: Named) -> str:
        if words.get(value.word) is not value:
            raise ValueError(f"holds the number {value:d}, which is no known word")
        return value.word

    def read(value: Any) -> Named:
        found = words.get(value) if type(value) is str else None
        if found is None:
            raise ValueError(f"must be one of {', '.join(words)}")
        return found

    return Codec(write, read)


def list_codec(item: Codec) -> Codec:
    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise ValueError("must be an array")
        return tuple(item.read(one) for one in value)

    return Codec(lambda value: [item.write(one) for one in value], read)


def read_counts(value: Any) -> Mapping[str, int]:
    if type(value) is not dict or not all(type(count) is int for count in value.values()):
        raise ValueError("must be an object of whole numbers")
    return value


def object_codec(shape: "Shape") -> Codec:
    """Of an object within a line."""

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise ValueError("must be an object")
        return shape.read(value)

    return Codec(shape.write, read)


SIMPLE: Final[Mapping[Any, Codec]] = {
    int: Codec(as_it_is, read_int),
    bool: Codec(as_it_is, read_bool),
    str: Codec(as_it_is, read_text),
    bytes: Codec(write_bytes, read_bytes),
    Mapping[str, int]: Codec(dict, read_counts),
}


def codec_of(hint: Any) -> Codec:
    """For a field of this type; None in it is a matter of `Field`."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if optional(hint) else [hint]
    [kind] = kinds
    if kind in SIMPLE:
        return SIMPLE[kind]
    if kind is CompensationSpec:
        return object_codec(shape_of(CompensationSpec, {}))
    if isinstance(kind, type) and issubclass(kind, Named):
        return word_codec(kind)
    return list_codec(codec_of(get_args(kind)[0]))


def optional(hint: Any) -> bool:
    return NoneType in get_args(hint)


# ---------------------------------------------------------------- records


class FieldProblem(ValueError):
    """A field that is not what it must be."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


@attrs.frozen
class Field:
    name: str
    codec: Codec
    optional: bool


@attrs.frozen
class Shape:
    """The fields of a class, as they stand in a line."""

    make: Callable[..., Any]
    fields: Mapping[str, Field]
    added: Mapping[str, Any]
    """Fields that no line holds, and what stands in their place."""

    def write(self, record: Any) -> Json:
        """Raises `FieldProblem` for a word that has no name."""
        found: Json = {}
        for name, field in self.fields.items():
            value = getattr(record, name)
            if value is None:
                continue
            try:
                found[name] = field.codec.write(value)
            except ValueError as error:
                raise FieldProblem(name, str(error)) from None
        return found

    def read(self, found: Json) -> Any:
        """Raises `FieldProblem`."""
        values: Json = dict(self.added)
        for name, field in self.fields.items():
            if name in found:
                values[name] = read_field(field, found.pop(name))
            elif field.optional:
                values[name] = None
            else:
                raise FieldProblem(name, "is missing")
        for name in found:
            raise FieldProblem(shown(name), "is no key of this kind of line")
        return self.make(**values)


def read_field(field: Field, value: Any) -> Any:
    try:
        return field.codec.read(value)
    except FieldProblem as error:
        raise FieldProblem(f"{field.name}.{error.field}", error.problem) from None
    except ValueError as error:
        raise FieldProblem(field.name, str(error)) from None


def shown(name: str) -> str:
    """A name from a file, short and harmless."""
    return ascii(name[:40])


def shape_of(kind: type[Any], added: Mapping[str, Any]) -> Shape:
    fields = {
        field.name: Field(field.name, codec_of(field.type), optional(field.type))
        for field in attrs.fields(kind)
        if field.name not in added
    }
    return Shape(kind, fields, added)
