"""The retention actor: purges what the policy keeps no longer, and watches how large the store becomes.

Rules:

1. A pass begins `FIRST_SECONDS` after the start, so that a runtime that is restarted often still cleans, and
   then ``retention_seconds`` after the end of the last one.
2. A pass begins with what earlier purges have left, also those of a runtime that died. Without rules that is
   all it deletes.
3. While the store is away a pass waits and goes on where it was. Another fault of the store ends the pass,
   and damage stops the runtime.
4. Without rules, a store that has reached ``size_warning_bytes`` is told of in the log, once per doubling.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import attrs
import trio

from runtara.actors.purge import Pace, Purger, Walk
from runtara.clock import Clock
from runtara.config import Settings
from runtara.errors import StoreError
from runtara.persistence.store import Finished
from runtara.retention import Rule, doublings, parse_policy

logger = logging.getLogger("runtara.actors")

T = TypeVar("T")

FIRST_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 5.0


@attrs.frozen(kw_only=True)
class RetentionStatistics:
    """The retention actor at one moment."""

    passes: int
    """Passes that came to their end."""
    purged: int
    """Instances that they purged."""
    last_pass_us: int | None
    """When the last one ended."""


class RetentionActor:
    """See the module's docstring. One incarnation at a time runs."""

    def __init__(self, purger: Purger, clock: Clock, settings: Settings) -> None:
        self.purger = purger
        self.clock = clock
        self.settings = settings
        self.policy = parse_policy(settings.retention)
        self.passes = 0
        self.purged = 0
        self.last_pass_us: int | None = None
        self.warned = 0
        """For how many doublings of its size the store was told of."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep(FIRST_SECONDS)
        while True:
            try:
                with self.purger.damage_told():
                    await self.make_pass()
                    await self.watch_growth()
            except StoreError as error:
                logger.error("retention: a pass was given up: %s", error)
            await trio.sleep(self.settings.retention_seconds)

    async def make_pass(self) -> None:
        begun, before = trio.current_time(), self.purged
        await self.insist(lambda: self.purger.sweep(Pace()))
        for rule in self.policy.rules.values():
            if rule.keep_us is not None:
                await self.apply(rule, rule.keep_us)
        self.passes += 1
        self.last_pass_us = self.clock.now_us()
        if not self.policy.off:
            count, took = self.purged - before, trio.current_time() - begun
            logger.info("retention: a pass purged %d instances in %.1f s", count, took)

    async def apply(self, rule: Rule, keep_us: int) -> None:
        """Purge what falls under a rule and is older than it says."""

        def falls_under(finished: Finished) -> bool:
            return self.policy.rule_for(finished.tenant_id, rule.status) is rule

        walk = Walk(
            purger=self.purger,
            status=rule.status,
            before_us=self.clock.now_us() - keep_us,
            tenant_id=rule.tenant_id,
            wanted=falls_under,
        )
        try:
            await self.insist(walk.go_on)
        finally:
            self.purged += walk.purged

    async def insist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do ``work``, again and again while the store is away (rule 3)."""
        while True:
            try:
                return await work()
            except StoreError as error:
                if not error.retryable:
                    raise
                logger.warning("retention: the store does not answer, trying again: %s", error)
            await trio.sleep(RETRY_SECONDS)

    async def watch_growth(self) -> None:
        limit = self.settings.size_warning_bytes
        if not limit or not self.policy.off:
            return
        size = await self.size()
        reached = doublings(size, limit)
        if reached > self.warned:
            logger.warning(
                "the store holds %d bytes, and no retention deletes what has ended (see the setting)", size
            )
            self.warned = reached

    async def size(self) -> int:
        """Of the store's files, in bytes; 0 if it has none."""
        store = self.purger.store
        size = store.statistics().file_bytes
        return size or (await self.insist(store.growth)).file_bytes or 0

    def statistics(self) -> RetentionStatistics:
        return RetentionStatistics(passes=self.passes, purged=self.purged, last_pass_us=self.last_pass_us)
