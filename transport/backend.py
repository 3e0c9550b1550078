"""What a gateway stands on. It knows nothing else of what is behind."""

from typing import Any, Protocol

from runtara.link import Done, Identity, Sink, Watcher
from runtara.messages import Request
from runtara.wire import Call, Codec


class Backend(Protocol):
    """What a gateway serves. Keys are (tenant, instance)."""

    def authenticate(self, token: str | None, tenant: str | None) -> Identity:
        """Who the bearer of ``token`` is. Raises `Unauthorized`, `Forbidden` or `ValidationError`."""
        ...

    def lasting(self, identity: Identity) -> bool:
        """Whether an identity that was good still is."""
        ...

    async def submit(self, key: tuple[str, str], message: Request, sink: Sink | None, done: Done) -> None:
        """Give a request to an instance; returns once it stands in line, and ``done`` gets the answer.

        Never raises `RuntaraError`: ``done`` gets that too.
        """
        ...

    async def ask(self, identity: Identity, codec: Codec, call: Call) -> Any:
        """The answer to a question of the tenant, in plain values. Raises `RuntaraError`."""
        ...

    def watch(self, key: tuple[str, str], watcher: Watcher) -> None: ...

    def unwatch(self, key: tuple[str, str], watcher: Watcher) -> None: ...

    def lose(self, key: tuple[str, str], epoch: int, crashed: bool) -> None:
        """A session is over; its instance is told, in the background."""
        ...

    async def ready(self) -> bool:
        """Whether work can be taken: the store answers, and nothing drains."""
        ...
