"""How far a run is, on standard error: a bar on a terminal, else a plain line every few seconds."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .runner import Runner

BAR_INTERVAL_S = 0.2
PLAIN_INTERVAL_S = 10.0


@contextlib.asynccontextmanager
async def shown(runner: Runner, num_lines: int | None) -> AsyncGenerator[None]:
    """Reports on ``runner`` until the block ends; ``num_lines`` is the size of the input, None if unknown."""
    console = Console(stderr=True)
    task = asyncio.create_task(
        _bar(runner, num_lines, console) if console.is_terminal else _plain(runner, num_lines)
    )
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _bar(runner: Runner, num_lines: int | None, console: Console) -> None:
    columns = (TextColumn("batch"), BarColumn(), TextColumn("{task.description}"))
    begun = time.monotonic()
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=num_lines)
        try:
            while True:
                text = status(runner, num_lines, time.monotonic() - begun)
                progress.update(task, completed=runner.whole.lines, description=text, refresh=True)
                await asyncio.sleep(BAR_INTERVAL_S)
        finally:
            text = status(runner, num_lines, time.monotonic() - begun)
            progress.update(task, completed=runner.whole.lines, description=text, refresh=True)


async def _plain(runner: Runner, num_lines: int | None) -> None:
    begun = time.monotonic()
    while True:
        await asyncio.sleep(PLAIN_INTERVAL_S)
        sys.stderr.write(f"batch: {status(runner, num_lines, time.monotonic() - begun)}\n")
        sys.stderr.flush()


def status(runner: Runner, num_lines: int | None, run_s: float) -> str:
    """Counts, rates of this run and the time that is left, in one line."""
    whole, run = runner.whole, runner.run_totals
    text = f"{whole.lines}/{num_lines or '?'} lines, {whole.failed} failed, {runner.in_flight} in flight"
    if run_s <= 0 or run.lines == 0:
        return text
    text += f", {run.prompt_tokens / run_s:.0f} prompt + {run.output_tokens / run_s:.0f} output tokens/s"
    if num_lines is not None:
        text += f", {_duration(max(0, num_lines - whole.lines) * run_s / run.lines)} left"
    return text


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
