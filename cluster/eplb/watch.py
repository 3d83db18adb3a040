"""Looks at the experts of a running deployment every few seconds, away from the event loop that answers requests."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType

from ...transfer.errors import HeadraceError
from ..config import ClusterConfig
from .heat_map import heat_map
from .show import balance_line

INTERVAL_S = 2.0

Piece = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Steps [n] and the rows [n, layers, experts] that were routed in them, summed over the ranks of an instance."""


class ExpertReporter(Protocol):
    """Who knows where experts lie and what was routed: the cluster, or a fake of it."""

    def eplb_report(self) -> Mapping[str, Any]:
        """Pool -> figures, as ``report`` describes them. Raises RankError where ranks have gone."""
        ...

    def expert_series(self, pool: str, since: int = 0) -> Sequence[Piece]:
        """What the instances of ``pool`` still have from step ``since`` on, one piece an instance."""
        ...


class ExpertWatch:
    """The newest report; empty before the first one, and the last good one when ranks have gone."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._reporter: ExpertReporter | None = None
        self.report: Mapping[str, Any] = {}

    def begin(self, reporter: ExpertReporter) -> None:
        """Whom to ask from now on."""
        self._reporter = reporter

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(self._interval_s)

    def look(self) -> None:
        """Looks once."""
        if self._reporter is None:
            return
        with contextlib.suppress(HeadraceError):  # who answers requests tells what has failed
            self.look_at(self._reporter)

    def look_at(self, reporter: ExpertReporter) -> None:
        """What looking is. Raises RankError where ranks have gone."""
        self.report = reporter.eplb_report()

    def line(self) -> str:
        """The balance in a few words."""
        return balance_line(self.report)

    def map(self, max_lines: int) -> RenderableType | None:
        """Heat maps of all instances that fit into ``max_lines`` of the terminal; None if none does."""
        parts: list[RenderableType] = []
        for pool, figures in self.report.items():
            for instance in figures["instances"]:
                rows = instance["rank_rows"]
                max_lines -= len(rows) + 3
                if rows and max_lines >= 0:
                    parts += [
                        f"{pool} instance {instance['instance']}",
                        heat_map(rows, instance["balance_by_layer"]),
                    ]
        return Group(*parts) if parts else None


def shares_experts(config: ClusterConfig) -> bool:
    """Whether there is anything to look at: a pool whose experts lie on several ranks, or can move."""
    return any(pool.ranks > 1 for pool in (config.prefill, config.decode))
