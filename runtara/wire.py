"""Bytes and messages: the only module that knows how things are written on a connection.

Rules:

1. One frame holds one envelope or an array of them. An envelope is a map; its key ``t`` says its kind.
2. Two codecs hold the same values: ``runtara.v1.json`` (text; bytes are base64) and ``runtara.v1.msgpack``.
3. Words stand as words (``"running"``), fields have the names of the records and messages they belong to, and
   a field that has its default value is left out.
4. What comes in is checked in full before anything else sees it: unknown keys, wrong types, numbers over 64
   bits, NaN, and in JSON keys that occur twice. A bad body is a `ValidationError` that names the field;
   what is no envelope at all is a `BadFrame`.
"""

import base64
import binascii
import json
import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, TypeVar

import attrs
import cattrs
import msgspec
from cattrs import transform_error

from runtara.errors import RuntaraError, ValidationError
from runtara.limits import MAX_INT
from runtara.payloads import refuse_constant
from runtara.records import Named

T = TypeVar("T")
Map = dict[str, Any]
Frame = str | bytes
"""A text or a binary WebSocket message."""

VERSION: Final = 1
JSON_PROTOCOL: Final = "runtara.v1.json"
MSGPACK_PROTOCOL: Final = "runtara.v1.msgpack"
MOST_ENVELOPES: Final = 1000
"""In one frame."""


class BadFrame(Exception):
    """A frame that holds no envelopes; the message says why."""


# ---------------------------------------------------------------- values


def strict(kind: type[Any], what: str) -> Callable[[Any, Any], Any]:
    """A hook that takes exactly ``kind`` (truth is no number)."""

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"must be {what}")
        return value

    return structure


def structure_int(value: Any, _: Any) -> int:
    if type(value) is not int or not -MAX_INT - 1 <= value <= MAX_INT:
        raise ValueError("must be a whole number of at most 64 bits")
    return value


