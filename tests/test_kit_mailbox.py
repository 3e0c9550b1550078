"""Mailboxes, futures and actors of the kit: order, bounds, and what a cancellation leaves behind."""

import sys
import traceback
import tracemalloc

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from runtara.actors.actor import Actor, ActorEnded, ask
from runtara.actors.mailbox import Future, Mailbox, MailboxStatistics, twin_of

STEPS = range(8)


def mailbox_with(*messages: int, limit: int = 100) -> Mailbox[int]:
    mailbox: Mailbox[int] = Mailbox(limit)
    for message in messages:
        mailbox.put_nowait(message)
    return mailbox


# -- mailbox


async def test_messages_come_out_in_the_order_they_were_put() -> None:
    mailbox = mailbox_with(1, 2, 3)
    assert await mailbox.get() == 1
    assert await mailbox.get_all() == [2, 3]
    assert mailbox.take_nowait() == []


async def test_a_full_mailbox_refuses_at_once_and_takes_again_when_read() -> None:
    mailbox = mailbox_with(1, 2, limit=2)
    with pytest.raises(trio.WouldBlock):
        mailbox.put_nowait(3)
    assert await mailbox.get() == 1
    mailbox.put_nowait(3)
    assert mailbox.take_nowait() == [2, 3]


def test_a_mailbox_needs_room_for_one_message() -> None:
    with pytest.raises(ValueError, match="not 0"):
        Mailbox[int](0)


async def test_a_waiting_reader_gets_everything_put_before_it_runs() -> None:
    mailbox = mailbox_with()
    got: list[int] = []

    async def read() -> None:
        got.extend(await mailbox.get_all())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        assert mailbox.statistics() == MailboxStatistics(items=0, limit=100, waiting=True)
        mailbox.put_nowait(1)
        mailbox.put_nowait(2)
        assert mailbox.statistics() == MailboxStatistics(items=2, limit=100, waiting=False)
    assert got == [1, 2]


async def test_a_second_waiting_reader_is_refused() -> None:
    mailbox = mailbox_with()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.get)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await mailbox.get_all()
        mailbox.put_nowait(1)


async def test_a_woken_reader_waits_again_when_the_mailbox_was_emptied_meanwhile() -> None:
    mailbox = mailbox_with()
    got: list[int] = []

    async def read() -> None:
        got.append(await mailbox.get())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        mailbox.put_nowait(1)
        assert mailbox.take_nowait() == [1]
        await wait_all_tasks_blocked()
        assert got == []
        mailbox.put_nowait(2)
    assert got == [2]


async def test_messages_put_back_come_first_even_when_the_mailbox_is_full_or_closed() -> None:
    mailbox = mailbox_with(3, 4, limit=2)
    mailbox.close()
    mailbox.put_back([1, 2])
    assert mailbox.statistics() == MailboxStatistics(items=4, limit=2, waiting=False)
    assert await mailbox.get_all() == [1, 2, 3, 4]


async def test_putting_back_wakes_the_reader() -> None:
    mailbox = mailbox_with()
    got: list[int] = []

    async def read() -> None:
        got.extend(await mailbox.get_all())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        mailbox.put_back([])
        assert mailbox.statistics().waiting
        mailbox.put_back([1, 2])
    assert got == [1, 2]


async def test_a_closed_mailbox_refuses_messages_and_ends_after_the_last_one() -> None:
    mailbox = mailbox_with(1)
    mailbox.close()
    mailbox.close()
    assert mailbox.closed
    with pytest.raises(trio.ClosedResourceError):
        mailbox.put_nowait(2)
    assert await mailbox.get() == 1
    with pytest.raises(trio.EndOfChannel):
        await mailbox.get()


async def test_closing_ends_a_waiting_reader() -> None:
    mailbox = mailbox_with()
    ended: list[bool] = []

    async def read() -> None:
        with pytest.raises(trio.EndOfChannel):
            await mailbox.get_all()
        ended.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        mailbox.close()
    assert ended == [True]


@pytest.mark.parametrize("one_at_a_time", [True, False])
@pytest.mark.parametrize("there_before", [True, False])
@pytest.mark.parametrize("cancel_at", STEPS)
@pytest.mark.parametrize("put_at", STEPS)
async def test_a_cancelled_reader_has_the_message_or_leaves_it(
    put_at: int, cancel_at: int, there_before: bool, one_at_a_time: bool
) -> None:
    mailbox = mailbox_with(*([0] if there_before else []))
    scope = trio.CancelScope()
    got: list[int] = []

    async def read() -> None:
        with scope:
            got.extend([await mailbox.get()] if one_at_a_time else await mailbox.get_all())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        for step in STEPS:
            if step == put_at:
                mailbox.put_nowait(1)
            if step == cancel_at:
                scope.cancel()
            await trio.lowlevel.checkpoint()
    assert got + mailbox.take_nowait() == ([0, 1] if there_before else [1])
    assert not mailbox.statistics().waiting


