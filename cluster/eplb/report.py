"""The report of where experts lie, how even the load of ranks is and what was moved: ``Cluster.eplb_report()``.

    pool ("prefill", "decode")
    |-- enabled, restarted                      of the EPLB actor
    `-- instances
        |-- instance, num_experts, expert_bytes, epoch
        |-- placement                           [layers][ranks][slots], -1 for an empty slot
        |-- last_step, window_steps             what the next three cover
        |-- rank_rows                           [layers][ranks], sums over these steps
        |-- balance, balance_by_layer           rows of the mean rank over those of the busiest of every step
        |-- predicted_balance, achieved_balance of the plan in force
        |-- moved_bytes, moved_experts, flips, abandoned, stall_s
        |-- history                             one entry a decision
        `-- series                              steps, rows, balance and epoch of the last passes

Plain JSON values throughout. A file holds it alone or as key ``eplb`` of a batch's closing report.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ...transfer.errors import ConfigError

Report = Mapping[str, Any]


def load_report(path: Path) -> Report:
    """Reads a report saved by a batch. Raises ConfigError naming the file and what was expected."""
    try:
        document: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if isinstance(document, dict):
        holds = cast("dict[str, Any]", document)
        report = holds.get("eplb", holds)
        if isinstance(report, dict) and all(_is_pool(pool) for pool in report.values()):
            return cast("dict[str, Any]", report)
    raise ConfigError(
        f"{path} is no report of expert placement: save one with `headrace batch ... --eplb-report {path}`"
    )


def save_report(path: Path, report: Report) -> None:
    """Writes what ``load_report`` reads. Raises ConfigError where the file cannot be written."""
    try:
        path.write_text(json.dumps(report, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def without_series(report: Report) -> dict[str, Any]:
    """The report without what grows with every pass, for a closing report."""
    return {
        pool: {
            **figures,
            "instances": [
                {name: value for name, value in instance.items() if name != "series"}
                for instance in figures["instances"]
            ],
        }
        for pool, figures in report.items()
    }


def check_writable(path: Path, option: str) -> None:
    """Raises ConfigError before any work is done if ``path`` cannot become a file."""
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
        raise ConfigError(f"{option} {path} {reason}: name a file in a folder that exists")


def _is_pool(pool: object) -> bool:
    return isinstance(pool, dict) and isinstance(
        cast("dict[str, Any]", pool).get("instances"), list
    )