def structure_float(value: Any, _: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("must be a finite number")
    return float(value)


def structure_text(value: Any, _: Any) -> str:
    if type(value) is not str:
        raise ValueError("must be text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds a lone surrogate") from None
    return value


def structure_base64(value: Any, _: Any) -> bytes:
    if type(value) is not str:
        raise ValueError("must be base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("must be base64 text") from None


def structure_word(value: Any, kind: Any) -> Any:
    if type(value) is str and value == value.lower():
        found = kind.__members__.get(value.upper())
        if found is not None:
            return found
    raise ValueError(f"must be one of {', '.join(member.word for member in kind)}")


def structure_sequence(make: Callable[[Any], Any]) -> Callable[[Any], Callable[[Any, Any], Any]]:
    """A factory of hooks for collections: only an array is one, not a text, not a map."""

    def factory(hint: Any, converter: Any) -> Callable[[Any, Any], Any]:
        item = hint.__args__[0]
        hook = converter.get_structure_hook(item)

        def structure(value: Any, _: Any) -> Any:
            if type(value) is not list:
                raise ValueError("must be an array")
            return make(hook(one, item) for one in value)

        return structure

    return factory  # type: ignore[return-value]  # cattrs passes the converter to factories of two arguments


def is_tuple(hint: Any) -> bool:
    return getattr(hint, "__origin__", None) is tuple and len(hint.__args__) == 2 and hint.__args__[1] is ...


def is_frozenset(hint: Any) -> bool:
    return getattr(hint, "__origin__", None) is frozenset


def word_of(value: Any) -> Any:
    """A member of a closed set as it is written; anything else as it is."""
    return value.word if isinstance(value, Named) else value.value if isinstance(value, Enum) else value


def new_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, omit_if_default=True)
    converter.register_structure_hook(int, structure_int)
    converter.register_structure_hook(float, structure_float)
    converter.register_structure_hook(str, structure_text)
    converter.register_structure_hook(bool, strict(bool, "true or false"))
    for kind in Named.__subclasses__():
        converter.register_structure_hook(kind, structure_word)
        converter.register_unstructure_hook(kind, lambda word: word.word)
    converter.register_structure_hook_factory(is_tuple, structure_sequence(tuple))
    converter.register_structure_hook_factory(is_frozenset, structure_sequence(frozenset))
    converter.register_unstructure_hook_func(is_frozenset, lambda words: sorted(map(word_of, words)))
    return converter


# ---------------------------------------------------------------- codecs


@attrs.frozen(eq=False)
class Codec:
    """One subprotocol: how values become a frame, and back."""

    name: str
    converter: cattrs.Converter
    dump: Callable[[Any], bytes]
    """A map, as bytes."""
    load: Callable[[Frame], Any]
    """Raises ValueError or RecursionError for what is no frame of this codec."""
    join: Callable[[Sequence[bytes]], Frame]
    """Dumped maps, as one frame."""

    def pack(self, value: Any, hint: Any = None) -> Any:
        """A record or message as plain values; ``hint`` is its type where it is generic."""
        return self.converter.unstructure(value, unstructure_as=hint)

    def unpack(self, value: Any, hint: type[T]) -> T:
        """Plain values as a record or message.

        Raises:
            ValidationError: Naming the field.
        """
        try:
            return self.converter.structure(value, hint)
        except (Exception, ExceptionGroup) as error:
            raise explained(error) from None

    def envelopes(self, frame: Frame) -> list[Map]:
        """The maps that a frame holds.

        Raises:
            BadFrame: It holds something else.
        """
        try:
            found = self.load(frame)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise BadFrame(str(error) or type(error).__name__) from None
        maps = found if isinstance(found, list) else [found]
        if len(maps) > MOST_ENVELOPES:
            raise BadFrame(f"more than {MOST_ENVELOPES} envelopes in one frame")
        if not all(isinstance(one, dict) for one in maps):
            raise BadFrame("an envelope must be a map")
        return maps


def explained(error: Exception) -> ValidationError:
    """What cattrs found wrong first, as an error that names the field."""
    text: str = transform_error(error, format_exception=problem)[0]
    what, _, path = text.rpartition(" @ ")
    return ValidationError(path.removeprefix("$.").removeprefix("$") or "body", what)


def problem(error: BaseException, hint: type[Any] | None) -> str:
    if isinstance(error, KeyError):
        return "is missing"
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return f"has unknown keys: {', '.join(sorted(str(key)[:64] for key in error.extra_fields))}"
    if isinstance(error, RuntaraError | ValueError):
        return str(error)
    return "must be a map"


def unique(pairs: list[tuple[str, Any]]) -> Map:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


READER: Final = json.JSONDecoder(object_pairs_hook=unique, parse_constant=refuse_constant)


def load_json(frame: Frame) -> Any:
    if not isinstance(frame, str):
        raise ValueError(f"a frame of {JSON_PROTOCOL} is text")
    return READER.decode(frame)


def load_msgpack(frame: Frame) -> Any:
    if isinstance(frame, str):
        raise ValueError(f"a frame of {MSGPACK_PROTOCOL} is binary")
    return msgspec.msgpack.decode(frame)


def join_json(maps: Sequence[bytes]) -> Frame:
    return (maps[0] if len(maps) == 1 else b"[%b]" % b",".join(maps)).decode()


def join_msgpack(maps: Sequence[bytes]) -> Frame:
    if len(maps) == 1:
        return maps[0]
    return b"\xdd" + len(maps).to_bytes(4, "big") + b"".join(maps)


def json_converter() -> cattrs.Converter:
    converter = new_converter()
    converter.register_structure_hook(bytes, structure_base64)
    converter.register_unstructure_hook(bytes, lambda data: base64.b64encode(data).decode())
    return converter


def msgpack_converter() -> cattrs.Converter:
    converter = new_converter()
    converter.register_structure_hook(bytes, strict(bytes, "binary"))
    return converter


JSON: Final = Codec(
    name=JSON_PROTOCOL,
    converter=json_converter(),
    dump=msgspec.json.Encoder().encode,
    load=load_json,
    join=join_json,
)
MSGPACK: Final = Codec(
    name=MSGPACK_PROTOCOL,
    converter=msgpack_converter(),
    dump=msgspec.msgpack.Encoder().encode,
    load=load_msgpack,
    join=join_msgpack,
)
CODECS: Final = {codec.name: codec for codec in (MSGPACK, JSON)}
"""By subprotocol, the preferred one first."""


# ---------------------------------------------------------------- envelopes of a client


@attrs.frozen(kw_only=True)
class Resume:
    """What a client that comes back knows of its connection."""

    connection: str
    secret: str = attrs.field(repr=False)
    seen: int
    """``seq`` of the last envelope that it has handled."""


@attrs.frozen(kw_only=True)
class Hello:
    """The first envelope of a socket: who is there, and whether it was there before."""

    version: int
    token: str | None = attrs.field(default=None, repr=False)
    client: str | None = None
    """Name and version of the program, for the server's log."""
    tenant: str | None = None
    """Only where the server asks for no tokens, or the token's role may choose."""
    resume: Resume | None = attrs.field(default=None, repr=False)


@attrs.frozen(kw_only=True)
class Call:
    """One request. Ids are numbers from 1 that grow by one."""

    id: int
    op: str
    instance: str | None = None
    body: Map = attrs.Factory(dict)


@attrs.frozen(kw_only=True)
class Received:
    """Everything up to ``seq`` was handled and need not be sent again."""

    seq: int


@attrs.frozen(kw_only=True)
class Renew:
    """A new token of the same identity."""

    token: str = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class Goodbye:
    """The client leaves in good order: its sessions end at once, and count no attempt."""


ClientEnvelope = Hello | Call | Received | Renew | Goodbye


# ---------------------------------------------------------------- envelopes of a server


@attrs.frozen(kw_only=True)
class Welcome:
    """The answer to `Hello`."""

    version: int
    connection: str
    secret: str = attrs.field(repr=False)
    """Resumes this connection; good for this server process only."""
    resumed: bool
    """False: the server knows nothing of an earlier connection."""
    received: int
    """Highest id of a `Call` that arrived; those behind it must be sent again."""
    tenant: str
    roles: tuple[str, ...]
    grace_ms: int
    """How long sessions outlive a dropped socket."""
    message_bytes: int
    """The largest frame that the server takes."""
    in_flight: int
    """Calls of this connection that may be unanswered at once."""


@attrs.frozen(kw_only=True)
class Failure:
    """An error as it is written."""

    code: str
    message: str
    retryable: bool = False
    retry_after_ms: int | None = None
    details: Map = attrs.Factory(dict)


@attrs.frozen(kw_only=True)
class Answer:
    """The answer to one call: a body, or an error."""

    seq: int
    id: int
    body: Any = None
    error: Failure | None = None


@attrs.frozen(kw_only=True)
class Pushed:
    """Something that happened."""

    seq: int
    kind: str
    instance: str | None = None
    epoch: int | None = None
    body: Map = attrs.Factory(dict)


@attrs.frozen(kw_only=True)
class Refused:
    """The connection is refused or ends; a close frame follows."""

    error: Failure


ServerEnvelope = Welcome | Answer | Pushed | Refused

KINDS: Final[dict[str, type[Any]]] = {
    "hello": Hello,
    "call": Call,
    "received": Received,
    "renew": Renew,
    "goodbye": Goodbye,
    "welcome": Welcome,
    "answer": Answer,
    "push": Pushed,
    "refused": Refused,
}
KIND_OF: Final = {kind: name for name, kind in KINDS.items()}


def pack_envelope(codec: Codec, envelope: ClientEnvelope | ServerEnvelope) -> bytes:
    """An envelope as the bytes of one map; `Codec.join` makes frames of them."""
    return codec.dump({"t": KIND_OF[type(envelope)], **codec.pack(envelope)})


def unpack_envelope(codec: Codec, found: Map, allowed: tuple[type[Any], ...]) -> Any:
    """The envelope that a map is.

    Raises:
        BadFrame: It is none of those that are ``allowed`` here.
        ValidationError: It is one, and a field is wrong.
    """
    name = found.pop("t", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None or kind not in allowed:
        words = ", ".join(KIND_OF[one] for one in allowed)
        raise BadFrame(f"t: must be one of {words}")
    return codec.unpack(found, kind)