async def test_reading_a_full_mailbox_lets_other_tasks_run_and_can_be_cancelled() -> None:
    mailbox = mailbox_with(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await mailbox.get_all()
    assert scope.cancelled_caught
    assert mailbox.take_nowait() == [1]


@given(st.lists(st.one_of(st.integers(0, 9), st.just("take"), st.just("back")), max_size=40))
def test_a_mailbox_behaves_like_a_bounded_list(steps: list[int | str]) -> None:
    mailbox: Mailbox[int] = Mailbox(5)
    model: list[int] = []
    taken: list[int] = []
    for step in steps:
        if isinstance(step, int):
            try:
                mailbox.put_nowait(step)
            except trio.WouldBlock:
                assert len(model) >= 5
            else:
                model.append(step)
        elif step == "take":
            taken = mailbox.take_nowait()
            assert taken == model
            model = []
        else:
            mailbox.put_back(taken)
            model, taken = taken + model, []
        assert mailbox.statistics().items == len(model)


# -- future


async def test_a_value_set_before_the_wait_is_returned_again_and_again() -> None:
    future: Future[int] = Future()
    assert not future.done
    future.set(1)
    assert future.done
    assert [await future.wait(), await future.wait()] == [1, 1]


async def test_the_first_result_wins() -> None:
    value: Future[int] = Future()
    value.set(1)
    value.set(2)
    value.fail(ValueError("late"))
    assert await value.wait() == 1
    failure: Future[int] = Future()
    failure.fail(ValueError("first"))
    failure.set(1)
    with pytest.raises(ValueError, match="first"):
        await failure.wait()


async def test_a_value_that_is_there_is_not_lost_to_a_cancellation() -> None:
    future: Future[int] = Future()
    future.set(1)
    got = 0
    with trio.CancelScope() as scope:
        scope.cancel()
        got = await future.wait()
    assert got == 1


async def test_waiting_for_a_completed_future_is_a_checkpoint() -> None:
    future: Future[int] = Future()
    future.set(1)
    ran = trio.Event()

    async def other() -> None:
        ran.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for _ in range(2):  # the order within one pass of the loop is random
            await future.wait()
        assert ran.is_set()


async def test_a_second_waiter_is_refused() -> None:
    future: Future[int] = Future()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(future.wait)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await future.wait()
        future.set(1)


@pytest.mark.parametrize("cancel_at", STEPS)
@pytest.mark.parametrize("set_at", STEPS)
async def test_a_cancelled_waiter_returns_the_value_or_goes_away(set_at: int, cancel_at: int) -> None:
    future: Future[int] = Future()
    scope = trio.CancelScope()
    got: list[int] = []

    async def wait() -> None:
        with scope:
            got.append(await future.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        for step in STEPS:
            if step == set_at:
                future.set(1)
            if step == cancel_at:
                scope.cancel()
            await trio.lowlevel.checkpoint()
    assert got == ([] if scope.cancelled_caught else [1])
    assert await future.wait() == 1


class WithFields(Exception):
    def __init__(self, field: str, *, extra: int) -> None:
        super().__init__(f"{field} is wrong")
        self.field = field
        self.extra = extra


class Slotted(Exception):
    __slots__ = ("field",)


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


async def test_one_error_for_many_futures_does_not_pile_up_tracebacks() -> None:
    error = raised(ValueError("broken"))
    before = len(traceback.extract_tb(error.__traceback__))
    depths = []
    for _ in range(5):
        future: Future[int] = Future()
        future.fail(error)
        with pytest.raises(ValueError, match="broken") as caught:
            await future.wait()
        assert caught.value is not error
        depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(set(depths)) == 1
    assert depths[0] > before
    assert len(traceback.extract_tb(error.__traceback__)) == before


def test_a_twin_has_class_attributes_notes_cause_and_traceback_of_the_error() -> None:
    error = raised(WithFields("name", extra=3))
    error.__cause__ = KeyError("why")
    error.add_note("noted")
    twin = twin_of(error)
    assert isinstance(twin, WithFields)
    assert twin is not error
    assert (str(twin), twin.field, twin.extra) == ("name is wrong", "name", 3)
    assert twin.__cause__ is error.__cause__
    assert twin.__suppress_context__
    assert twin.__traceback__ is error.__traceback__
    twin.add_note("more")
    assert error.__notes__ == ["noted"]


@pytest.mark.parametrize(
    "error",
    [
        KeyError("k"),
        OSError(2, "gone"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
        ExceptionGroup("many", [ValueError("a")]),
    ],
)
def test_builtin_errors_have_twins(error: Exception) -> None:
    twin = twin_of(error)
    assert twin is not error
    assert (type(twin), str(twin), twin.args) == (type(error), str(error), error.args)


def test_an_error_that_cannot_be_rebuilt_is_raised_itself_without_its_traceback() -> None:
    for error in (OSError(2, "gone", "file.txt"), Slotted("x")):
        caught = raised(error)
        assert twin_of(caught) is error
        assert error.__traceback__ is None


# -- actor


@attrs.frozen
class Say:
    word: str
    reply: Future[str]


class Recorder(Actor[str | Say]):
    """Remembers what it handled; fails on "fail" and waits for ever on "hang"."""

    def __init__(self, mailbox: Mailbox[str | Say]) -> None:
        super().__init__("recorder", mailbox)
        self.handled: list[str] = []

    async def handle(self, message: str | Say) -> None:
        word = message if isinstance(message, str) else message.word
        if word == "fail":
            raise ValueError(word)
        if word == "hang":
            await trio.sleep_forever()
        self.handled.append(word)
        if isinstance(message, Say):
            message.reply.set(word.upper())


def new_recorder() -> Recorder:
    return Recorder(Mailbox(100))


async def test_an_actor_handles_in_order_and_ends_when_its_mailbox_is_closed() -> None:
    actor = new_recorder()
    for word in ("a", "b", "c"):
        actor.tell(word)
    actor.mailbox.close()
    await actor.run()
    assert actor.handled == ["a", "b", "c"]


async def test_an_actor_is_ready_before_its_first_message() -> None:
    async with trio.open_nursery() as nursery:
        actor = new_recorder()
        await nursery.start(actor.run)
        assert await ask(actor.mailbox, lambda reply: Say("hi", reply)) == "HI"
        nursery.cancel_scope.cancel()


async def test_the_end_of_a_channel_inside_a_handler_is_a_failure() -> None:
    class Broken(Actor[int]):
        async def handle(self, message: int) -> None:
            raise trio.EndOfChannel

    with pytest.raises(trio.EndOfChannel):
        await Broken("broken", mailbox_with(1)).run()


@given(st.lists(st.sampled_from(["a", "b", "c", "fail"]), max_size=12))
def test_no_message_is_lost_or_repeated_over_failing_incarnations(words: list[str]) -> None:
    mailbox: Mailbox[str | Say] = Mailbox(100)
    for word in words:
        mailbox.put_nowait(word)
    mailbox.close()
    handled: list[str] = []

    async def live_until_done() -> None:
        while True:
            actor = Recorder(mailbox)
            try:
                await actor.run()
                return
            except ValueError as error:
                actor.handled.append(str(error))
            finally:
                handled.extend(actor.handled)

    trio.run(live_until_done)
    assert handled == words


async def test_a_cancelled_actor_leaves_what_it_had_not_begun() -> None:
    actor = new_recorder()
    for word in ("a", "hang", "b", "c"):
        actor.tell(word)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(actor.run)
        await wait_all_tasks_blocked()
        actor.tell("d")
        nursery.cancel_scope.cancel()
    assert actor.handled == ["a"]
    assert actor.mailbox.take_nowait() == ["b", "c", "d"]


@pytest.mark.parametrize("word", ["fail", "hang"])
async def test_who_asked_with_the_lost_message_is_told_and_the_next_one_is_answered(word: str) -> None:
    actor = new_recorder()
    lost: Future[str] = Future()
    kept: Future[str] = Future()
    actor.tell(Say(word, lost))
    actor.tell(Say("next", kept))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actor.run)
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    except* ValueError:
        assert word == "fail"
    with pytest.raises(ActorEnded, match="actor recorder ended") as caught:
        await lost.wait()
    assert caught.value.name == "recorder"
    actor.mailbox.close()
    await actor.run()
    assert await kept.wait() == "NEXT"


async def test_ask_raises_what_the_mailbox_raises() -> None:
    mailbox: Mailbox[Say] = Mailbox(1)
    mailbox.put_nowait(Say("a", Future()))
    with pytest.raises(trio.WouldBlock):
        await ask(mailbox, lambda reply: Say("b", reply))


# -- memory


def test_an_idle_mailbox_is_small() -> None:
    mailbox = mailbox_with()
    assert sys.getsizeof(mailbox) + sys.getsizeof(mailbox.take_nowait()) < 400


async def test_twenty_thousand_idle_actors_take_less_than_four_kib_each() -> None:
    count = 20_000
    actors: list[Recorder] = []
    async with trio.open_nursery() as nursery:
        tracemalloc.start()
        try:
            for _ in range(count):
                actors.append(new_recorder())
                nursery.start_soon(actors[-1].run)
            await wait_all_tasks_blocked()
            bytes_each = tracemalloc.get_traced_memory()[0] / count
        finally:
            tracemalloc.stop()
        assert all(actor.mailbox.statistics().waiting for actor in actors)
        nursery.cancel_scope.cancel()
    assert bytes_each < 4096
