"""Who is let in, what for, and for how long; and that nobody else ever sees a token."""

import logging
from typing import Any

import pytest
import trio
import trio.testing

from runtara.operations import ANYONE, OPERATIONS, Role
from runtara.questions import questions_of
from runtara.records import Status
from runtara.tenant import Runtime
from runtara.tokens import REFUSED
from runtara.transport.limits import StreamLimits
from runtara.wire import JSON_PROTOCOL, MSGPACK_PROTOCOL, Hello, Renew, Resume, Welcome
from tests.gateways import TEXT, Peer, Served, as_json, frame, head, quick, served, until
from tests.test_gateway_hostile import body_of

QUESTIONS = questions_of(Runtime)


async def turned_away(peer: Peer, close_code: int = 4401, code: str = "unauthorized") -> str:
    """The message with which the server refuses a peer."""
    while (envelope := await peer.envelope())["t"] != "refused":
        pass
    assert await peer.hear_close() == close_code
    await peer.leave()
    assert envelope["error"]["code"] == code
    message: str = envelope["error"]["message"]
    return message


# ---------------------------------------------------------------- bad tokens


def bad_tokens(good: str) -> list[str | None]:
    prefix, id, secret = good.split("_", 2)
    other = "A" if secret[0] != "A" else "B"
    return [
        None,
        "",
        " ",
        "x",
        "é",
        "\x00",
        "rt_",
        "rt__",
        good + "\n",
        " " + good,
        good.upper(),
        good[:-1],
        good + "x",
        good[3:],
        f"Bearer {good}",
        f"{prefix}_{id}_{other}{secret[1:]}",
        f"{prefix}_{id}_{'é' * 43}",
        f"{prefix}_{id[::-1] if id != id[::-1] else '0' * 16}_{secret}",
        f"{prefix}_{'0' * 16}_{secret}",
        "rt_" + "9" * 10_000,
    ]


@pytest.mark.parametrize("protocol", [JSON_PROTOCOL, MSGPACK_PROTOCOL])
async def test_every_bad_token_is_refused_with_the_same_words(protocol: str) -> None:
    async with served() as found:
        good = await found.token("a", Role.WORKER)
        expired = await found.token("a", Role.WORKER, seconds=0)
        revoked = await found.tokens.create(tenant_id="a", roles=ANYONE)
        await found.tokens.revoke(revoked.token.token_id)
        for token in [*bad_tokens(good), expired, revoked.text]:
            peer = await found.upgraded(protocol)
            await peer.say({"t": "hello", "version": 1, "token": token})
            assert await turned_away(peer) == REFUSED, token
        assert found.gateway.statistics().connections == 0
        assert (await found.welcomed(protocol, token=good, tenant="a")).calls == 0


@pytest.mark.parametrize("token", [5, True, [], {}, ["rt_"]])
async def test_a_token_that_is_no_text_breaks_the_protocol(token: Any) -> None:
    async with served() as found:
        peer = await found.upgraded()
        await peer.say({"t": "hello", "version": 1, "token": token})
        assert "token: must be text" in await turned_away(peer, 1008, "validation_error")


async def test_a_token_of_a_megabyte_is_not_even_read() -> None:
    async with served() as found:
        await found.token("a", Role.WORKER)
        peer = await found.upgraded()
        await peer.say({"t": "hello", "version": 1, "token": "x" * 2**20})
        await turned_away(peer, 1009, "validation_error")


async def test_a_token_in_a_header_or_a_url_is_no_token() -> None:
    async with served() as found:
        good = await found.token("a", Role.WORKER)
        lines = [f"Authorization: Bearer {good}", f"Cookie: token={good}"]
        peer = await found.asks(head(*lines, first=f"GET /?token={good} HTTP/1.1"))
        assert await peer.status() == 101
        await peer.say({"t": "hello", "version": 1})
        assert await turned_away(peer) == REFUSED


async def test_a_peer_that_was_not_let_in_is_told_nothing() -> None:
    async with served() as found:
        await found.token("a", Role.WORKER)
        peer = await found.upgraded()
        await peer.say({"t": "hello", "version": 1}, {"t": "call", "id": 1, "op": "counts"})
        heard = await peer.envelope()
        assert heard["t"] == "refused"
        assert await peer.envelope() is None


