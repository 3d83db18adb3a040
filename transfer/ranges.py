"""Do the copies stay inside both arenas? Checked before any transport sees an address."""

from collections.abc import Mapping, Sequence

from .errors import IntegrityError, TransferError
from .plan import Arena, Copy


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
