"""Do the copies stay inside both arenas, and at which addresses do they lie? Checked before a transport sees any.

A handoff may have thousands of copies, so they are put into one table, int64 [num_copies, 4]: source offset, target
offset, bytes, arena (its place in ``plan.ARENAS``).
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .errors import IntegrityError, TransferError
from .plan import ARENAS, Arena, Copy

Table = NDArray[np.int64]


def require_copies_fit(
    peer: str,
    copies: Sequence[Copy],
    source_bytes: Mapping[Arena, int],
    target_bytes: Mapping[Arena, int],
) -> None:
    """Raise TransferError for a copy outside the peer's arena, IntegrityError for one outside ours.

    ``source_bytes`` and ``target_bytes`` are the sizes of the arenas of the peer and of ourselves.
    """
    for copy in copies:
        source_end = copy.source_offset + copy.num_bytes
        if copy.num_bytes < 1 or copy.source_offset < 0 or source_end > source_bytes[copy.arena]:
            raise TransferError(
                f"{copy} lies outside the {source_bytes[copy.arena]} bytes of {copy.arena} that "
                f"peer {peer} has"
            )
        target_end = copy.target_offset + copy.num_bytes
        if copy.target_offset < 0 or target_end > target_bytes[copy.arena]:
            raise IntegrityError(
                f"{copy} lies outside our own {target_bytes[copy.arena]} bytes of {copy.arena}"
            )


def copy_table(copies: Sequence[Copy]) -> Table:
    """The table of the copies."""
    return np.array(
        [(c.source_offset, c.target_offset, c.num_bytes, ARENAS.index(c.arena)) for c in copies],
        dtype=np.int64,
    )


def table_fits(
    table: Table, source_bytes: Mapping[Arena, int], target_bytes: Mapping[Arena, int]
) -> bool:
    """Whether ``require_copies_fit`` would let every row pass."""
    offsets, sizes = table[:, :2], table[:, 2]
    ends = offsets + sizes[:, None]
    limits = np.array(
        [[sizes[arena] for arena in ARENAS] for sizes in (source_bytes, target_bytes)],
        dtype=np.int64,
    )
    room = limits[:, table[:, 3]].T
    return bool((sizes > 0).all() and (offsets >= 0).all() and (ends <= room).all())


def descriptors(
    table: Table, source_base: Mapping[Arena, int], target_base: Mapping[Arena, int]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """(target, source) descriptors for NIXL: uint64 [num_copies, 3] of address, bytes, device 0."""
    found: list[NDArray[np.uint64]] = []
    for column, base in ((1, target_base), (0, source_base)):
        bases = np.array([base[arena] for arena in ARENAS], dtype=np.uint64)
        rows = np.zeros((len(table), 3), dtype=np.uint64)
        rows[:, 0] = table[:, column].astype(np.uint64) + bases[table[:, 3]]
        rows[:, 1] = table[:, 2]
        found.append(rows)
    return found[0], found[1]
