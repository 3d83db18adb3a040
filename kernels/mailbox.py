"""Messages between the processes of one host, in memory that they share: one ring of bytes for each ordered pair.

    at ring + 0          produced: bytes ever written, by the sender alone
    at ring + 128        consumed: bytes ever read, by the receiver alone
    at ring + 256        capacity bytes; byte number n lies at n % capacity

A message is a header of four numbers and a payload, each padded to UNIT bytes, so that a header never wraps. The sender
copies, then releases ``produced``; the receiver acquires it, copies, then releases ``consumed``. A payload larger than
the ring passes in pieces. Every rank pushes and pulls in one loop, so that full rings cannot lock each other.

Addresses are plain integers: whoever calls keeps the memory mapped and the tensors alive.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ._numba import cgutils, compiled, inner, intrinsic, types

LINE = 128
"""Bytes between numbers that different processes write: two cache lines, which processors fetch together."""
UNIT = 32
"""Messages begin at multiples of this many bytes."""
_HEADER_WORDS = 4
RING_OVERHEAD = 2 * LINE
_PIECE = 64 << 10  # bytes after which the other side is told, so that both copy at the same time
_LOADS_BEFORE_CLOCK = (
    64  # loads in vain before the clock is asked and the processor is offered to others
)

_COLUMNS = 18
"""int64 of private state for each peer, in this order."""
(_OUT_RING, _IN_RING, _PRODUCED, _CONSUMED) = range(4)
(_OUT_HEADER, _IN_HEADER) = (4, 8)
(_OUT_FROM, _OUT_LEFT, _IN_TO, _IN_LEFT, _OUT_PENDING, _IN_PENDING) = range(12, 18)

WAITING, DONE, CLOSED = 0, 1, 2
"""What ``progress`` returns: time is up; all is done; the caller's own status word is not OPEN any more."""
OPEN = 1

_WORD = ir.IntType(64)
_INT = ir.IntType(32)
_CLOCK_MONOTONIC = 1


