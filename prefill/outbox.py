"""Finished prompts on offer: what their readers may still read, until they release it or the lease ends.

    offer --> Held (blocks and slot stay as they are) --- ReleaseLease | cancel | expiry ---> back in the pools

Blocks and slot of an offer change owner twice and no more: from the rank to the lease table in ``offer``, and from
there to the pools. A reader that comes later is told LeaseGone and throws away what it read.
"""

from collections.abc import Sequence

from ..model.cache import Cache, IdPool
from ..transfer.backend import TransferBackend
from ..transfer.checksum import block_checksums, slot_checksum, tail_checksum
from ..transfer.codec import decode, encode
from ..transfer.errors import MessageError, PeerLostError
from ..transfer.lease import Held, LeaseTable
from ..transfer.messages import ConfirmLease, Handoff, LeaseAlive, LeaseGone, ReleaseLease
from .prefix import PrefixPool


class Outbox:
    """Offers handoffs of one rank and answers their readers. ``now`` is the holder's monotonic clock in seconds."""

    def __init__(
        self,
        backend: TransferBackend,
        cache: Cache,
        block_pool: PrefixPool,
        slot_pool: IdPool,
        lease_s: float,
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._block_pool = block_pool
        self._slot_pool = slot_pool
        self._lease_s = lease_s
        self._generation = 0
        self._leases = LeaseTable(backend.incarnation)
        self.bad_messages = 0

    @property
    def held(self) -> tuple[Held, ...]:
        """Offers that still own their blocks and slot."""
        return self._leases.held

    def offer(
        self,
        request_id: str,
        num_tokens: int,
        blocks: Sequence[int],
        slot: int,
        tail_start: int,
        now: float,
    ) -> Handoff:
        """Take over ``blocks`` and ``slot``, which hold ``num_tokens`` cached tokens, and offer them to a reader.

        The decoder layers begin at token ``tail_start``, if they have not run here, from the tail of ``slot``.
        """
        layout = self._cache.layout
        self._generation += 1
        held = self._leases.grant(request_id, self._generation, blocks, slot, now, self._lease_s)
        return Handoff(
            request_id=request_id,
            generation=held.generation,
            holder=self._backend.name,
            incarnation=self._backend.incarnation,
            lease_id=held.lease_id,
            lease_s=self._lease_s,
            layout_fingerprint=layout.fingerprint(),
            num_tokens=num_tokens,
            blocks=held.blocks,
            slot=slot,
            block_checksums=tuple(
                block_checksums(layout, self._cache.blocks, held.blocks, num_tokens)
            ),
            slot_checksum=slot_checksum(layout, self._cache.slots, slot),
            tail_start=tail_start,
            tail=slot if layout.tail_row_bytes else 0,
            tail_checksum=self._tail_checksum(slot, num_tokens - tail_start),
        )

    def poll(self, now: float) -> None:
        """Free what has expired, answer what has been asked. Cheap; never raises for what a peer does."""
        self._free(self._leases.expire(now))
        for peer, data in self._backend.receive():
            try:
                message = decode(data)
            except MessageError:
                self.bad_messages += 1
                continue
            match message:
                case ConfirmLease():
                    self._answer(peer, message, now)
                case ReleaseLease():
                    freed = self._leases.release(
                        message.lease_id,
                        message.incarnation,
                        message.request_id,
                        message.generation,
                    )
                    self._free([freed] if freed else [])
                case _:
                    self.bad_messages += 1

    def cancel(self, request_id: str) -> None:
        """Withdraw every offer of a request. A read under way ends in LeaseGone."""
        self._free(self._leases.revoke(request_id))

    def check_integrity(self) -> None:
        """Raise IntegrityError when the books of the lease table do not balance."""
        self._leases.check_integrity()

    def stats(self) -> dict[str, int]:
        """Counts of leases since the start, and of those alive."""
        leases = self._leases
        return {
            "offered": len(leases.held),
            "leases_granted": leases.granted,
            "leases_released": leases.released,
            "leases_revoked": leases.revoked,
            "leases_expired": leases.expired,
            "bad_messages": self.bad_messages,
        }

    def _answer(self, peer: str, question: ConfirmLease, now: float) -> None:
        state = self._leases.confirm(
            question.lease_id,
            question.incarnation,
            question.request_id,
            question.generation,
            now,
        )
        if isinstance(state, Held):
            answer = LeaseAlive(lease_id=question.lease_id, nonce=question.nonce)
        else:
            answer = LeaseGone(
                lease_id=question.lease_id, nonce=question.nonce, reason=state.reason[:256]
            )
        try:
            self._backend.send(peer, encode(answer))
        except PeerLostError:
            return  # nobody is left to read; the lease ends by itself

    def _tail_checksum(self, tail: int, num_rows: int) -> int:
        layout = self._cache.layout
        if not layout.tail_row_bytes:
            return 0
        return tail_checksum(layout, self._cache.tails, tail, num_rows)

    def _free(self, leases: Sequence[Held]) -> None:
        for held in leases:
            self._block_pool.give(held.blocks)
            self._slot_pool.give([held.slot])
