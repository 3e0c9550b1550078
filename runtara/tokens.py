"""Tokens: who may speak to a gateway, for which tenant, and what for.

Rules:

1. A token is ``rt_<id>_<secret>``. The secret has 256 random bits; only its SHA-256 is kept, so neither the
   store nor a backup of it lets anybody in.
2. Tokens are notes of the store, and all of them are in memory while a gateway runs: looking one up reads
   nothing, and revoking one takes effect at once, on open connections too (`Tokens.watchers`).
3. No message, log line or ``repr`` holds a secret. Every refusal reads the same, whatever was wrong.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Callable
from typing import Final

import attrs

from runtara.clock import Clock
from runtara.errors import StoreCorrupt, Unauthorized, ValidationError
from runtara.ids import check_tenant_id
from runtara.limits import MAX_INSTANT_US
from runtara.operations import Role, role_words
from runtara.persistence.store import Store
from runtara.randomness import Randomness
from runtara.validation import duration_us

PREFIX: Final = "token/"
FORM: Final = re.compile(r"rt_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
MOST_TOKENS: Final = 10_000
REFUSED: Final = "the token is missing, unknown, expired or revoked"


@attrs.frozen(kw_only=True)
class Token:
    """What is known of a token; its secret is not."""

    token_id: str
    tenant_id: str
    roles: frozenset[Role]
    created_us: int
    expires_us: int | None = None
    name: str = ""
    """For people: whose it is."""


@attrs.frozen(kw_only=True)
class Made:
    """A token that was just made, and its text, which is shown this once."""

    token: Token
    text: str = attrs.field(repr=False)


@attrs.frozen
class Known:
    """A token, and the hash of its secret."""

    token: Token
    digest: str = attrs.field(repr=False)


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def to_note(known: Known) -> str:
    token = known.token
    return json.dumps(
        {
            "tenant_id": token.tenant_id,
            "roles": role_words(token.roles),
            "created_us": token.created_us,
            "expires_us": token.expires_us,
            "name": token.name,
            "digest": known.digest,
        }
    )


def from_note(token_id: str, text: str) -> Known:
    """Raises `StoreCorrupt` for a note that is no token."""
    try:
        fields = json.loads(text)
        roles = frozenset(Role(word) for word in fields.pop("roles"))
        digest = str(fields.pop("digest"))
        return Known(Token(token_id=token_id, roles=roles, **fields), digest)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreCorrupt(f"the note of token {token_id} is damaged") from error


class Tokens:
    """The tokens of one store, and who wants to know when one goes."""

    def __init__(self, store: Store, clock: Clock, randomness: Randomness) -> None:
        self.store = store
        self.clock = clock
        self.randomness = randomness
        self.known: dict[str, Known] = {}
        self.required = False
        """Whether there were any: from then on nobody is let in without one, whatever is revoked."""
        self.watchers: set[Callable[[str], None]] = set()

    async def load(self) -> None:
        """Read all tokens. Raises `StoreError`."""
        found = await self.store.notes(PREFIX)
        self.known = {
            name.removeprefix(PREFIX): from_note(name.removeprefix(PREFIX), text)
            for name, text in found.items()
        }
        self.required = self.required or bool(self.known)

    # ------------------------------------------------------------ making and ending

    async def create(
        self,
        *,
        tenant_id: str,
        roles: frozenset[Role],
        seconds: float | None = None,
        name: str = "",
    ) -> Made:
        """A new token, and its text, which is shown this once.

        Args:
            roles: What its bearer may do; not empty.
            seconds: How long it is good for; None: until it is revoked.
            name: Whose it is; up to 200 characters.

        Raises:
            ValidationError: Naming the field.
        """
        if not roles:
            raise ValidationError("roles", "must not be empty")
        if len(name) > 200 or not name.isprintable():
            raise ValidationError("name", "must be at most 200 printable characters")
        if len(self.known) >= MOST_TOKENS:
            raise ValidationError("token", f"there are {MOST_TOKENS}, which is the limit")
        now = self.clock.now_us()
        lasts = None if seconds is None else duration_us(seconds, "seconds")
        secret = self.randomness.secret()
        token = Token(
            token_id=self.randomness.identifier()[:16],
            tenant_id=check_tenant_id(tenant_id),
            roles=roles,
            created_us=now,
            expires_us=None if lasts is None else min(now + lasts, MAX_INSTANT_US),
            name=name,
        )
        known = Known(token, digest_of(secret))
        await self.store.set_note(PREFIX + token.token_id, to_note(known))
        self.known[token.token_id] = known
        self.required = True
        return Made(token=token, text=f"rt_{token.token_id}_{secret}")

    async def revoke(self, token_id: str) -> bool:
        """End a token now; whether there was one. Connections that stand on it are closed."""
        if token_id not in self.known:
            return False
        await self.store.set_note(PREFIX + token_id, None)
        self.known.pop(token_id, None)
        for watcher in tuple(self.watchers):
            watcher(token_id)
        return True

    def listed(self) -> list[Token]:
        """All of them, oldest first."""
        found = [known.token for known in self.known.values()]
        return sorted(found, key=lambda token: (token.created_us, token.token_id))

    # ------------------------------------------------------------ looking

    def authenticate(self, text: str | None) -> Token:
        """The token of ``text``.

        Raises:
            Unauthorized: It is none, or not good any more (rule 3).
        """
        form = None if text is None else FORM.fullmatch(text)
        known = None if form is None else self.known.get(form[1])
        digest = "" if form is None else digest_of(form[2])
        if known is None or not hmac.compare_digest(known.digest.encode(), digest.encode()):
            raise Unauthorized(REFUSED)
        if not self.lasting(known.token):
            raise Unauthorized(REFUSED)
        return known.token

    def lasting(self, token: Token) -> bool:
        """Whether a token that was good still is."""
        known = self.known.get(token.token_id)
        if known is None or known.token != token:
            return False
        return token.expires_us is None or self.clock.now_us() < token.expires_us
