"""How you test your own durable code: a store in memory, and trio's clock that jumps.

Run it with pytest and pytest-trio; it takes no time at all. Under `autojump_clock` the runtime's wall clock
follows trio's, so a sleep of three weeks is over as soon as nothing else is left to do.
"""

import pytest
import trio

import runtara

WEEK = 7 * 86_400


async def remind(rt: runtara.Runtime, customer: str) -> None:
    """The code under test: wait for an answer, remind once after three weeks, give up after one more."""
    async with rt.register(customer) as instance:
        answer = await instance.wait_signal("answer", timeout=3 * WEEK, checkpoint_id="first")
        if answer.timed_out:
            await instance.emit("reminded")
            answer = await instance.wait_signal("answer", timeout=WEEK, checkpoint_id="second")
        await instance.complete(answer.payload or b"no answer")


@pytest.mark.trio
async def test_a_silent_customer_is_reminded_and_then_given_up(autojump_clock: trio.abc.Clock) -> None:
    began = trio.current_time()
    async with runtara.open_runtime("sqlite:///:memory:") as rt:
        await remind(rt, "silent")
        assert await rt.result("silent") == b"no answer"
        assert len((await rt.list_events("silent", subtype="reminded")).items) == 1
        assert trio.current_time() - began == pytest.approx(4 * WEEK, abs=1)


@pytest.mark.trio
async def test_an_answer_after_the_reminder_is_taken(autojump_clock: trio.abc.Clock) -> None:
    async with runtara.open_runtime("sqlite:///:memory:") as rt, trio.open_nursery() as nursery:
        nursery.start_soon(remind, rt, "slow")
        await trio.sleep(3 * WEEK + 60)
        await rt.send_custom_signal("slow", "answer", b"yes")
        assert await rt.result("slow") == b"yes"


@pytest.mark.trio
async def test_a_crash_in_the_middle_of_the_wait_changes_nothing(autojump_clock: trio.abc.Clock) -> None:
    began = trio.current_time()
    async with runtara.open_runtime("sqlite:///:memory:") as rt:
        with trio.move_on_after(WEEK):  # the run is torn away after one week ...
            await remind(rt, "unlucky")
        await trio.sleep(WEEK)  # ... and taken up again after another
        await remind(rt, "unlucky")
        assert trio.current_time() - began == pytest.approx(4 * WEEK, abs=1)
