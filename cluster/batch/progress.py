"""How far a run is, on standard error: a bar on a terminal, else a plain line every few seconds."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn

from ..eplb.watch import ExpertWatch
from .runner import Runner

BAR_INTERVAL_S = 0.2
PLAIN_INTERVAL_S = 10.0


class _Bar(Progress):
    """A bar, and below it where the load of experts lies, while there is room for it."""

    def __init__(self, console: Console, watch: ExpertWatch | None) -> None:
        columns = (TextColumn("batch"), BarColumn(), TextColumn("{task.description}"))
        self._watch = watch
        super().__init__(*columns, console=console, auto_refresh=False)

    def get_renderables(self) -> Iterable[RenderableType]:
        """See Progress."""
        yield self.make_tasks_table(self.tasks)
        below = None if self._watch is None else self._watch.map(self.console.height - 2)
        if below is not None:
            yield below


@contextlib.asynccontextmanager
async def shown(
    runner: Runner, num_lines: int | None, watch: ExpertWatch | None = None
) -> AsyncGenerator[None]:
    """Reports on ``runner`` until the block ends; ``num_lines`` is the size of the input, None if unknown.

    With ``watch`` the balance of the ranks that share experts is part of it.
    """
    console = Console(stderr=True)
    show = _bar(runner, num_lines, console, watch) if console.is_terminal else None
    tasks = [asyncio.create_task(show or _plain(runner, num_lines, watch))]
    if watch is not None:
        tasks.append(asyncio.create_task(watch.run()))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _bar(
    runner: Runner, num_lines: int | None, console: Console, watch: ExpertWatch | None
) -> None:
    begun = time.monotonic()
    with _Bar(console, watch) as progress:
        task = progress.add_task("", total=num_lines)
        try:
            while True:
                text = status(runner, num_lines, time.monotonic() - begun, watch)
                progress.update(task, completed=runner.whole.lines, description=text, refresh=True)
                await asyncio.sleep(BAR_INTERVAL_S)
        finally:
            text = status(runner, num_lines, time.monotonic() - begun, watch)
            progress.update(task, completed=runner.whole.lines, description=text, refresh=True)


async def _plain(runner: Runner, num_lines: int | None, watch: ExpertWatch | None) -> None:
    begun = time.monotonic()
    while True:
        await asyncio.sleep(PLAIN_INTERVAL_S)
        text = status(runner, num_lines, time.monotonic() - begun, watch)
        sys.stderr.write(f"batch: {text}\n")
        sys.stderr.flush()


def status(
    runner: Runner, num_lines: int | None, run_s: float, watch: ExpertWatch | None = None
) -> str:
    """Counts, rates of this run, the balance of experts and the time that is left, in one line."""
    whole, run = runner.whole, runner.run_totals
    text = f"{whole.lines}/{num_lines or '?'} lines, {whole.failed} failed, {runner.in_flight} in flight"
    if run_s <= 0 or run.lines == 0:
        return text
    text += f", {run.prompt_tokens / run_s:.0f} prompt + {run.output_tokens / run_s:.0f} output tokens/s"
    balance = "" if watch is None else watch.line()
    if balance:
        text += f", {balance}"
    if num_lines is not None:
        text += f", {_duration(max(0, num_lines - whole.lines) * run_s / run.lines)} left"
    return text


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
