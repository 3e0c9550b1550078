"""The conversation of a connection without a socket: its states, its numbers, and lost sockets."""

import json
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtara.errors import StaleEpoch, ValidationError
from runtara.transport.session import (
    FRAME_BYTES,
    Answered,
    BadCall,
    ClientConversation,
    Restarted,
    ServerConversation,
    ServerHappening,
    Violation,
    failure_of,
)
from runtara.wire import (
    CODECS,
    JSON,
    MOST_ENVELOPES,
    MSGPACK,
    Call,
    Codec,
    Frame,
    Goodbye,
    Hello,
    Pushed,
    Renew,
    Resume,
    Welcome,
)

BUFFER = 64 * 1024


def welcome(**changes: Any) -> Welcome:
    known = Welcome(
        version=1,
        connection="c",
        secret="s",
        resumed=False,
        received=0,
        tenant="t",
        roles=(),
        grace_ms=1000,
        message_bytes=1,
        in_flight=1,
    )
    return attrs.evolve(known, **changes)


def opened(codec: Codec = JSON) -> ServerConversation:
    """A server's side that has welcomed its client."""
    server = ServerConversation(codec, BUFFER)
    [hello] = server.receive(ClientConversation(codec).hello(None, "test", None))
    assert isinstance(hello, Hello)
    server.open(welcome())
    server.take_output()
    return server


def say(**fields: Any) -> str:
    return json.dumps(fields)


# ---------------------------------------------------------------- states


@pytest.mark.parametrize(
    "frame",
    [
        say(t="call", id=1, op="status"),
        say(t="received", seq=0),
        say(t="goodbye"),
        "nonsense",
        "[]5",
        b"\x00\xff",
        say(t="welcome"),
        say(t="hello"),
        say(t="hello", version="1"),
        say(t="hello", version=1, more=2),
        '{"t":"hello","version":1,"version":1}',
        "[" * 100_000,
        say(t=["hello"]),
        "null",
        '"hello"',
    ],
)
def test_a_new_socket_takes_a_hello_and_nothing_else(frame: Frame) -> None:
    server = ServerConversation(JSON, BUFFER)
    [found] = server.receive(frame)
    assert isinstance(found, Violation)
    assert server.is_over
    [refusal] = server.take_output()
    assert json.loads(refusal)["t"] == "refused"
    assert server.receive(say(t="hello", version=1)) == []


def test_nothing_may_be_sent_before_the_welcome() -> None:
    server = ServerConversation(JSON, BUFFER)
    hello, broken = server.receive(f"[{say(t='hello', version=1)},{say(t='call', id=1, op='status')}]")
    assert isinstance(hello, Hello)
    assert isinstance(broken, Violation)


def test_an_open_socket_takes_calls_in_the_order_of_their_numbers() -> None:
    server = opened()
    found = server.receive(f"[{say(t='call', id=1, op='a')},{say(t='call', id=2, op='b')}]")
    assert [(call.id, call.op) for call in found if isinstance(call, Call)] == [(1, "a"), (2, "b")]
    assert server.receive(say(t="call", id=2, op="b")) == []
    [broken] = server.receive(say(t="call", id=4, op="c"))
    assert isinstance(broken, Violation)
    assert "3, the next number" in broken.error.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"op": 5}, "op"),
        ({}, "op"),
        ({"op": "a", "instance": 5}, "instance"),
        ({"op": "a", "body": []}, "body"),
        ({"op": "a", "extra": 1}, "body"),
    ],
)
def test_a_call_of_a_wrong_form_is_answered_and_the_next_one_taken(
    fields: dict[str, Any], field: str
) -> None:
    server = opened()
    [found] = server.receive(say(t="call", id=1, **fields))
    assert found == BadCall(1)
    [frame] = server.take_output()
    answer = json.loads(frame)
    assert answer["id"] == 1
    assert answer["error"]["code"] == "validation_error"
    assert answer["error"]["details"]["field"] == field
    [call] = server.receive(say(t="call", id=2, op="a"))
    assert isinstance(call, Call)


@pytest.mark.parametrize("id", [0, -1, 3, "1", 1.0, True, None, 2**70])
def test_a_call_without_the_next_number_ends_the_socket(id: object) -> None:
    server = opened()
    [found] = server.receive(say(t="call", id=id, op="a"))
    assert isinstance(found, Violation)


def test_a_second_hello_ends_the_socket() -> None:
    [found] = opened().receive(say(t="hello", version=1))
    assert isinstance(found, Violation)


def test_a_goodbye_ends_the_socket_in_good_order() -> None:
    server = opened()
    assert server.receive(f"[{say(t='goodbye')},{say(t='call', id=1, op='a')}]") == [Goodbye()]
    assert server.is_over