async def test_the_tenant_comes_from_the_token() -> None:
    async with served() as found:
        worker, admin = await found.token("a", Role.WORKER), await found.token("a", Role.ADMIN)
        peer = await found.upgraded()
        await peer.say({"t": "hello", "version": 1, "token": worker, "tenant": "b"})
        await turned_away(peer, 4401, "forbidden")
        for tenant, wanted in ((None, "a"), ("a", "a"), ("b", "b")):
            peer = await found.upgraded()
            welcome = await peer.hello(token=admin, tenant=tenant)
            assert (welcome["tenant"], welcome["roles"]) == (wanted, ["admin"])
        peer = await found.upgraded()
        await peer.say({"t": "hello", "version": 1, "token": admin, "tenant": "a\nb"})
        await turned_away(peer, 1008, "validation_error")


# ---------------------------------------------------------------- the end of a token


async def test_a_revoked_token_ends_its_connections_at_once_and_no_others() -> None:
    async with served(quick(grace_seconds=60)) as found:
        made = await found.tokens.create(tenant_id="a", roles=frozenset({Role.WORKER}))
        other = await found.welcomed(token=await found.token("a", Role.WORKER))
        peer, away = await found.welcomed(token=made.text), await found.welcomed(token=made.text)
        await peer.ask("register", "i")
        await away.ask("register", "j")
        await away.close()
        await found.settled(sockets=2)
        await found.tokens.revoke(made.token.token_id)
        assert found.gateway.statistics().connections == 1
        await turned_away(peer)
        again = await found.upgraded()
        await again.say({"t": "hello", "version": 1, "token": made.text})
        await turned_away(again)
        for instance in ("i", "j"):
            await suspended(found, "a", instance)
        assert (await other.ask("status", "i"))["body"]["connected"] is False


async def suspended(found: Served, tenant: str, instance_id: str) -> None:
    runtime = found.runtime.for_tenant(tenant)
    for _ in range(200):
        if (await runtime.status(instance_id)).status is Status.SUSPENDED:
            return
        await trio.sleep(0.005)
    raise AssertionError("it runs on")


async def test_a_revoked_token_is_not_kept_waiting_by_a_peer_that_reads_a_little_now_and_then() -> None:
    async with served(quick(StreamLimits(send_seconds=60), close_seconds=0.2)) as found:
        made = await found.tokens.create(tenant_id="a", roles=frozenset({Role.WORKER}))
        peer = await found.welcomed(token=made.text)
        epoch = (await peer.ask("register", "i"))["body"]["epoch"]
        await peer.ask("checkpoint", "i", epoch=epoch, checkpoint_id="c", state="A" * 2**20)
        await peer.say(*[peer.call("get_checkpoint", "i", checkpoint_id="c") for _ in range(20)])
        await trio.testing.wait_all_tasks_blocked(0.01)
        began = trio.current_time()
        await found.tokens.revoke(made.token.token_id)
        assert found.gateway.statistics().sessions == 0
        while found.gateway.statistics().sockets and trio.current_time() - began < 5:
            await peer.stream.receive_some(1000)
            await trio.sleep(0.02)
        assert trio.current_time() - began < 1.0


async def test_an_expired_token_ends_its_open_connections() -> None:
    async with served(quick(token_seconds=0.05, grace_seconds=60)) as found:
        await found.token("b", Role.WORKER)
        peer = await found.welcomed(token=await found.token("a", Role.WORKER, seconds=0.15))
        assert "error" not in await peer.ask("register", "i")
        began = trio.current_time()
        await turned_away(peer)
        assert 0.05 < trio.current_time() - began < 0.6


async def test_the_first_token_ends_connections_without_one() -> None:
    async with served(quick(token_seconds=0.05)) as found:
        peer = await found.welcomed()
        await found.token("a", Role.WORKER)
        await turned_away(peer)


async def test_the_last_token_that_is_revoked_opens_no_door() -> None:
    async with served() as found:
        made = await found.tokens.create(tenant_id="a", roles=ANYONE)
        await found.tokens.revoke(made.token.token_id)
        peer = await found.upgraded()
        await peer.say({"t": "hello", "version": 1})
        assert await turned_away(peer) == REFUSED


# ---------------------------------------------------------------- renewal


