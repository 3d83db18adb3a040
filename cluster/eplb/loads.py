"""Expert loads to plan for: synthetic series of every kind that matters, and series from files.

All are int64 rows [T steps, L layers, E experts]. ``assignments`` is how many rows a step routes in one layer (tokens
times experts a token); every count is drawn from a Poisson law around its rate, as independent tokens would give, save
in the steady loads.

    steady_0.8, _1.2     as zipf, but every step has exactly the rates
    zipf_0.8, zipf_1.2   rates fall as rank**-s and stay; every layer has its own order of experts
    bursts               zipf 0.8, every expert's rate times a gamma variable of shape 0.5, drawn anew every step
    drift                zipf 0.8 that turns linearly into a zipf 0.8 of another order
    topics               eight topics, each with its own zipf 1.2 order; their shares change from step to step, and the
                         experts of a topic are hot together
"""

import csv
import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...transfer.errors import ConfigError
from .measure import check_rows

__all__ = ["LOADS", "counts_from_csv", "make_load"]

Rates = NDArray[np.float64]


def make_load(
    name: str, *, steps: int, layers: int, experts: int, assignments: int, seed: int = 0
) -> NDArray[np.int64]:
    """The synthetic load ``name`` of ``LOADS``.

    Raises:
        ConfigError: no load has this name.
    """
    if name not in LOADS:
        raise ConfigError(f"there is no load {name!r}; choose one of {', '.join(LOADS)}")
    rng = np.random.default_rng([seed, sorted(LOADS).index(name)])
    share = LOADS[name](rng, steps, layers, experts)
    rates = share * assignments
    return np.rint(rates).astype(np.int64) if name.startswith("steady") else rng.poisson(rates)


def _zipf(rng: np.random.Generator, layers: int, experts: int, exponent: float) -> Rates:
    share = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    return rng.permuted(np.tile(share / share.sum(), (layers, 1)), axis=1)


def _stationary(exponent: float) -> Callable[[np.random.Generator, int, int, int], Rates]:
    def draw(rng: np.random.Generator, steps: int, layers: int, experts: int) -> Rates:
        return np.repeat(_zipf(rng, layers, experts, exponent)[None], steps, 0)

    return draw


def _bursts(rng: np.random.Generator, steps: int, layers: int, experts: int) -> Rates:
    share = _zipf(rng, layers, experts, 0.8) * rng.gamma(0.5, 2.0, (steps, layers, experts))
    return share / share.sum(2, keepdims=True)


def _drift(rng: np.random.Generator, steps: int, layers: int, experts: int) -> Rates:
    before, after = _zipf(rng, layers, experts, 0.8), _zipf(rng, layers, experts, 0.8)
    along = np.linspace(0.0, 1.0, steps)[:, None, None]
    return (1 - along) * before + along * after


def _topics(rng: np.random.Generator, steps: int, layers: int, experts: int) -> Rates:
    topics = _zipf(rng, 8 * layers, experts, 1.2).reshape(8, layers, experts)
    return np.einsum("tk,kle->tle", rng.dirichlet(np.full(8, 0.3), steps), topics)


LOADS: dict[str, Callable[[np.random.Generator, int, int, int], Rates]] = {
    "steady_0.8": _stationary(0.8),
    "steady_1.2": _stationary(1.2),
    "zipf_0.8": _stationary(0.8),
    "zipf_1.2": _stationary(1.2),
    "bursts": _bursts,
    "drift": _drift,
    "topics": _topics,
}
"""Name to the function that draws each expert's share of a step, [T, L, E]."""


def counts_from_csv(path: Path) -> NDArray[np.int64]:
    """Counts from a table with columns ``batch``, ``layer`` and ``e0`` ... in which every batch has the same layers.

    Raises:
        ConfigError: the file cannot be read, a column is missing, or a batch lacks a layer.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as lines:
            table = list(csv.DictReader(lines))
        experts = sum(name[:1] == "e" and name[1:].isdigit() for name in table[0])
        batches = sorted({int(line["batch"]) for line in table})
        layers = sorted({int(line["layer"]) for line in table})
        rows = np.full((len(batches), len(layers), experts), -1, np.int64)
        for line in table:
            at = batches.index(int(line["batch"])), layers.index(int(line["layer"]))
            rows[at] = [int(line[f"e{e}"]) for e in range(experts)]
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a table of counts with columns batch, layer, e0, e1 ...: {error!r}"
        ) from error
    try:
        check_rows(rows)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; a batch may lack a layer") from error
    return rows