def test_a_token_is_renewed() -> None:
    assert opened().receive(say(t="renew", token="new")) == [Renew(token="new")]


def test_a_frame_of_the_other_codec_ends_the_socket() -> None:
    [found] = opened(JSON).receive(b"{}")
    assert isinstance(found, Violation)
    [found] = opened(MSGPACK).receive("{}")
    assert isinstance(found, Violation)


def test_a_frame_of_too_many_envelopes_ends_the_socket() -> None:
    [found] = opened().receive(f"[{','.join([say(t='received', seq=0)] * (MOST_ENVELOPES + 1))}]")
    assert isinstance(found, Violation)


def test_secrets_are_in_no_repr() -> None:
    hello = Hello(version=1, token="canary", resume=Resume(connection="c", secret="canary", seen=1))
    assert "canary" not in repr([hello, Renew(token="canary"), welcome(secret="canary")])


# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize("seq", [-1, 2, 2**60])
def test_only_what_was_sent_can_be_confirmed(seq: int) -> None:
    server = opened()
    server.answer(1, {})
    server.take_output()
    server.answer(2, {})
    [found] = server.receive(say(t="received", seq=seq))
    assert isinstance(found, Violation)


def test_what_is_confirmed_is_kept_no_longer() -> None:
    server = opened()
    for at in range(10):
        server.push("signal", "i", 1, {"at": at})
    server.take_output()
    assert server.receive(say(t="received", seq=7)) == []
    assert [seq for seq, _ in server.kept] == [8, 9, 10]
    assert server.kept_bytes == sum(len(packed) for _, packed in server.kept)


def test_a_client_that_confirms_nothing_is_asked_for_less_and_then_given_up() -> None:
    server = opened()
    server.push("signal", "i", 1, {"payload": "x" * BUFFER})
    assert server.stalled
    assert not server.overflowed
    server.push("signal", "i", 1, {})
    assert server.overflowed


