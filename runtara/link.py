"""The way to a runtime, as a program holds it: in process or over a connection, a `Runtime` cannot tell."""

from collections.abc import Callable
from typing import Protocol

import attrs

from runtara.errors import RuntaraError
from runtara.messages import Change, Push, Reply, Request
from runtara.operations import Role


class Sink(Protocol):
    """Where the pushes of a session go."""

    @property
    def abandoned(self) -> bool:
        """Whether whoever asked for the session went away before it began."""
        ...

    def push(self, push: Push) -> None:
        """Take a push. Must not block, must not raise, and must keep within a bound of its own."""
        ...

    def end(self, error: RuntaraError) -> None:
        """Nothing more will be pushed, because of ``error``. Must not raise."""
        ...


Watcher = Callable[["Change | RuntaraError"], None]
"""Takes a change; an error says that no more will come. Must not raise."""

Done = Callable[["Reply | RuntaraError"], None]
"""Takes the answer to a request. Must not raise."""


class Link(Protocol):
    """The way to a runtime, for one tenant."""

    async def request(self, instance_id: str, message: Request, sink: Sink | None = None) -> Reply:
        """Send a request to an instance and wait for its answer. Raises `RuntaraError`."""
        ...

    async def watch(self, instance_id: str, watcher: Watcher) -> None:
        """Call ``watcher`` with every change of the instance that is committed from now on."""
        ...

    def unwatch(self, instance_id: str, watcher: Watcher) -> None: ...

    def give_up(self, instance_id: str, sink: Sink) -> None:
        """A registration was given up; should its session begin all the same, it ends at once."""
        ...

    def end_session(self, instance_id: str, epoch: int, crashed: bool, told: bool) -> None:
        """A session was left; ``told`` says whether the instance knows it."""
        ...


@attrs.frozen(kw_only=True)
class Identity:
    """Who speaks on a connection."""

    tenant_id: str
    roles: frozenset[Role]
    token_id: str | None
    """None where no token is asked for."""

    def same_rights(self, other: "Identity") -> bool:
        """Whether ``other`` may take the place of this one on a connection, whatever its token."""
        return (self.tenant_id, self.roles) == (other.tenant_id, other.roles)
