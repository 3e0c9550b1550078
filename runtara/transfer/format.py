"""An export, line by line: records to JSON and back. All of it is pure; docs/transfer.md is the reference.

Rules:

1. A line is one JSON object in UTF-8 with a newline at its end. Its key ``t`` says what it is.
2. The other keys are the fields of the record, under their own names. Words stand as words, bytes as
   base64, numbers as whole numbers. A field that is None is left out, every other one is there.
3. The row number of an instance is a matter of its store and is left out; so is what a step only borrows
   from its events.
4. What is read is checked in full: unknown, missing and repeated keys, types, words, ids, 64 bits, the size
   of values, and what the rest of the program takes for granted of a record. A bad line is a `BadExport`
   that names the line and the field.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from runtara.errors import BadExport, ValidationError
from runtara.payloads import refuse_constant
from runtara.records import (
    CheckpointRecord,
    CompensationAttemptRecord,
    ErrorRecord,
    EventRecord,
    InstanceRecord,
    PutPayload,
    RequestRecord,
    RetryAttemptRecord,
    SetCompensation,
    SignalRecord,
    StepRecord,
    WaitRecord,
)
from runtara.transfer.items import End, Header, Item, Skipped, Trailer
from runtara.transfer.rules import check_item, check_version
from runtara.transfer.shapes import FieldProblem, Json, Shape, shape_of
from runtara.validation import small_int, unique_pairs

LEFT_OUT: Final[Mapping[type, Mapping[str, Any]]] = {
    InstanceRecord: {"row": 0},
    StepRecord: {"start_payload": None, "end_payload": None},
}
"""Rule 3."""

KINDS: Final[Mapping[str, type[Any]]] = {
    "header": Header,
    "instance": InstanceRecord,
    "payload": PutPayload,
    "compensation_attempt": CompensationAttemptRecord,
    "checkpoint": CheckpointRecord,
    "compensation": SetCompensation,
    "wait": WaitRecord,
    "event": EventRecord,
    "step": StepRecord,
    "signal": SignalRecord,
    "retry_attempt": RetryAttemptRecord,
    "error": ErrorRecord,
    "request": RequestRecord,
    "skipped": Skipped,
    "end": End,
    "trailer": Trailer,
}
"""The kinds of lines; those of one instance come in this order."""

APPENDED: Final[tuple[type[Any], ...]] = (
    CompensationAttemptRecord,
    CheckpointRecord,
    WaitRecord,
    EventRecord,
    StepRecord,
    SignalRecord,
    RetryAttemptRecord,
    ErrorRecord,
    RequestRecord,
)
"""Those that carry a revision of their own and are written once."""

WORD_OF: Final[Mapping[type[Any], str]] = {kind: word for word, kind in KINDS.items()}
SHAPES: Final[Mapping[str, Shape]] = {
    word: shape_of(kind, LEFT_OUT.get(kind, {})) for word, kind in KINDS.items()
}


# ---------------------------------------------------------------- lines


ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def refuse_fraction(text: str) -> NoReturn:
    raise ValueError("a number is not whole")


DECODER: Final = json.JSONDecoder(
    object_pairs_hook=unique_pairs,
    parse_int=small_int,
    parse_float=refuse_fraction,
    parse_constant=refuse_constant,
)


def write_line(item: Item) -> bytes:
    """The line of ``item``, with its newline.

    Raises:
        FieldProblem: A word has no name, or a text is none.
    """
    word = WORD_OF[type(item)]
    text = ENCODER.encode({"t": word, **SHAPES[word].write(item)})
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:
        raise FieldProblem(word, "holds a lone surrogate") from None


def read_line(line: bytes, number: int, payload_bytes: int) -> Item:
    """What a line holds, checked in full (rule 4).

    Args:
        number: Of the line in its file, from 1; for the error.
        payload_bytes: The largest value that is taken.

    Raises:
        BadExport: Naming the line and the field.
    """
    try:
        found = parsed(line)
        word = found.pop("t", None)
        shape = SHAPES.get(word) if type(word) is str else None
        if shape is None:
            raise FieldProblem("t", f"must be one of {', '.join(KINDS)}")
        if shape.make is Header:
            check_version(found)
        item: Item = shape.read(found)
        check_item(item, payload_bytes)
    except FieldProblem as error:
        raise BadExport(number, error.field, error.problem) from None
    except ValidationError as error:
        raise BadExport(number, error.field, str(error.details["problem"])) from None
    return item


def parsed(line: bytes) -> Json:
    if not line.endswith(b"\n"):
        raise FieldProblem("line", "has no end: the file is cut off")
    try:
        found = DECODER.decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise FieldProblem("line", f"is not JSON: {problem_of(error)}") from None
    if type(found) is not dict:
        raise FieldProblem("line", "must be a JSON object")
    return found


def problem_of(error: Exception) -> str:
    """What is wrong, without the bytes that are."""
    match error:
        case json.JSONDecodeError():
            return f"{error.msg} at {error.pos}"
        case UnicodeDecodeError():
            return f"byte {error.start} is not UTF-8"
        case RecursionError():
            return "it is nested too deeply"
    return str(error)
