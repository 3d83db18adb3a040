"""Files of ``headrace eplb``: what was routed (a series) and where experts lie (a placement).

series     .npz   rows int [steps, layers, experts]; optional: steps int [steps], traffic_class; or a .csv of counts
placement  .npz   slots int [layers, ranks, slots of a rank], -1 for an empty slot
"""

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from ...model.placement import ExpertPlacement
from ...transfer.errors import ConfigError
from .loads import counts_from_csv
from .measure import check_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Series:
    """Rows per logical expert of consecutive passes: ``rows`` [steps, layers, experts], ``steps`` int64 [steps]."""

    rows: NDArray[np.generic]
    steps: NDArray[np.int64]
    traffic_class: str = ""

    @property
    def layers(self) -> int:
        """Layers with routed experts."""
        return self.rows.shape[1]

    @property
    def experts(self) -> int:
        """Logical experts of a layer."""
        return self.rows.shape[2]


def load_series(path: Path) -> Series:
    """Reads a series, or a table of counts (.csv, .csv.gz) as one. Raises ConfigError that names the file."""
    if path.name.endswith((".csv", ".csv.gz")):
        counts = counts_from_csv(path)
        return Series(rows=counts, steps=np.arange(len(counts)))
    arrays = _arrays(path)
    if "rows" not in arrays:
        raise ConfigError(
            f"{path} has no array 'rows' but {_names(arrays)}: a series is an .npz with rows"
            " [steps, layers, experts], as `headrace eplb make-load` writes it"
        )
    rows = arrays["rows"]
    try:
        check_rows(rows)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    steps = arrays.get("steps", np.arange(len(rows)))
    if steps.shape != (len(rows),) or steps.dtype.kind not in "iu":
        raise ConfigError(
            f"{path}: steps of type {steps.dtype} and shape {list(steps.shape)} for {len(rows)} steps of rows:"
            f" give {len(rows)} integers, or leave them out"
        )
    if (np.diff(steps) <= 0).any():
        at = int(np.argmax(np.diff(steps) <= 0))
        raise ConfigError(
            f"{path}: step {steps[at + 1]} follows step {steps[at]}: steps have to grow"
        )
    return Series(
        rows=rows,
        steps=steps.astype(np.int64),
        traffic_class=str(arrays.get("traffic_class", "")),
    )


def save_series(path: Path, series: Series) -> None:
    """Writes what ``load_series`` reads. Raises ConfigError where the file cannot be written."""
    _save(
        path,
        {
            "rows": series.rows,
            "steps": series.steps,
            "traffic_class": np.array(series.traffic_class),
        },
    )


def load_placement(path: Path, num_experts: int | None = None) -> ExpertPlacement:
    """Reads a placement. Without ``num_experts`` it has as many as its slots name. Raises ConfigError."""
    arrays = _arrays(path)
    if "slots" not in arrays:
        raise ConfigError(
            f"{path} has no array 'slots' but {_names(arrays)}: a placement is an .npz with slots"
            " [layers, ranks, slots of a rank], as `headrace eplb plan --output` writes it"
        )
    slots = arrays["slots"]
    try:
        experts = num_experts if num_experts is not None else int(slots.max(initial=-1)) + 1
        return ExpertPlacement(num_experts=experts, slots=slots)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def save_placement(path: Path, slots: NDArray[np.int32]) -> None:
    """Writes what ``load_placement`` reads. Raises ConfigError where the file cannot be written."""
    _save(path, {"slots": slots})


def _names(arrays: Mapping[str, NDArray[Any]]) -> str:
    return ", ".join(sorted(arrays)) or "nothing"


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz; none of them may need unpickling."""
    try:
        with path.open("rb") as file:
            if zipfile.is_zipfile(file):
                file.seek(0)
                held = cast("NpzFile", np.load(file, allow_pickle=False))
                return {name: held[name] for name in held.files}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path} is not an .npz file of plain arrays: {error}") from error
    raise ConfigError(f"{path} is not an .npz file: write one with numpy.savez")


def _save(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    try:
        with path.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