def test_frames_are_gathered_up_to_a_size() -> None:
    server = opened()
    for _ in range(10):
        server.push("signal", "i", 1, {"payload": "x" * (FRAME_BYTES // 3)})
    frames = server.take_output()
    assert len(frames) == 5
    assert all(len(frame) < FRAME_BYTES + 1000 for frame in frames)
    assert server.take_output() == []


def test_a_resume_that_cannot_be_true_is_refused() -> None:
    server = opened()
    for _ in range(5):
        server.answer(1, {})
    server.take_output()
    server.receive(say(t="received", seq=3))
    server.socket_lost()
    assert not server.next_socket(2)
    assert not server.next_socket(6)
    assert server.next_socket(3)
    server.open(welcome(resumed=True))
    assert [json.loads(packed)["seq"] for _, packed in server.kept] == [4, 5]


def test_an_error_is_written_with_all_that_a_client_needs() -> None:
    failure = failure_of(StaleEpoch(3, 4))
    assert (failure.code, failure.retryable) == ("stale_epoch", False)
    assert failure.details == {"epoch": 3, "current": 4}


# ---------------------------------------------------------------- lost sockets


class Wire:
    """A client and a server, and the sockets between them, which lose what is on its way."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.client = ClientConversation(codec)
        self.server = ServerConversation(codec, 10**9)
        self.handled: list[str] = []
        """Calls that the server took, in order."""
        self.answers: list[str] = []
        self.pushes: list[int] = []
        self.called = 0
        self.pushed = 0
        self.to_server: list[Frame] = []
        self.to_client: list[Frame] = []
        self.connect()

    def connect(self) -> None:
        [found] = ServerConversation(self.codec, 1).receive(self.client.hello(None, "test", None))
        assert isinstance(found, Hello)
        resumed = found.resume is not None
        if found.resume is not None:
            assert self.server.next_socket(found.resume.seen)
        else:  # the first welcome was lost: the server begins anew with it
            assert self.handled == []
            self.server = ServerConversation(self.codec, 10**9)
            self.pushed = 0
        self.server.open(welcome(resumed=resumed, received=self.server.received))
        self.flush_server()

    def lose(self) -> None:
        """The socket is lost with all that is on its way; but a welcome may have been lost too."""
        self.to_server.clear()
        self.to_client.clear()
        self.client.socket_lost()
        self.server.socket_lost()

    def call(self) -> None:
        self.called += 1
        self.client.call(f"op{self.called}", None, {})

    def push(self) -> None:
        self.pushed += 1
        self.server.push("change", None, None, {"n": self.pushed})

    def flush_client(self) -> None:
        self.to_server.extend(self.client.take_output())

    def flush_server(self) -> None:
        self.to_client.extend(self.server.take_output())

    def deliver_to_server(self) -> None:
        if self.to_server:
            for found in self.server.receive(self.to_server.pop(0)):
                self.handle(found)

    def handle(self, found: ServerHappening) -> None:
        assert isinstance(found, Call), found
        self.handled.append(found.op)
        self.server.answer(found.id, {"op": found.op})

    def deliver_to_client(self) -> None:
        if self.to_client:
            for found in self.client.receive(self.to_client.pop(0)):
                match found:
                    case Answered(pending=pending, answer=answer):
                        assert answer.body == {"op": pending.op}
                        self.answers.append(pending.op)
                    case Pushed(body=body):
                        self.pushes.append(body["n"])
                    case _:
                        assert isinstance(found, Welcome), found


STEPS = ("call", "push", "flush_client", "flush_server", "deliver_to_server", "deliver_to_client", "cut")


@settings(deadline=None, max_examples=300, derandomize=True)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=120), codec=st.sampled_from(list(CODECS.values())))
def test_every_call_and_every_push_arrives_once_and_in_order(steps: list[str], codec: Codec) -> None:
    wire = Wire(codec)
    for step in steps:
        if step == "cut":
            wire.lose()
            wire.connect()
        else:
            getattr(wire, step)()
    for _ in range(4):
        wire.flush_client()
        while wire.to_server:
            wire.deliver_to_server()
        wire.flush_server()
        while wire.to_client:
            wire.deliver_to_client()
    assert wire.handled == [f"op{n}" for n in range(1, wire.called + 1)]
    assert wire.answers == wire.handled
    assert wire.pushes == list(range(1, wire.pushed + 1))
    assert wire.client.unanswered == {}


def test_a_server_that_was_started_anew_is_told_apart() -> None:
    client = ClientConversation(JSON)
    client.hello(None, "test", None)
    first = ServerConversation(JSON, BUFFER)
    first.receive(client.hello(None, "test", None))
    first.open(welcome())
    client.receive(first.take_output()[0])
    client.call("a", None, {})
    client.call("b", None, {})
    client.take_output()
    client.socket_lost()
    second = ServerConversation(JSON, BUFFER)
    second.receive(client.hello(None, "test", None))
    second.open(welcome(connection="d"))
    [found] = client.receive(second.take_output()[0])
    assert isinstance(found, Restarted)
    left = client.restart()
    assert [pending.op for pending in left] == ["a", "b"]
    client.call("attach", "i", {})
    for pending in left:
        client.queue(pending)
    [frame] = client.take_output()
    assert [(call.id, call.op) for call in second.receive(frame) if isinstance(call, Call)] == [
        (1, "attach"),
        (2, "a"),
        (3, "b"),
    ]


# ---------------------------------------------------------------- fuzzing

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NEAR = st.fixed_dictionaries(
    {"t": st.sampled_from(["hello", "call", "received", "renew", "goodbye", "welcome", "push", "x"])},
    optional={
        "id": st.integers(-1, 4) | JSON_VALUES,
        "op": st.sampled_from(["status", "register"]) | JSON_VALUES,
        "instance": st.text(max_size=5) | JSON_VALUES,
        "body": JSON_VALUES,
        "seq": st.integers(-1, 4) | JSON_VALUES,
        "version": st.just(1) | JSON_VALUES,
        "token": st.text(max_size=5) | JSON_VALUES,
        "resume": JSON_VALUES,
    },
)
FRAMES = (
    st.text(max_size=60)
    | st.binary(max_size=60)
    | JSON_VALUES.map(json.dumps)
    | NEAR.map(json.dumps)
    | st.lists(NEAR, max_size=5).map(json.dumps)
    | st.lists(NEAR, max_size=3).map(lambda v: MSGPACK.dump(json.loads(json.dumps(v), parse_int=small)))
)


def small(text: str) -> int:
    value = int(text)
    return value if -(2**63) <= value < 2**64 else 0


@settings(deadline=None, max_examples=500, derandomize=True)
@given(frames=st.lists(FRAMES, max_size=6), codec=st.sampled_from(list(CODECS.values())), open=st.booleans())
def test_no_frame_raises_and_every_violation_ends_the_socket(
    frames: list[Frame], codec: Codec, open: bool
) -> None:
    server = opened(codec) if open else ServerConversation(codec, BUFFER)
    client = ClientConversation(codec)
    client.hello(None, "test", None)
    for frame in frames:
        found = server.receive(frame)
        if any(isinstance(one, Violation) for one in found):
            assert server.is_over
            assert isinstance(found[-1], Violation)
            assert isinstance(found[-1].error, ValidationError)
        client.receive(frame)
    server.take_output()
