"""Expert exchange between processes of one host, through memory that they share (``kernels/mailbox``).

    | status word of each rank | rings of the rows, one a pair of ranks | rings of the gathers |

The memory is an anonymous file of rank 0, which the others open by its number while they join: it has no name that
could stay behind, and goes with its last process. Each rank locks one byte of the file. The system drops the lock when
the process ends, however it ends, which is how the others notice.
"""

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import mailbox
from ..transfer.errors import RankError
from .parallel import Arrival

MAILBOX_BYTES = 256 << 10
_GATHER_BYTES = 4 << 10
_YIELD_NS = 1_000_000  # then sleep between looks
_SLICE_NS = 50_000_000  # then look whether the others live
_JOIN_POLL_S = 0.001
_LEFT = 2  # status word of a rank that closed or failed; 0 is one that has not come yet
_DTYPES = (
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES)}
_FLOAT64 = _DTYPE_NUMBER[torch.float64]


class SharedMemoryExchange:
    """One rank of an instance of this host, which meets the others over ``store``.

    A pair of ranks has ``mailbox_bytes`` each way, a multiple of 128; more than that passes in pieces. Raises RankError
    when the ranks do not meet within ``timeout_s``; later when one does not come to a call within that time, ends,
    leaves, or makes another call. After such an error every call fails, here and on the other ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        mailbox_bytes: int = MAILBOX_BYTES,
    ) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._failure = ""
        self._started = False
        mailbox.warm_up()
        rows_at = size * mailbox.LINE
        gathers_at = rows_at + size * size * (mailbox.RING_OVERHEAD + mailbox_bytes)
        total = gathers_at + size * size * (mailbox.RING_OVERHEAD + _GATHER_BYTES)
        self._file = _open_file(store, rank, total)
        try:
            # the array keeps the mapping for as long as any thread uses it; nobody unmaps
            self._memory = np.frombuffer(mmap.mmap(self._file, total), dtype=np.uint8)
            base = self._memory.ctypes.data
            self._status = base
            self._rows = _Channel(rank, size, base + rows_at, mailbox_bytes)
            self._gathers = _Channel(rank, size, base + gathers_at, _GATHER_BYTES)
            self._be(mailbox.OPEN)
            self._wait_for_all()
        except BaseException:
            self.close()
            raise

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        ours = np.array(values, dtype=np.float64)
        channel = self._gathers
        self._require_open()
        channel.send([(ours.ctypes.data, 1)] * self.size, ours.nbytes, _FLOAT64)
        self._progress(channel, payload=False)
        self._check(channel)
        received = np.empty((self.size - 1, ours.size))
        channel.expect(received.ctypes.data)
        self._progress(channel, payload=True)
        everything = received.tolist()
        everything.insert(self.rank, ours.tolist())
        return everything

    def start(self, parts: Sequence[Tensor]) -> Arrival:
        self._require_open()
        assert not self._started, "the arrival of the last start was not waited for"
        dtype = parts[0].dtype
        number = _DTYPE_NUMBER.get(dtype)
        if len(parts) != self.size or number is None:
            raise ValueError(f"{len(parts)} parts of {dtype} for {self.size} ranks")
        width = parts[0].shape[-1] if parts[0].dim() else 0
        for part in parts:
            if part.dtype != dtype or part.dim() != 2 or part.shape[1] != width or not part.is_cpu:
                kinds = ", ".join(f"{p.dtype} {list(p.shape)} on {p.device}" for p in parts)
                raise ValueError(
                    f"parts must be [n, C] on the CPU, of one dtype and width: {kinds}"
                )
        kept = [part.contiguous() for part in parts]
        self._started = True
        spots = [(part.data_ptr(), part.shape[0]) for part in kept]
        self._rows.send(spots, width * dtype.itemsize, number)
        return _SharedArrival(self, kept)

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return self.start(parts).wait()

    def finish(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """What the others sent in the call that was started with ``parts``; our own part is returned as it is."""
        channel, own = self._rows, parts[self.rank]
        self._progress(channel, payload=False)
        counts = self._check(channel)
        buffer = torch.empty((sum(counts), own.shape[1]), dtype=own.dtype)
        channel.expect(buffer.data_ptr())
        self._progress(channel, payload=True)
        self._started = False
        received = list(buffer.split(counts))
        received[self.rank] = own
        return received

    def close(self) -> None:
        if self._file < 0:
            return
        self._failure = self._failure or f"rank {self.rank} left its instance"
        if hasattr(self, "_memory"):
            self._be(_LEFT)
        file, self._file = self._file, -1
        os.close(file)

    def _be(self, status: int) -> None:
        mailbox.write_word(self._status + self.rank * mailbox.LINE, status)

    def _status_of(self, rank: int) -> int:
        return mailbox.read_word(self._status + rank * mailbox.LINE)

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            missing = [r for r in range(self.size) if self._status_of(r) != mailbox.OPEN]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise RankError(
                    f"rank {self.rank} of {self.size} could not join its instance: rank {missing[0]} did not attach "
                    f"to the shared memory within {self._timeout_s:g} s"
                )
            time.sleep(_JOIN_POLL_S)

    def _require_open(self) -> None:
        if self._failure:
            raise RankError(self._failure)

    def _fail(self, message: str) -> None:
        """Fail for good, and make the others notice."""
        self._failure = message
        self._be(_LEFT)
        raise RankError(message)

    def _progress(self, channel: "_Channel", *, payload: bool) -> None:
        if channel.progress(self._status, payload, _YIELD_NS, _SLICE_NS) == mailbox.DONE:
            return
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._require_open()
            late = channel.waits_for(payload)
            gone = {r: cause for r in late if (cause := self._cause_of_loss(r))}
            # what a rank wrote before it went is there by now
            limit = 0 if gone else _SLICE_NS
            if channel.progress(self._status, payload, 0, limit) == mailbox.DONE:
                return
            if gone:
                known = ", ".join(f"rank {r} {cause}" for r, cause in gone.items())
                self._fail(f"rank {self.rank}: another rank of the instance is lost: {known}")
            if time.monotonic() > deadline:
                self._fail(
                    f"rank {self.rank}: rank {late[0]} did not come in time: {self._timeout_s:g} s; it is alive but "
                    "is not in the same call"
                )

    def _cause_of_loss(self, peer: int) -> str:
        """Why nothing more will come from ``peer``; empty while it lives."""
        if self._status_of(peer) == _LEFT:
            return "left"
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, peer)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return ""
            self._require_open()
            raise
        return "ended: its process is gone"

    def _check(self, channel: "_Channel") -> list[int]:
        """Rows from each rank, 0 from ourselves, of headers that belong to our own call."""
        counts: list[int] = []
        for peer, (call, rows, row_bytes, kind) in enumerate(channel.headers()):
            if peer == self.rank:
                counts.append(0)
                continue
            if (call, row_bytes, kind) != channel.ours:
                self._fail(
                    f"rank {self.rank}: call {channel.ours[0]} has rows of {_described(channel.ours)}, but rank {peer} "
                    f"is in call {call} with rows of {_described((call, row_bytes, kind))}: all ranks must make the "
                    "same calls"
                )
            counts.append(rows)
        return counts


class _SharedArrival:
    """A call whose rows are under way; ``parts`` must live until it ends."""

    def __init__(self, exchange: SharedMemoryExchange, parts: Sequence[Tensor]) -> None:
        self._exchange, self._parts = exchange, parts

    def wait(self) -> list[Tensor]:
        return self._exchange.finish(self._parts)


class _Channel:
    """Our ends of the rings of one kind, and the call that they carry."""

    def __init__(self, rank: int, size: int, first: int, capacity: int) -> None:
        self._rank, self._capacity = rank, capacity
        stride = mailbox.RING_OVERHEAD + capacity
        self._state: NDArray[np.int64] = mailbox.new_state(size, rank, first, stride)
        self.ours = (0, 0, 0)

    def send(self, parts: list[tuple[int, int]], row_bytes: int, kind: int) -> None:
        call = self.ours[0] + 1
        self.ours = (call, row_bytes, kind)
        spots = np.array(parts, dtype=np.int64)
        mailbox.send(self._state, self._rank, self._capacity, spots, call, row_bytes, kind)

    def headers(self) -> list[list[int]]:
        return mailbox.headers(self._state).tolist()

    def expect(self, target: int) -> None:
        mailbox.expect(self._state, self._rank, target)

    def progress(self, status: int, payload: bool, yield_ns: int, limit_ns: int) -> int:
        own = status + self._rank * mailbox.LINE
        return mailbox.progress(
            self._state, self._rank, self._capacity, own, payload, yield_ns, limit_ns
        )

    def waits_for(self, payload: bool) -> list[int]:
        return mailbox.waits_for(self._state, self._rank, payload)


def _described(header: tuple[int, int, int]) -> str:
    _, row_bytes, kind = header
    return f"{row_bytes} bytes of {_DTYPES[kind]}"


def _open_file(store: dist.Store, rank: int, size_bytes: int) -> int:
    """The file of rank 0, with byte ``rank`` of it locked by us."""
    if rank == 0:
        file = os.memfd_create("headrace-exchange", os.MFD_CLOEXEC)
        os.ftruncate(file, size_bytes)
        path = f"/proc/{os.getpid()}/fd/{file}"
    else:
        path = store.get("shared_memory").decode()
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RankError(
                f"rank {rank} could not open the shared memory of rank 0, {path}: {error}; if its process is alive, "
                "take the exchange 'gloo'"
            ) from error
    try:
        if os.fstat(file).st_size != size_bytes:
            raise RankError(f"the shared memory of rank 0, {path}, is not {size_bytes} bytes long")
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        if rank == 0:
            store.set("shared_memory", path)
    except BaseException:
        os.close(file)
        raise
    return file
