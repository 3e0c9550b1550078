"""What the demo shows: live on a terminal, plain lines elsewhere."""

from collections import defaultdict
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runtara.cli.demo_log import Entry, Kind
from runtara.cli.demo_plan import STAGES, Plan
from runtara.cli.demo_verify import Numbers

CELL_WIDTH = 24
MOST_CELLS = 90
MOST_VIOLATIONS = 20


class Progress:
    """How far the orders are, as the side-effect log tells it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stages: dict[str, set[str]] = defaultdict(set)
        self.life = 0
        self.kills = 0
        self.payments: set[tuple[str, str]] = set()

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            match entry.kind:
                case Kind.UP:
                    self.life = entry.life
                case Kind.SENT:
                    self.payments.add(entry.place)
                case Kind.ACK | Kind.GOT | Kind.SLEPT | Kind.DONE:
                    self.stages[entry.instance_id].add(entry.name)

    def stage(self, instance_id: str) -> int:
        return len(self.stages[instance_id])

    @property
    def acknowledged(self) -> int:
        return sum(len(names - {"-"}) for names in self.stages.values())

    @property
    def completed(self) -> int:
        return sum("-" in names for names in self.stages.values())

    @property
    def summary(self) -> str:
        return (
            f"{self.acknowledged} checkpoints acknowledged, {len(self.payments)} signals accepted, "
            f"{self.completed} of {self.plan.instances} runs completed"
        )


class Screen:
    """Shows events as lines, and on a terminal a picture of all orders below them."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self.console = console
        self.progress = Progress(plan)
        self.live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self.live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "Screen":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, text: str, style: str = "") -> None:
        """One line that stays. Its text is never taken for markup."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def refresh(self) -> None:
        """Draw the picture anew, if there is one."""
        if self.live is not None:
            self.live.update(picture(self.progress, self.console.width), refresh=True)


def picture(progress: Progress, width: int) -> Group:
    """One cell for each order, as many columns as fit, and a line of numbers."""
    shown = progress.plan.instance_ids[:MOST_CELLS]
    columns = max(1, width // CELL_WIDTH)
    grid = Table.grid(padding=(0, 2))
    cells = [cell(instance_id, progress.stage(instance_id)) for instance_id in shown]
    rows = -(-len(cells) // columns)
    for row in range(rows):
        grid.add_row(*cells[row::rows])
    parts: list[Table | Text] = [grid]
    if len(shown) < progress.plan.instances:
        parts.append(Text(f"... and {progress.plan.instances - len(shown)} more"))
    line = f"child {progress.life}, kills: {progress.kills}; {progress.summary}"
    parts.append(Text(line, style="bold", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def cell(instance_id: str, stage: int) -> Text:
    style = "green" if stage == STAGES else "yellow"
    bar = Text("█" * stage, style=style) + Text("░" * (STAGES - stage), style="bright_black")
    return Text(f"{instance_id} ") + bar


def report(console: Console, found: Numbers, *, instances: int, kills: int, seconds: float) -> None:
    """The numbers at the end."""
    rows: tuple[tuple[str, int | str, str], ...] = (
        ("kills", kills, "SIGKILL, at random moments"),
        ("instances", instances, f"{found.completed} completed"),
        ("acknowledged checkpoints", found.acknowledged, "compared with the store, byte for byte"),
        ("finished steps", found.finished_steps, "ran once, or again only before their acknowledgement"),
        ("steps run twice", found.repeated_steps, "killed between body and acknowledgement, as may happen"),
        ("signals", found.signals, f"sent {found.sendings} times in all, {found.consumed} consumed"),
        ("durable sleeps", found.sleeps, "each with one deadline over all restarts"),
        ("time", f"{seconds:.1f} s", "in all"),
    )
    for name, value, comment in rows:
        console.print(Text(f"  {name:<25}{value:>7}   {comment}"), soft_wrap=True)


def verdict(console: Console, wrong: tuple[str, ...]) -> None:
    """The last word."""
    if not wrong:
        console.print(
            Text(
                "verified: no acknowledged checkpoint was lost, no finished step ran again, "
                "each signal was consumed once",
                style="bold green",
            ),
            soft_wrap=True,
        )
        return
    console.print(Text(f"NOT verified: {len(wrong)} violations", style="bold red"), soft_wrap=True)
    for text in wrong[:MOST_VIOLATIONS]:
        console.print(Text(f"  {text}", style="red"), soft_wrap=True)
    if len(wrong) > MOST_VIOLATIONS:
        console.print(f"  ... and {len(wrong) - MOST_VIOLATIONS} more")