def _load_acquire(typing: Any, address: Any) -> Any:
    del typing, address

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        del context, signature
        return b.load_atomic(b.inttoptr(args[0], _WORD.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


load_acquire: Any = intrinsic(_load_acquire)
"""The int64 at an address; what its writer wrote before releasing it is visible afterwards."""


def _store_release(typing: Any, address: Any, value: Any) -> Any:
    del typing, address, value

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        del signature
        b.store_atomic(args[1], b.inttoptr(args[0], _WORD.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


store_release: Any = intrinsic(_store_release)
"""Write the int64 at an address, after everything that was written before."""


def _copy_bytes(typing: Any, target: Any, source: Any, number: Any) -> Any:
    del typing, target, source, number

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        del signature
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(b, b.inttoptr(args[0], byte), b.inttoptr(args[1], byte), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


_copy: Any = intrinsic(_copy_bytes)


def _clock(typing: Any) -> Any:
    del typing

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        del context, signature, args
        timespec = ir.LiteralStructType((_WORD, _WORD))
        spot = cgutils.alloca_once(b, timespec)
        kind = ir.FunctionType(_INT, [_INT, timespec.as_pointer()])
        function = cgutils.get_or_insert_function(b.module, kind, "clock_gettime")
        b.call(function, [ir.Constant(_INT, _CLOCK_MONOTONIC), spot])
        seconds, rest = (b.load(cgutils.gep_inbounds(b, spot, 0, part)) for part in (0, 1))
        return b.add(b.mul(seconds, ir.Constant(_WORD, 1_000_000_000)), rest)

    return types.int64(), generate


_now_ns: Any = intrinsic(_clock)


def _system_call(name: str, *arguments: int) -> Any:
    """An intrinsic that calls a function of the C library with these int32."""

    def typed(typing: Any) -> Any:
        del typing

        def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
            del signature, args
            kind = ir.FunctionType(_INT, [_INT] * len(arguments))
            function = cgutils.get_or_insert_function(b.module, kind, name)
            b.call(function, [ir.Constant(_INT, argument) for argument in arguments])
            return context.get_dummy_value()

        return types.void(), generate

    return intrinsic(typed)


_yield_processor: Any = _system_call("sched_yield")
_nap: Any = _system_call("usleep", 50)


@inner("int64(int64)")
def _padded(number: int) -> int:
    return (number + UNIT - 1) // UNIT * UNIT


@inner("void(int64, int64, int64, int64, int64, boolean)")
def _move(ring: int, capacity: int, start: int, address: int, number: int, outward: bool) -> None:
    """Copy ``number`` bytes at ``address`` into the ring from byte ``start`` on, or out of it."""
    offset = start % capacity
    first = min(number, capacity - offset)
    data = ring + RING_OVERHEAD
    if outward:
        _copy(data + offset, address, first)
        _copy(data, address + first, number - first)
    else:
        _copy(address, data + offset, first)
        _copy(address + first, data, number - first)


@inner("boolean(int64[:, ::1], int64, int64)")
def _push(state: NDArray[np.int64], peer: int, capacity: int) -> bool:
    """Write one piece for ``peer`` if there is room; whether anything moved."""
    if not state[peer, _OUT_PENDING] and not state[peer, _OUT_LEFT]:
        return False
    ring, produced = state[peer, _OUT_RING], state[peer, _PRODUCED]
    room = (capacity - (produced - load_acquire(ring + LINE))) // UNIT * UNIT
    if not room:
        return False
    if state[peer, _OUT_PENDING]:
        spot = ring + RING_OVERHEAD + produced % capacity
        for word in range(_HEADER_WORDS):
            store_release(spot + 8 * word, state[peer, _OUT_HEADER + word])
        state[peer, _OUT_PENDING] = 0
        produced += UNIT
        room -= UNIT
    number = min(room, state[peer, _OUT_LEFT], _PIECE)
    _move(ring, capacity, produced, state[peer, _OUT_FROM], number, True)
    state[peer, _OUT_FROM] += number
    state[peer, _OUT_LEFT] -= number
    state[peer, _PRODUCED] = produced + _padded(number)
    store_release(ring, state[peer, _PRODUCED])
    return True


@inner("boolean(int64[:, ::1], int64, int64, boolean)")
def _pull(state: NDArray[np.int64], peer: int, capacity: int, payload: bool) -> bool:
    """Read the header of ``peer``, or one piece of its payload, if it is there; whether anything moved."""
    if not (state[peer, _IN_LEFT] if payload else state[peer, _IN_PENDING]):
        return False
    ring, consumed = state[peer, _IN_RING], state[peer, _CONSUMED]
    present = load_acquire(ring) - consumed
    if not present:
        return False
    if payload:
        number = min(present, state[peer, _IN_LEFT], _PIECE)
        _move(ring, capacity, consumed, state[peer, _IN_TO], number, False)
        state[peer, _IN_TO] += number
        state[peer, _IN_LEFT] -= number
        consumed += _padded(number)
    else:
        spot = ring + RING_OVERHEAD + consumed % capacity
        for word in range(_HEADER_WORDS):
            state[peer, _IN_HEADER + word] = load_acquire(spot + 8 * word)
        state[peer, _IN_PENDING] = 0
        consumed += UNIT
    state[peer, _CONSUMED] = consumed
    store_release(ring + LINE, consumed)
    return True


@compiled
def send(
    state: NDArray[np.int64],
    rank: int,
    capacity: int,
    parts: NDArray[np.int64],
    call: int,
    row_bytes: int,
    kind: int,
) -> None:
    """Begin a call: ``parts`` [size, 2] holds an address and a number of rows for each rank.

    Writes what there is room for without waiting; ``progress`` does the rest. The header is (call, rows, row_bytes,
    kind).
    """
    for peer in range(state.shape[0]):
        if peer == rank:
            continue
        state[peer, _OUT_HEADER] = call
        state[peer, _OUT_HEADER + 1] = parts[peer, 1]
        state[peer, _OUT_HEADER + 2] = row_bytes
        state[peer, _OUT_HEADER + 3] = kind
        state[peer, _OUT_FROM] = parts[peer, 0]
        state[peer, _OUT_LEFT] = parts[peer, 1] * row_bytes
        state[peer, _OUT_PENDING] = 1
        state[peer, _IN_PENDING] = 1
        while _push(state, peer, capacity):
            pass


@compiled
def expect(state: NDArray[np.int64], rank: int, target: int) -> None:
    """Have the payloads whose headers are here written to address ``target``, in rank order without ours."""
    for peer in range(state.shape[0]):
        if peer == rank:
            continue
        state[peer, _IN_TO] = target
        state[peer, _IN_LEFT] = state[peer, _IN_HEADER + 1] * state[peer, _IN_HEADER + 2]
        target += state[peer, _IN_LEFT]


@compiled
def progress(
    state: NDArray[np.int64],
    rank: int,
    capacity: int,
    status: int,
    payload: bool,
    yield_ns: int,
    limit_ns: int,
) -> int:
    """Push and pull until every header is here or, with ``payload``, until all payloads are here and ours are written.

    Waits in three ways: by looking again, for ``yield_ns`` by offering the processor to others, then by sleeping.
    Returns DONE, or WAITING after ``limit_ns``, or CLOSED once the word at address ``status`` is not OPEN.
    """
    idle = 0
    began = 0
    while True:
        moved = False
        left = 0
        for peer in range(state.shape[0]):
            if peer == rank:
                continue
            moved |= _push(state, peer, capacity)
            moved |= _pull(state, peer, capacity, payload)
            if payload:
                left += state[peer, _IN_LEFT] + state[peer, _OUT_LEFT] + state[peer, _OUT_PENDING]
            else:
                left += state[peer, _IN_PENDING]
        if not left:
            return DONE
        idle = 0 if moved else idle + 1
        if idle < _LOADS_BEFORE_CLOCK:
            continue
        if load_acquire(status) != OPEN:
            return CLOSED
        now = _now_ns()
        began = began or now
        if now - began > limit_ns:
            return WAITING
        if now - began < yield_ns:
            _yield_processor()
        else:
            _nap()


@compiled
def write_word(address: int, value: int) -> None:
    """Release ``value`` at ``address``."""
    store_release(address, value)


@compiled
def read_word(address: int) -> int:
    """Acquire the int64 at ``address``."""
    return load_acquire(address)


def new_state(size: int, rank: int, first_ring: int, stride: int) -> NDArray[np.int64]:
    """Private state of ``rank`` towards all ``size`` ranks.

    The ring from rank s to rank d lies at address ``first_ring`` + (s * size + d) * ``stride``.
    """
    state = np.zeros((size, _COLUMNS), dtype=np.int64)
    peers = np.arange(size)
    state[:, _OUT_RING] = first_ring + (rank * size + peers) * stride
    state[:, _IN_RING] = first_ring + (peers * size + rank) * stride
    return state


def headers(state: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last header of each rank, [size, 4]; ours is meaningless."""
    return state[:, _IN_HEADER : _IN_HEADER + _HEADER_WORDS]


def waits_for(state: NDArray[np.int64], rank: int, payload: bool) -> list[int]:
    """The ranks without which ``progress`` cannot end."""
    columns = [_IN_LEFT, _OUT_LEFT, _OUT_PENDING] if payload else [_IN_PENDING]
    waiting = state[:, columns].any(axis=1)
    return [peer for peer in np.flatnonzero(waiting).tolist() if peer != rank]


def warm_up() -> None:
    """Compile everything, so that no rank does so while others wait for it."""
    state, word = np.zeros((1, _COLUMNS), dtype=np.int64), np.zeros(1, dtype=np.int64)
    write_word(word.ctypes.data, read_word(word.ctypes.data))
    send(state, 0, UNIT, np.zeros((1, 2), dtype=np.int64), 0, 0, 0)
    expect(state, 0, 0)
    progress(state, 0, UNIT, word.ctypes.data, True, 0, 0)
