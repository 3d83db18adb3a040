"""What a deployment remembers of its traffic from one life to the next: a series per traffic class and pool.

history/
`-- chat.decode.npz        rows of the last passes, written anew every while and at the end
"""

import contextlib
import logging
from pathlib import Path
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from ...transfer.errors import ConfigError
from .config import EplbConfig
from .series import Series, load_series, save_series

_log = logging.getLogger(__name__)


class TrafficHistory:
    """The file of one pool; does nothing where the configuration names none."""

    def __init__(self, config: EplbConfig, pool: str) -> None:
        self._class = config.traffic_class or ""
        self._path = (
            None if config.history is None else Path(config.history) / f"{self._class}.{pool}.npz"
        )

    def load(self, layers: int, experts: int) -> NDArray[np.int32] | None:
        """Rows [steps, layers, experts] of an earlier deployment. A file that does not fit is said and not used."""
        if self._path is None or not self._path.exists():
            return None
        try:
            series = load_series(self._path)
            if (series.layers, series.experts) != (layers, experts):
                raise ConfigError(
                    f"{self._path} has {series.experts} experts in {series.layers} layers, this model {experts} in"
                    f" {layers}"
                )
        except ConfigError as error:
            _log.warning("no warm start: %s", error)
            return None
        return series.rows.astype(np.int32)

    def save(self, rows: NDArray[np.int32]) -> None:
        """Replace the file, at once or not at all. What cannot be written is said; serving goes on."""
        if self._path is None or not len(rows):
            return
        part = self._path.with_name(f".{self._path.name}.{uuid4().hex}")  # one of every writer
        series = Series(rows=rows, steps=np.arange(len(rows)), traffic_class=self._class)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_series(part, series)
            part.replace(self._path)
        except (OSError, ConfigError) as error:
            _log.warning("statistics of %s were not saved: %s", self._path, error)
            with contextlib.suppress(OSError):
                part.unlink()
