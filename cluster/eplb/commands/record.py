"""``headrace eplb record``: runs a batch and saves which experts a pool used, pass by pass."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import cast

import numpy as np

from ....transfer.errors import ConfigError
from ...config import checkpoint_dir, load_cluster_config
from ...show_config import add_config_arguments
from ..report import check_writable
from ..series import Series, save_series
from ..watch import ExpertReporter, ExpertWatch, Piece

_WINDOW = 2000
_POLL_S = 0.25
_LOOKS_PER_REPORT = 8


class Recorder(ExpertWatch):
    """Collects the passes of one instance before they leave the ranks' rings."""

    def __init__(self, pool: str, instance: int) -> None:
        super().__init__(_POLL_S)
        self._pool, self._instance = pool, instance
        self._pieces: list[Piece] = []
        self._next = 0
        self._looks = 0
        self.lost_steps = 0
        """Passes that had left the rings before they were collected."""

    def look_at(self, reporter: ExpertReporter) -> None:
        """See ExpertWatch."""
        steps, rows = reporter.expert_series(self._pool, self._next)[self._instance]
        if len(steps):
            if self._pieces:
                self.lost_steps += int(steps[0]) - self._next
            self.lost_steps += int(steps[-1] - steps[0]) + 1 - len(steps)
            self._pieces.append((steps, rows))
            self._next = int(steps[-1]) + 1
        if self._looks % _LOOKS_PER_REPORT == 0:
            super().look_at(reporter)
        self._looks += 1

    def series(self, traffic_class: str) -> Series:
        """Everything so far. Raises ConfigError if that is nothing."""
        if not self._pieces:
            raise ConfigError("no pass was recorded: the input has no line that could be answered")
        steps, rows = (np.concatenate(parts) for parts in zip(*self._pieces, strict=True))
        busy = rows.any(axis=(1, 2))
        return Series(rows=rows[busy], steps=steps[busy], traffic_class=traffic_class)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    add_config_arguments(parser)
    parser.add_argument("--input", required=True, metavar="IN", help="as of `headrace batch`")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.npz")
    parser.add_argument("--pool", choices=("decode", "prefill"), default="decode")
    parser.add_argument("--instance", type=int, default=0, help="of the pool; default: 0")
    parser.add_argument("--traffic-class", default="", help="a name to keep with the series")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> dict[str, object]:
    """See cli.Command."""
    check_writable(args.output, "--output")
    pool = cast(str, args.pool)
    config = load_cluster_config(args.config, [f"{pool}.experts.window={_WINDOW}", *args.overrides])
    instances = (config.decode if pool == "decode" else config.prefill).instances
    if not 0 <= args.instance < instances:
        raise ConfigError(f"--instance {args.instance} is not allowed: 0 to {instances - 1}")
    from ....model.checkpoint import Checkpoint
    from ...batch.command import answer, drive
    from ...batch.job import BatchJob
    from ...batch.source import Source
    from ...batch.target import Target

    recorder = Recorder(pool, args.instance)
    source, checkpoint = Source(args.input), Checkpoint(checkpoint_dir(config))
    with (
        tempfile.TemporaryDirectory(prefix="headrace-record-") as folder,
        BatchJob(source, Target.of(f"{folder}/answers.jsonl", Path(folder)), {}) as job,
    ):
        report = drive(job, lambda: answer(job, config, checkpoint, None, recorder), ordered=False)
    series = recorder.series(args.traffic_class)
    save_series(args.output, series)
    if recorder.lost_steps:
        sys.stderr.write(f"record: {recorder.lost_steps} passes were lost between two looks\n")
    return {
        "output": str(args.output),
        "pool": pool,
        "instance": args.instance,
        "steps": len(series.steps),
        "layers": series.layers,
        "experts": series.experts,
        "rows_per_layer": int(series.rows.sum()) // series.layers,
        "lost_steps": recorder.lost_steps,
        "requests": report["requests"],
        "failed": report["failed"],
    }
