"""What a person sees while a cluster starts. Goes to stderr; stdout belongs to results.

placed --> up --> checked --> joined --> loaded --> paired --> ready
"""

import sys
import time
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

STAGES = ("placed", "up", "checked", "joined", "loaded", "paired", "ready")


class StartProgress(Protocol):
    """Told of every rank that completes a stage."""

    def reached(self, rank: str, stage: str) -> None:
        """``rank`` has completed ``stage``, one of STAGES."""
        ...

    def close(self) -> None:
        """Nothing more will come; the start may have failed."""
        ...


class SilentProgress:
    """Shows nothing."""

    def reached(self, rank: str, stage: str) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Shows nothing."""


class LineProgress:
    """One line per completed stage; for logs."""

    def __init__(self, num_ranks: int, stream: TextIO | None = None) -> None:
        self._num_ranks = num_ranks
        self._stream = sys.stderr if stream is None else stream
        self._counts: dict[str, int] = dict.fromkeys(STAGES, 0)
        self._since = time.monotonic()

    def reached(self, rank: str, stage: str) -> None:
        """Count, and print the line when all ranks are there."""
        del rank
        self._counts[stage] += 1
        if self._counts[stage] == self._num_ranks:
            waited = time.monotonic() - self._since
            self._stream.write(
                f"headrace: {self._num_ranks} of {self._num_ranks} ranks {stage} after {waited:.1f} s\n"
            )
            self._stream.flush()

    def close(self) -> None:
        """Lines need no closing."""


class BarProgress:
    """One live line with a bar; for terminals."""

    def __init__(self, num_ranks: int) -> None:
        self._total = num_ranks * len(STAGES)
        self._bar = Progress(
            TextColumn("headrace starts"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} {task.description}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: TaskID = self._bar.add_task("placing", total=self._total)
        self._bar.start()

    def reached(self, rank: str, stage: str) -> None:
        """Move the bar and name the rank."""
        self._bar.update(self._task, advance=1, description=f"{rank} {stage}")

    def close(self) -> None:
        """Take the line away."""
        self._bar.stop()


def stderr_progress(num_ranks: int) -> StartProgress:
    """A bar on a terminal, lines elsewhere."""
    return BarProgress(num_ranks) if sys.stderr.isatty() else LineProgress(num_ranks)