async def test_a_token_is_renewed_in_band() -> None:
    async with served(quick(token_seconds=0.03)) as found:
        await found.token("b", Role.WORKER)
        old = await found.tokens.create(tenant_id="a", roles=frozenset({Role.WORKER}), seconds=0.2)
        new = await found.tokens.create(tenant_id="a", roles=frozenset({Role.WORKER}))
        peer = await found.welcomed(token=old.text)
        await peer.say({"t": "renew", "token": new.text}, peer.call("status", "i"))
        assert (await peer.answer(1))["body"] is not None
        await found.tokens.revoke(old.token.token_id)
        await trio.sleep(0.3)
        assert (await peer.ask("status", "i"))["body"] is not None
        await found.tokens.revoke(new.token.token_id)
        await turned_away(peer)


async def test_a_token_is_never_renewed_to_another_identity() -> None:
    async with served() as found:
        mine = await found.token("a", Role.WORKER, Role.OPERATOR)
        others = [
            await found.token("b", Role.WORKER, Role.OPERATOR),
            await found.token("a", Role.WORKER),
            await found.token("a", Role.WORKER, Role.OPERATOR, Role.INSTANCE),
            await found.token("a", Role.ADMIN),
            await found.token("b", Role.ADMIN),
            await found.token("a", Role.WORKER, Role.OPERATOR, seconds=0),
        ]
        for token in [*others, *filter(None, bad_tokens(mine)), ""]:
            peer = await found.welcomed(token=mine)
            await peer.say({"t": "renew", "token": token}, peer.call("status", "i"))
            message = await turned_away(peer)
            assert message.startswith("the token was not renewed: "), token
        assert found.gateway.statistics().connections == 0


async def test_an_admin_renews_for_the_tenant_that_was_chosen() -> None:
    async with served() as found:
        one, two = await found.token("a", Role.ADMIN), await found.token("a", Role.ADMIN)
        peer = await found.welcomed(token=one, tenant="b")
        await peer.say({"t": "renew", "token": two})
        assert (await peer.ask("status", "i"))["body"]["record"]["tenant_id"] == "b"


async def test_a_connection_is_resumed_by_the_same_identity_only() -> None:
    async with served(quick(grace_seconds=5)) as found:
        mine, twin = await found.token("a", Role.WORKER), await found.token("a", Role.WORKER)
        peer = await found.upgraded()
        welcome = await peer.hello(token=mine)
        resume = {"connection": welcome["connection"], "secret": welcome["secret"], "seen": 0}
        await peer.close()
        for token in (await found.token("b", Role.WORKER), await found.token("a", Role.OPERATOR)):
            peer = await found.upgraded()
            assert (await peer.hello(token=token, resume=resume))["resumed"] is False
        peer = await found.upgraded()
        await peer.say({"t": "hello", "version": 1, "resume": resume})
        assert await turned_away(peer) == REFUSED
        peer = await found.upgraded()
        assert (await peer.hello(token=twin, resume=resume))["resumed"] is True


# ---------------------------------------------------------------- roles


def everything_asked() -> dict[str, tuple[frozenset[Role], str | None, dict[str, Any]]]:
    """Every operation and question: who may ask it, of which instance, and with what."""
    asked: dict[str, tuple[frozenset[Role], str | None, dict[str, Any]]] = {
        name: (operation.roles, "i", body_of(operation.request)) for name, operation in OPERATIONS.items()
    }
    for name, question in QUESTIONS.items():
        body = body_of(question.arguments)
        asked[name] = (question.roles, "i" if body.pop("instance_id", None) else None, body)
    asked["watch"] = (ANYONE, "i", {"watch": 1})
    asked["unwatch"] = (ANYONE, None, {"watch": 1})
    return asked


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_may_ask_what_the_tables_say_and_nothing_else(role: Role) -> None:
    async with served() as found:
        peer = await found.welcomed(token=await found.token("a", role))
        for name, (roles, instance, body) in everything_asked().items():
            answer = await peer.ask(name, instance, **body)
            error = answer.get("error", {})
            assert (error.get("code") == "forbidden") is (role not in roles), (name, answer)
            if role not in roles:
                assert error["details"] == {"operation": name, "roles": role.value}
                assert "retryable" not in error


