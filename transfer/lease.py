"""Who may still read what: the leases a holder has granted, on the holder's own clock.

    grant ---> Held --- release (reader has it) ----> Gone     the blocks and the slot come back
                |------ revoke  (request cancelled) -> Gone     exactly once, as the Held that
                `------ expire  (time is up) --------> Gone     each of the three returns

Gone is for ever: ids are never used again, so a late or doubled message finds Gone and frees nothing.
A confirm changes nothing. After ``expires_at`` the answer is Gone even before ``expire`` has swept the lease.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import IntegrityError, InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A lease alive: it owns ``blocks`` and ``slot`` until ``expires_at`` (seconds of the holder's clock)."""

    lease_id: str
    request_id: str
    generation: int
    blocks: tuple[int, ...]
    slot: int
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """No such lease (any more); ``reason`` is for people."""

    reason: str


LeaseState = Held | Gone


class LeaseTable:
    """The leases of one rank. ``now`` is any clock of the holder that does not run backwards."""

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.granted = self.released = self.revoked = self.expired = 0
        self._held: dict[str, Held] = {}

    @property
    def held(self) -> tuple[Held, ...]:
        """Leases not freed yet, oldest first."""
        return tuple(self._held.values())

    def grant(
        self,
        request_id: str,
        generation: int,
        blocks: Sequence[int],
        slot: int,
        now: float,
        lease_s: float,
    ) -> Held:
        """Hold ``blocks`` and ``slot`` for one reader of (request, generation) during ``lease_s`` seconds.

        Raises InvalidRequestError when that very (request, generation) is held already.
        """
        if any(
            (held.request_id, held.generation) == (request_id, generation) for held in self.held
        ):
            raise InvalidRequestError(
                f"request_id = {request_id!r} generation {generation} is already offered: "
                "give every request an id of its own"
            )
        self.granted += 1
        lease_id = f"{self.incarnation}/{self.granted}"
        self._held[lease_id] = Held(
            lease_id=lease_id,
            request_id=request_id,
            generation=generation,
            blocks=tuple(blocks),
            slot=slot,
            expires_at=now + lease_s,
        )
        return self._held[lease_id]

    def confirm(
        self, lease_id: str, incarnation: str, request_id: str, generation: int, now: float
    ) -> LeaseState:
        """Held when exactly this lease is alive at ``now``, else Gone. Changes nothing."""
        if incarnation != self.incarnation:
            return Gone(reason=f"the holder is incarnation {self.incarnation}, not {incarnation}")
        held = self._held.get(lease_id)
        if held is None:
            return Gone(reason="released, expired or never granted")
        if (held.request_id, held.generation) != (request_id, generation):
            return Gone(reason=f"the lease is for {held.request_id!r} generation {held.generation}")
        if now >= held.expires_at:
            return Gone(reason=f"expired {now - held.expires_at:.3f} s ago")
        return held

    def release(
        self, lease_id: str, incarnation: str, request_id: str, generation: int
    ) -> Held | None:
        """The reader is done: the freed lease, or None for a message that is late, doubled or of another lease."""
        held = self._held.get(lease_id)
        if held is None or (incarnation, request_id, generation) != (
            self.incarnation,
            held.request_id,
            held.generation,
        ):
            return None
        self.released += 1
        return self._held.pop(lease_id)

    def revoke(self, request_id: str) -> list[Held]:
        """The request is cancelled: free what is held for it, whatever the generation."""
        freed = self._take([held for held in self.held if held.request_id == request_id])
        self.revoked += len(freed)
        return freed

    def expire(self, now: float) -> list[Held]:
        """Free every lease whose time is up."""
        freed = self._take([held for held in self.held if now >= held.expires_at])
        self.expired += len(freed)
        return freed

    def check_integrity(self) -> None:
        """Raise IntegrityError when grants and endings do not add up or two leases own one slot."""
        ended = self.released + self.revoked + self.expired
        if self.granted != ended + len(self._held):
            raise IntegrityError(
                f"{self.granted} leases granted, {ended} ended, {len(self._held)} held"
            )
        slots = [held.slot for held in self.held]
        if len(slots) != len(set(slots)):
            raise IntegrityError(f"leases share a slot: {sorted(slots)}")

    def _take(self, leases: list[Held]) -> list[Held]:
        for held in leases:
            del self._held[held.lease_id]
        return leases
