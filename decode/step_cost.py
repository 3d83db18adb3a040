"""What a decode step costs: forward pass, sampling, drafting. Measured at start, kept on disk for an hour.

A profile decides what to measure next from the seconds that ``run`` returned and from nothing else. So ranks of an
instance, whose passes meet in collectives, measure the same points in the same order if ``run`` returns the same number
on each of them: the slowest rank's.
"""

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import __version__
from ..kernels.kept import kept_folder
from .cost_table import CostTable, Floats

LIFETIME_S = 3600.0
_FORMAT = 2

Run = Callable[[int, int], float]
"""(rows, context of each) -> seconds of one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """``forward`` by rows and context per row, ``sample`` by rows with logits, ``draft`` by requests."""

    forward: CostTable
    sample: CostTable
    draft: CostTable

    def step_seconds(self, rows: npt.ArrayLike, context: float) -> Floats:
        """Seconds of steps of so many rows, without drafting."""
        return self.forward.seconds(rows, context) + self.sample.seconds(rows)

    def draft_seconds(self, num_requests: int) -> float:
        """Seconds of drafting for so many requests."""
        return float(self.draft.seconds(num_requests))


def unmeasured() -> StepCost:
    """A step that costs the same whatever it does, until it is observed: everything is verified."""
    return StepCost(
        forward=CostTable((1,), (0,), [[1e-2]]),
        sample=CostTable((1,), (0,), [[1e-6]]),
        draft=CostTable((1,), (0,), [[1e-6]]),
    )


def profile(
    run: Run,
    rows: Sequence[int],
    contexts: Sequence[int] = (0,),
    *,
    budget_s: float,
    repeats: int = 5,
) -> CostTable:
    """Time ``run`` on the grid: a warm-up and ``repeats`` runs a point, of which the best and the worst are dropped.

    The smallest point and the ends of both axes come first, then points from cheap to expensive while an estimate says
    that they fit into ``budget_s`` seconds of runs. What does not fit follows from a fit of a + b rows + c context +
    d rows context to what was measured. A point whose warm-up took a tenth of the budget is run once more only.
    Raises ValueError for fewer than 3 repeats or a budget that is not positive.
    """
    if repeats < 3:
        raise ValueError(f"repeats = {repeats} is not allowed: at least 3, for two are dropped")
    if not budget_s > 0.0:
        raise ValueError(f"budget_s = {budget_s} is not allowed: seconds above 0")
    grid = [(r, c) for r in range(len(rows)) for c in range(len(contexts))]
    first = dict.fromkeys([(0, 0), (len(rows) - 1, 0), (0, len(contexts) - 1)])
    measured: dict[tuple[int, int], float] = {}
    spent = 0.0

    def measure(point: tuple[int, int]) -> None:
        nonlocal spent
        row, context = rows[point[0]], contexts[point[1]]
        warm_up_s = run(row, context)
        times = sorted(
            run(row, context) for _ in range(repeats if warm_up_s < budget_s / 10 else 1)
        )
        spent += warm_up_s + sum(times)
        kept = times[1:-1] or times
        measured[point] = max(sum(kept) / len(kept), 1e-9)

    for point in first:
        measure(point)
    todo = sorted(set(grid) - set(first), key=lambda p: (rows[p[0]] * (contexts[p[1]] + 512), p))
    for point in todo:
        expected = _fit(rows, contexts, measured)[point]
        if spent + expected * (1 + repeats) <= budget_s:
            measure(point)
    table = _fit(rows, contexts, measured)
    for point, seconds in measured.items():
        table[point] = seconds
    return CostTable(rows, contexts, table)


def _fit(
    rows: Sequence[int], contexts: Sequence[int], measured: Mapping[tuple[int, int], float]
) -> Floats:
    """Seconds [rows, contexts] fitted to ``measured`` with the least relative error, never below all of them."""
    row, context = np.meshgrid(np.array(rows, float), np.array(contexts, float), indexing="ij")
    terms = np.stack([np.ones_like(row), row, row * context, context], axis=-1)
    known = tuple(np.array(list(measured)).T)
    seconds = np.array(list(measured.values()))
    scale = np.abs(terms).max(axis=(0, 1)).clip(min=1.0)
    weighted = terms[known] / scale / seconds[:, None]
    found = np.linalg.lstsq(weighted, np.ones(len(seconds)), rcond=None)[0]
    return np.maximum(terms @ (found / scale), seconds.min())


def cache_folder() -> Path | None:
    """Where costs are kept from one process to the next, or None."""
    return kept_folder("step-cost")


def cache_key(parts: Mapping[str, object]) -> str:
    """A name for what ``parts`` (model, options, threads: JSON values) describe in this version on this processor."""
    ours = {"cpu": _processor(), "version": __version__, "format": _FORMAT}
    text = json.dumps({**parts, **ours}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def load(folder: Path | None, key: str, now_s: float | None = None) -> StepCost | None:
    """The cost that was saved under ``key`` less than LIFETIME_S ago, or None. A damaged file counts as none."""
    if folder is None:
        return None
    path = folder / f"{key}.json"
    try:
        age_s = (time.time() if now_s is None else now_s) - path.stat().st_mtime
        if not 0.0 <= age_s < LIFETIME_S:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        return StepCost(**{name: _table(found[name]) for name in ("forward", "sample", "draft")})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(folder: Path | None, key: str, cost: StepCost) -> None:
    """Keep the profiled seconds for the next start. Without a place to write, it measures again."""
    if folder is None:
        return
    tables = {"forward": cost.forward, "sample": cost.sample, "draft": cost.draft}
    text = json.dumps(
        {
            name: {"rows": t.rows, "contexts": t.contexts, "seconds": t.profiled}
            for name, t in tables.items()
        }
    )
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, suffix=".new", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        Path(file.name).replace(folder / f"{key}.json")
    except OSError:
        return


def _table(found: Mapping[str, Any]) -> CostTable:
    return CostTable(found["rows"], found["contexts"], found["seconds"])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} x {os.cpu_count()}"