async def test_roles_add_up() -> None:
    async with served() as found:
        peer = await found.welcomed(token=await found.token("a", Role.INSTANCE, Role.OPERATOR))
        assert "error" not in await peer.ask("register", "i")
        assert "error" not in await peer.ask("terminate", "i")


# ---------------------------------------------------------------- secrets


def texts_of(record: logging.LogRecord) -> str:
    """All that a handler could write of a record."""
    return logging.Formatter("%(name)s %(message)s").format(record) + repr(record.args)


async def test_no_token_and_no_secret_is_logged_or_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told: list[Any] = []
    async with served(quick(grace_seconds=5)) as found:
        token, other = await found.token("a", Role.WORKER), await found.token("b", Role.WORKER)
        peer = await found.upgraded()
        welcome = await peer.hello(token=token, client=f"c\n{token}"[:20])
        secret = welcome.pop("secret")
        resume = {"connection": welcome["connection"], "secret": secret, "seen": 0}
        await peer.ask("register", "i")
        told.append(await peer.ask("nonsense", "i"))
        await peer.say({"t": "renew", "token": token})
        told.append(await peer.ask("checkpoint", "i", epoch="x"))
        [connection] = found.gateway.connections.values()
        seen: list[object] = [connection, found.gateway, found.tokens, found.tokens.listed()]
        await peer.close()
        await found.settled()
        again = await found.upgraded()
        assert (await again.hello(token=token, resume=resume))["resumed"] is True
        for last in (
            {"t": "renew", "token": other},
            {"t": "renew", "token": token[:-1]},
            {"t": "renew", "token": token, "more": 1},
            {"t": token},
            {"t": "hello", "version": 1, "token": token, "resume": resume},
            {"t": "hello", "version": 9, "token": token, "resume": resume},
            {"t": "hello", "version": 1, "token": [token]},
            {"t": "hello", "version": 1, "token": token, "tenant": "b"},
            {"t": "hello", "version": 1, "token": token, "resume": {**resume, "seen": "x"}},
        ):
            peers = [await found.upgraded()]
            if last["t"] != "hello" or last.get("version") != 1:
                peers.append(await found.welcomed(token=token))
            for peer in peers:
                await peer.say(last)
                if (answer := await peer.envelope())["t"] == "refused":
                    told.append(answer)
                    await peer.leave()
        peer = await found.upgraded()
        await peer.send(frame(TEXT, as_json({"t": "hello", "token": token})[:-1] + b"\xff}"))
        told.append(await peer.envelope())
        peer = await found.asks(head(first=f"GET /{token} HTTP/9"))
        told.append(await peer.read_all())
    secrets = [part for text in (token, other) for part in (text, text.split("_", 2)[2])] + [secret]
    written = "\n".join(texts_of(record) for record in caplog.records)
    spoken = repr(told)
    shown = "\n".join(map(repr, seen))
    for one in secrets:
        assert one not in written
        assert one not in spoken
        assert one not in shown
    assert "trio-websocket" in {record.name for record in caplog.records}


async def test_a_bug_with_a_token_in_its_hands_logs_no_token(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(token: str | None, tenant: str | None) -> Any:
        raise ZeroDivisionError("a bug")

    caplog.set_level(logging.DEBUG)
    async with served() as found:
        token = await found.token("a", Role.WORKER)
        peer = await found.upgraded()
        monkeypatch.setattr(found.gateway.backend, "authenticate", fail)
        await peer.say({"t": "hello", "version": 1, "token": token})
        assert await peer.hear_close() == 1011
        await until(lambda: found.gateway.failed == 1)
        found.gateway.failed = 0
    written = "\n".join(texts_of(record) for record in caplog.records)
    assert "a socket failed" in written
    assert "ZeroDivisionError" in written
    assert token not in written


def test_no_repr_shows_a_secret() -> None:
    resume = Resume(connection="c", secret="canary", seen=0)
    shown = [
        resume,
        Hello(version=1, token="canary", resume=resume),
        Renew(token="canary"),
        Welcome(
            version=1,
            connection="c",
            secret="canary",
            resumed=False,
            received=0,
            tenant="t",
            roles=(),
            grace_ms=1,
            message_bytes=1,
            in_flight=1,
        ),
    ]
    assert "canary" not in repr(shown)
