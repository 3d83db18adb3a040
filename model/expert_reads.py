"""Reading expert weights from the other ranks into staging rows: a few reads at a time, never faster than the cap.

add --> waiting --the cap allows--> reading --all pieces--> checksum right --> complete
           ^                                                     | wrong, or a read failed
           `------------------- at most TRIES -------------------'  then advance raises, and everything is dropped
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..transfer.backend import Read, TransferBackend
from ..transfer.errors import CorruptBlockError, TransferError
from ..transfer.layout import BlockSection, CacheLayout
from ..transfer.plan import Copy
from .expert_plan import Move
from .expert_store import ExpertStore

TRIES = 3
"""How often one expert is read before its move fails."""
PIECE_BYTES = 1 << 20
"""Most bytes of one read: where reading is copying, nothing else happens on the loop meanwhile."""
BURST_S = 0.05
"""What the cap allows in this time may be read at once after a pause."""
SLICE_S = 0.001
"""About how long one ``advance`` may take."""
_MAX_READING = 8
SLOT_BYTES = 64
"""Experts have no slots; a backend wants to expose some."""


def expert_layout(fingerprint: str, expert_bytes: int) -> CacheLayout:
    """An arena of experts as a transport knows it: one block an expert."""
    return CacheLayout(
        model_fingerprint=fingerprint,
        kv_format="experts",
        block_tokens=1,
        block_bytes=expert_bytes,
        sections=(
            BlockSection(name="expert", offset=0, entry_bytes=expert_bytes, tokens_per_entry=1),
        ),
        slot_bytes=SLOT_BYTES,
        window=0,
        ring_rows=0,
        keep=0,
    )


class TokenBucket:
    """At most ``rate`` bytes a second, ``burst`` of them at once. ``now`` in seconds of any steady clock."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._filled = now
        self._left = burst

    def take(self, num_bytes: int, now: float) -> bool:
        """Whether ``num_bytes`` may move now; more than the burst may once the bucket is full, and are owed then."""
        self._left = min(self._burst, self._left + self._rate * (now - self._filled))
        self._filled = now
        if self._left < min(num_bytes, self._burst):
            return False
        self._left -= num_bytes
        return True


@dataclass(slots=True, eq=False)
class Fetch:
    """One expert on its way into ``staging`` (index of a staging row)."""

    layer: int
    move: Move
    staging: int
    checksum: int
    done_bytes: int = 0
    tries: int = 1
    read: Read | None = None
    broken: Read | None = None
    """A read that failed and may still be writing: the next try waits for it."""


class ExpertReads:
    """Fetches of one rank. ``peers`` are the names of the instance's ranks in the backend, in rank order.

    ``rate`` in bytes a second, by ``timer``.
    """

    def __init__(
        self,
        store: ExpertStore,
        backend: TransferBackend,
        peers: Sequence[str],
        rate: float,
        timer: Callable[[], float],
    ) -> None:
        self._store = store
        self._backend = backend
        self._peers = peers
        self._piece = min(store.expert_bytes, PIECE_BYTES)
        self._timer = timer
        self._bucket = TokenBucket(rate, max(self._piece, rate * BURST_S), timer())
        self._fetches: list[Fetch] = []
        self._dropped: list[Read] = []
        self.moved_bytes = 0

    @property
    def is_quiet(self) -> bool:
        """Whether no read can write any more into a staging row."""
        return not self._fetches and not self._dropped

    def add(self, fetch: Fetch) -> None:
        """Begin with the next ``advance``."""
        self._fetches.append(fetch)

    def advance(self) -> list[Fetch]:
        """Read on for about SLICE_S seconds; returns what is complete and right.

        Raises TransferError, CorruptBlockError among them, when an expert could not be read in TRIES tries; what is
        complete is not told then, and all fetches must be dropped.
        """
        self._backend.receive()
        self._dropped = [read for read in self._dropped if not read.quiet()]
        complete: list[Fetch] = []
        began = self._timer()
        going = True
        while going and self._timer() - began < SLICE_S:
            going = False
            for fetch in self._fetches[:_MAX_READING]:
                going |= self._advance(fetch)
                if fetch.done_bytes == self._store.expert_bytes:
                    complete.append(fetch)
            self._fetches = [fetch for fetch in self._fetches if fetch not in complete]
        return complete

    def drop(self) -> None:
        """Forget all fetches; what is still writing is waited for."""
        reads = [read for fetch in self._fetches for read in (fetch.read, fetch.broken)]
        self._dropped += [read for read in reads if read is not None]
        self._fetches.clear()

    def _advance(self, fetch: Fetch) -> bool:
        """Whether anything was done for the fetch."""
        size = min(self._piece, self._store.expert_bytes - fetch.done_bytes)
        try:
            if fetch.broken is not None:
                if not fetch.broken.quiet():
                    return False
                fetch.broken = None
            if fetch.read is None:
                if not self._bucket.take(size, self._timer()):
                    return False
                fetch.read = self._start(fetch, size)
            if not fetch.read.poll():
                return False
            fetch.read = None
            fetch.done_bytes += size
            self.moved_bytes += size
            if fetch.done_bytes == self._store.expert_bytes:
                self._check(fetch)
        except TransferError:
            if fetch.tries == TRIES:
                raise
            fetch.tries += 1
            fetch.read, fetch.broken = None, fetch.read or fetch.broken
            fetch.done_bytes = 0
        return True

    def _start(self, fetch: Fetch, size: int) -> Read:
        width = self._store.expert_bytes
        source = self._store.row_of(fetch.layer, fetch.move.source_slot) * width
        target = self._store.staging_row(fetch.staging) * width
        at = fetch.done_bytes
        copy = Copy("blocks", source + at, target + at, size)
        return self._backend.start_read(self._peers[fetch.move.source_rank], [copy])

    def _check(self, fetch: Fetch) -> None:
        found = self._store.checksum(self._store.staging_row(fetch.staging))
        if found != fetch.checksum:
            peer = self._peers[fetch.move.source_rank]
            raise CorruptBlockError(
                f"layer {fetch.layer}, expert {fetch.move.expert} from {peer}: checksum {found:#x}, expected"
                f" {fetch.checksum:#x}"
            )
