"""Questions: the methods of a `Runtime` that read, as they are asked in process and over a connection.

A method with `question` is answered where the store is. On a client it is not run: its arguments travel, as
the fields of a class made from its signature, and what comes back is structured by its return annotation. So
the two surfaces cannot differ, and a new question needs no second description.
"""

import functools
import inspect
import types
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from datetime import datetime
from enum import Enum
from typing import (
    Any,
    Concatenate,
    Final,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import attrs

from runtara.operations import ADMINS, ANYONE, OPERATORS, Role
from runtara.records import Named
from runtara.validation import instant_us

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Asking")

ROLES: Final = "question_roles"


class Asker(Protocol):
    """Who carries questions over a connection."""

    async def ask(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The answer to the question ``name``. Raises `RuntaraError`."""
        ...


class Asking(Protocol):
    """What has questions."""

    @property
    def asker(self) -> Asker | None:
        """None where the store is."""
        ...


Method = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def question(method: Method[S, P, T]) -> Method[S, P, T]:
    """A method that reads, for operators; see the module's docstring."""
    return allowed_to(OPERATORS, method)


def question_for_anyone(method: Method[S, P, T]) -> Method[S, P, T]:
    """The same, for the bearer of any token of the tenant."""
    return allowed_to(ANYONE, method)


def question_for_admins(method: Method[S, P, T]) -> Method[S, P, T]:
    """The same, for administrators only."""
    return allowed_to(ADMINS, method)


def allowed_to(roles: frozenset[Role], method: Method[S, P, T]) -> Method[S, P, T]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    async def ask(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self.asker is None:
            return await method(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        answer: T = await self.asker.ask(method.__name__, dict(list(arguments.items())[1:]))
        return answer

    setattr(ask, ROLES, roles)
    return ask


@attrs.frozen
class Question:
    """One question, as it travels."""

    name: str
    method: Callable[..., Awaitable[Any]]
    arguments: type[Any]
    """An attrs class with a field for each argument."""
    answer: Any
    """The type of the answer."""
    roles: frozenset[Role]


def questions_of(owner: type[Any]) -> dict[str, Question]:
    """All questions of a class, by name."""
    return {
        name: as_question(name, member)
        for name, member in inspect.getmembers(owner, inspect.isfunction)
        if hasattr(member, ROLES)
    }


def as_question(name: str, method: Callable[..., Awaitable[Any]]) -> Question:
    hints = get_type_hints(inspect.unwrap(method))
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        default = attrs.NOTHING if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = attrs.field(
            default=default, type=travelling(hints[parameter.name]), kw_only=True
        )
    made = attrs.make_class(name, fields, frozen=True)
    return Question(name, method, made, hints["return"], getattr(method, ROLES))


def travelling(hint: Any) -> Any:
    """The type of an argument on the wire: instants are numbers, words that may be given as text are text."""
    if get_origin(hint) is Collection:
        return tuple[travelling(get_args(hint)[0]), ...]  # type: ignore[misc]  # known only here
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    parts = list(get_args(hint))
    if datetime in parts and int in parts:
        parts.remove(datetime)
    if str in parts:
        parts = [part for part in parts if not (isinstance(part, type) and issubclass(part, Enum))]
    return Union[tuple(parts)]  # noqa: UP007  # the parts are known only here


def travelled(value: object, name: str, hint: Any) -> object:
    """An argument as it is written.

    Raises:
        ValidationError: It is of another type than the question takes; naming it.
    """
    match value:
        case datetime():
            return instant_us(value, name)
        case Named() if takes_text(hint):
            return value.word
        case Enum() if takes_text(hint):
            return value.value
        case Collection() if get_origin(hint) is tuple and not isinstance(value, str | bytes):
            return tuple(travelled(one, name, get_args(hint)[0]) for one in value)
    return value


def takes_text(hint: Any) -> bool:
    return hint is str or str in get_args(hint)


def made_of(found: Question, arguments: Mapping[str, Any]) -> Any:
    """The arguments of a call, as they travel."""
    hints = {field.name: field.type for field in attrs.fields(found.arguments)}
    values = {name: travelled(value, name, hints[name]) for name, value in arguments.items()}
    return found.arguments(**values)
