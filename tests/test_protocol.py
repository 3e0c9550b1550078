"""The protocol's page: its tables are those of the code, and its transcript is what the gateway says."""

import json
import re
from pathlib import Path
from typing import Any

import attrs
import pytest

from runtara.operations import OPERATIONS, PUSH_KINDS
from runtara.wire import CODECS, KINDS
from tests.transcripts import Peer, peer

PAGE = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text(encoding="utf-8")
TRANSCRIPT = re.findall(r"^```transcript\n(.*?)^```$", PAGE, re.M | re.S)
ROW = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.M)


def rows() -> dict[str, str]:
    return dict(ROW.findall(PAGE))


def test_every_operation_stands_in_the_table() -> None:
    for name, operation in OPERATIONS.items():
        roles = ", ".join(sorted(role.value for role in operation.roles))
        wanted = f"`{operation.request.__name__}` | `{operation.reply.__name__}` | {roles}"
        assert rows()[name] == wanted


def test_every_envelope_stands_in_its_table_with_all_its_fields() -> None:
    for name, kind in KINDS.items():
        described = rows()[name].split(" | ")[0]
        named = set(re.findall(r"`(\w+)`", described))
        assert {field.name for field in attrs.fields(kind)} == named, name


@pytest.mark.parametrize("kind", [*PUSH_KINDS.values(), "ended", "change", "watch_ended", "drain"])
def test_every_push_stands_in_its_table(kind: str) -> None:
    assert kind in rows()


def test_the_subprotocols_are_named() -> None:
    assert all(f"`{name}`" in PAGE for name in CODECS)


async def test_the_transcript_is_what_the_gateway_says() -> None:
    [text] = TRANSCRIPT
    async with peer() as found:
        heard: list[Any] = []
        lines = 0
        for line in text.splitlines():
            who, _, what = line.partition(" ")
            if who == "S:":
                assert heard.pop(0) == json.loads(what), f"line {lines}: {line}"
                lines += 1
                continue
            assert heard == [], f"not in the transcript, before: {line}"
            heard = await step(found, who, what, line)
        assert heard == []
        assert lines > 10


async def step(found: Peer, who: str, what: str, line: str) -> list[Any]:
    if who == "C:":
        return await found.say(what)
    match line.strip():
        case "(another program sends the custom signal paid)":
            await found.runtime.send_custom_signal("order-1", "paid", b"yes", idempotency_key="evt-7")
            return await found.hear()
        case "(the socket is lost)":
            found.lose_socket()
            return []
    raise AssertionError(f"what is this? {line}")
