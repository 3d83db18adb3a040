"""Where rows go: the exchange plan of one layer.

choices of our rows      -> replicas   the j-th row that wants expert e takes replica (j + our rank) % copies of it
(row, rank) that occur   -> lines      a row travels once to a rank, whatever it wants there
(row, choice)            -> entries    of the row's line; outputs come back in the order of lines and entries
"""

import numpy as np

from ._numba import inner


@inner()
def make_plan(
    ids: np.ndarray,
    rank: int,
    first: np.ndarray,
    replicas: np.ndarray,
    plan: np.ndarray,
    sizes: np.ndarray,
) -> None:
    """Fill ``plan`` [4, T, k] and ``sizes`` [2, R] for the choices ``ids`` [T, k] of our rows.

    ``plan``: slot there; line among all that we send; entry in that line; place of the output among all that come
    back. ``sizes``: lines to every rank, and entries in them. Replicas of expert e, ``replicas`` [2, n] being rank and
    slot, are numbers ``first[e]`` to ``first[e + 1] - 1``.
    """
    rows, choices = ids.shape
    size = sizes.shape[1]
    slot, line, entry, place = plan[0], plan[1], plan[2], plan[3]
    lines, entries = sizes[0], sizes[1]
    seen = np.zeros(first.shape[0] - 1, np.int64)
    last = np.full(size, -1, np.int64)
    to_rank = np.empty((rows, choices), np.int64)
    lines[:] = 0
    entries[:] = 0
    for t in range(rows):
        for c in range(choices):
            expert = ids[t, c]
            copies = first[expert + 1] - first[expert]
            replica = first[expert] + (seen[expert] + rank) % copies
            seen[expert] += 1
            to = replicas[0, replica]
            to_rank[t, c] = to
            slot[t, c] = replicas[1, replica]
            if last[to] != t:
                last[to] = t
                lines[to] += 1
            entries[to] += 1
    next_line, next_place = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for r in range(1, size):
        next_line[r] = next_line[r - 1] + lines[r - 1]
        next_place[r] = next_place[r - 1] + entries[r - 1]
    filled = np.zeros(size, np.int64)
    last[:] = -1
    for t in range(rows):
        for c in range(choices):
            to = to_rank[t, c]
            if last[to] != t:
                last[to] = t
                filled[to] = 0
                next_line[to] += 1
            line[t, c] = next_line[to] - 1
            entry[t, c] = filled[to]
            filled[to] += 1
            place[t, c] = next_place[to]
            next_place[to] += 1
