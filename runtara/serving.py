"""What a gateway stands on: the runtime of this process, as a `Backend` of the transport."""

from functools import partial
from typing import Any, Final

import attrs

from runtara.actors.letters import Key
from runtara.actors.system import System
from runtara.errors import Forbidden, RuntaraError, StoreError, ValidationError
from runtara.ids import check_instance_id, check_tenant_id
from runtara.link import Done, Identity, Sink, Watcher
from runtara.messages import Reply, Request, SessionLost
from runtara.operations import Role, role_words
from runtara.questions import questions_of
from runtara.randomness import Randomness
from runtara.tenant import Runtime, local_runtime
from runtara.tokens import Tokens
from runtara.wire import Call, Codec

OPEN_TENANT: Final = "default"
QUESTIONS: Final = questions_of(Runtime)


class ServedRuntime:
    """A `Backend` over the actors of this process."""

    def __init__(self, system: System, tokens: Tokens, randomness: Randomness) -> None:
        self.system = system
        self.tokens = tokens
        self.randomness = randomness

    # ------------------------------------------------------------ who

    def authenticate(self, token: str | None, tenant: str | None) -> Identity:
        """See `Backend`. Without any tokens everybody is let in: the gateway then listens on loopback."""
        if tenant is not None:
            check_tenant_id(tenant)
        if not self.tokens.required:
            return Identity(tenant_id=tenant or OPEN_TENANT, roles=frozenset(Role), token_id=None)
        found = self.tokens.authenticate(token)
        if tenant is not None and tenant != found.tenant_id and Role.ADMIN not in found.roles:
            raise Forbidden("tenant", role_words(found.roles))
        return Identity(tenant_id=tenant or found.tenant_id, roles=found.roles, token_id=found.token_id)

    def lasting(self, identity: Identity) -> bool:
        if identity.token_id is None:
            return not self.tokens.required
        known = self.tokens.known.get(identity.token_id)
        return known is not None and self.tokens.lasting(known.token)

    # ------------------------------------------------------------ instances

    async def submit(self, key: Key, message: Request, sink: Sink | None, done: Done) -> None:
        try:
            check_instance_id(key[1])
        except ValidationError as error:
            done(error)
            return
        if isinstance(message, SessionLost):
            done = partial(self.left, key, message.epoch, done)
        await self.system.submit(key, message, sink, done)

    def left(self, key: Key, epoch: int, done: Done, reply: Reply | RuntaraError) -> None:
        """A session was left in good order: nothing holds it any more."""
        if not isinstance(reply, RuntaraError):
            self.system.directory.detach(key, epoch)
        done(reply)

    def watch(self, key: Key, watcher: Watcher) -> None:
        check_instance_id(key[1])
        self.system.directory.watch(key, watcher)

    def unwatch(self, key: Key, watcher: Watcher) -> None:
        self.system.directory.unwatch(key, watcher)

    def lose(self, key: Key, epoch: int, crashed: bool) -> None:
        self.system.directory.detach(key, epoch)
        self.system.lose_later(key, epoch, crashed)

    # ------------------------------------------------------------ questions

    async def ask(self, identity: Identity, codec: Codec, call: Call) -> Any:
        found = QUESTIONS.get(call.op)
        if found is None:
            raise ValidationError("op", f"there is no operation {call.op[:64]!r}")
        if not found.roles & identity.roles:
            raise Forbidden(call.op, role_words(identity.roles))
        body = call.body if call.instance is None else {**call.body, "instance_id": call.instance}
        arguments = codec.unpack(body, found.arguments)
        runtime = local_runtime(self.system, self.randomness, identity.tenant_id, self.tokens)
        answer = await found.method(runtime, **attrs.asdict(arguments, recurse=False))
        return codec.pack(answer, found.answer)

    async def ready(self) -> bool:
        if self.system.draining or self.system.fatal is not None:
            return False
        try:
            await self.system.store.check()
        except RuntaraError as error:
            return not isinstance(error, StoreError)
        return True
