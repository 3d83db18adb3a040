"""Local search for the placement of experts over ranks (cluster/eplb).

One layer. Shapes: R ranks, S slots a rank, E experts, T steps. Loads are int32 in a unit that the caller chooses so
that all of them together stay below 2**30: sums are exact, in any order, and vectorise.

    x      float32 [E, T]  load of an expert
    share  int32 [E, T]    load of one copy of it, x / copies rounded
    load   int32 [R, T]    load of a rank, the sum of the shares of what it holds
    top    int32 [3, T]    the three highest loads of a step

The cost of a placement is the sum over steps of ``top[0]``, plus ``fill_cost`` for every slot whose expert the rank did
not hold before (``had``), plus ``away[e]`` for every domain in which expert e has no copy.
"""

import numpy as np

from ._numba import Scalar, compiled, inner

__all__ = ["improve", "place", "refresh"]


@inner()
def _next(state: np.ndarray, bound: int) -> Scalar:
    """A number from 0 to ``bound`` - 1 (xorshift64)."""
    s = state[0]
    s ^= s << np.uint64(13)
    s ^= s >> np.uint64(7)
    s ^= s << np.uint64(17)
    state[0] = s
    return np.int64((s >> np.uint64(33)) % np.uint64(bound))


@inner()
def _rank_peaks(load: np.ndarray, top: np.ndarray) -> Scalar:
    """The three highest loads of every step, ties counted; returns the sum of the highest."""
    top[:] = np.int32(-1)
    first, second, third = top[0], top[1], top[2]
    for r in range(load.shape[0]):
        row = load[r]
        for t in range(row.shape[0]):
            v, a, b = row[t], first[t], second[t]
            third[t] = max(third[t], min(b, v))
            second[t] = max(b, min(a, v))
            first[t] = max(a, v)
    return _total(first)


@inner()
def _total(row: np.ndarray) -> Scalar:
    total = np.int32(0)
    for t in range(row.shape[0]):
        total = np.int32(total + row[t])
    return total


@inner()
def _swapped(
    rest: np.ndarray, one: np.ndarray, two: np.ndarray, a: np.ndarray, b: np.ndarray
) -> Scalar:
    """Sum of peaks after ``a`` goes from rank ``one`` to ``two`` and ``b`` the other way."""
    total = np.int32(0)
    for t in range(rest.shape[0]):
        d = np.int32(a[t] - b[t])
        p = max(rest[t], max(np.int32(one[t] - d), np.int32(two[t] + d)))
        total = np.int32(total + p)
    return total


@inner()
def _split(x: np.ndarray, copies: int, share: np.ndarray) -> None:
    part = np.float32(1.0) / np.float32(copies)
    for t in range(x.shape[0]):
        share[t] = np.int32(x[t] * part + np.float32(0.5))


@compiled
def refresh(
    x: np.ndarray,
    slots: np.ndarray,
    copies: np.ndarray,
    share: np.ndarray,
    held: np.ndarray,
    load: np.ndarray,
    top: np.ndarray,
) -> Scalar:
    """Fills everything from ``x`` and ``slots`` int32 [R, S] (-1 empty); returns the sum of peaks."""
    copies[:] = 0
    held[:] = False
    load[:] = 0
    for r in range(slots.shape[0]):
        for s in range(slots.shape[1]):
            if slots[r, s] >= 0:
                copies[slots[r, s]] += 1
                held[r, slots[r, s]] = True
    for e in range(x.shape[0]):
        _split(x[e], max(1, copies[e]), share[e])
    for r in range(slots.shape[0]):
        for s in range(slots.shape[1]):
            if slots[r, s] >= 0:
                row, add = load[r], share[slots[r, s]]
                for t in range(row.shape[0]):
                    row[t] += add[t]
    return _rank_peaks(load, top)


@compiled
def place(
    share: np.ndarray, order: np.ndarray, even: int, slots: np.ndarray, held: np.ndarray
) -> None:
    """Puts the copies of ``order`` one after the other where the sum of peaks grows least.

    A rank's own load counts beside it with one part in ``even``, so that ranks fill evenly; 0 leaves it out. ``slots``
    int32 [R, S] may hold experts already, first slots first, -1 behind them; ``held`` says the same. A copy that fits
    nowhere stays out: every expert's first copy fits.
    """
    ranks, size = slots.shape
    steps = share.shape[1]
    load = np.zeros((ranks, steps), np.int32)
    peak = np.zeros(steps, np.int32)
    filled = np.zeros(ranks, np.int64)
    sums = np.zeros(ranks, np.int64)
    for r in range(ranks):
        row = load[r]
        for s in range(size):
            if slots[r, s] >= 0:
                filled[r] += 1
                add = share[slots[r, s]]
                sums[r] += np.int64(_total(add))
                for t in range(steps):
                    row[t] += add[t]
        for t in range(steps):
            peak[t] = max(peak[t], row[t])
    for i in range(order.shape[0]):
        e = order[i]
        best, chosen = np.int64(1) << np.int64(62), -1
        add = share[e]
        mine = np.int64(_total(add))
        for r in range(ranks):
            if filled[r] < size and not held[r, e]:
                row = load[r]
                total = np.int32(0)
                for t in range(steps):
                    total = np.int32(total + max(peak[t], np.int32(row[t] + add[t])))
                cost = np.int64(total) * even + sums[r] if even else np.int64(total)
                if cost < best:
                    best, chosen = cost, r
        if chosen < 0:
            chosen = _make_room(e, share, slots, held, filled, load, sums)
            if chosen < 0:
                continue
        slots[chosen, filled[chosen]] = e
        filled[chosen] += 1
        held[chosen, e] = True
        sums[chosen] += mine
        row = load[chosen]
        for t in range(steps):
            row[t] += add[t]
            peak[t] = max(peak[t], row[t])


@inner()
def _make_room(
    e: int,
    share: np.ndarray,
    slots: np.ndarray,
    held: np.ndarray,
    filled: np.ndarray,
    load: np.ndarray,
    sums: np.ndarray,
) -> Scalar:
    """Every rank with room holds ``e``: moves another rank's expert to one of them; returns that other rank, or -1."""
    for r in range(slots.shape[0]):
        if filled[r] == slots.shape[1]:
            continue
        for q in range(slots.shape[0]):
            if held[q, e]:
                continue
            for s in range(filled[q]):
                g = slots[q, s]
                if held[r, g]:
                    continue
                slots[r, filled[r]] = g
                filled[r] += 1
                filled[q] -= 1
                slots[q, s] = slots[q, filled[q]]
                slots[q, filled[q]] = -1
                held[r, g], held[q, g] = True, False
                moved = np.int64(_total(share[g]))
                sums[r] += moved
                sums[q] -= moved
                for t in range(load.shape[1]):
                    load[r, t] += share[g, t]
                    load[q, t] -= share[g, t]
                return q
    return -1


@inner()
def _others(top: np.ndarray, one: np.ndarray, two: np.ndarray, rest: np.ndarray) -> None:
    """The highest load of every step among all ranks but two, whose loads are ``one`` and ``two``."""
    first, second, third = top[0], top[1], top[2]
    for t in range(rest.shape[0]):
        a, b, v = first[t], second[t], one[t]
        low = third[t] if v in (a, b) else b
        high = b if v == a else a
        rest[t] = low if two[t] == high else high


@compiled
def improve(
    x: np.ndarray,
    slots: np.ndarray,
    copies: np.ndarray,
    share: np.ndarray,
    held: np.ndarray,
    had: np.ndarray,
    fill_cost: int,
    domain: np.ndarray,
    in_domain: np.ndarray,
    away: np.ndarray,
    load: np.ndarray,
    top: np.ndarray,
    steps: int,
    trials: int,
    begin: int,
    end: int,
    every: int,
    seed: np.ndarray,
) -> Scalar:
    """``trials`` tries of swapping two slots of two ranks or of giving a slot to another expert.

    Made is the best swap of two ranks, one of them the peak of a step, if it raises the cost by less than a limit that
    goes from ``begin`` to ``end``; every ``every``-th try changes copies instead. Returns the cost's change.
    """
    ranks, size = slots.shape
    width = load.shape[1]
    rest = np.empty(width, np.int32)
    new_f, new_e = np.empty(width, np.int32), np.empty(width, np.int32)
    state = seed
    cost = np.int64(_total(top[0]))
    changed = np.int64(0)
    for trial in range(trials):
        limit = np.int64(begin) + (np.int64(end) - np.int64(begin)) * trial // trials
        t = _next(state, steps)
        one = 0
        while one < ranks - 1 and load[one, t] != top[0, t]:
            one += 1
        if every > 0 and trial % every == 0:
            s = 0
            for i in range(size):  # the expert that makes this rank the peak of the step
                e = slots[one, i]
                if e >= 0 and (slots[one, s] < 0 or share[e, t] > share[slots[one, s], t]):
                    s = i
            if trial % (2 * every) == 0:
                s = _next(state, size)
            f = np.int64(slots[one, s])
            two = _next(state, ranks)
            s = _next(state, size)
            e = np.int64(slots[two, s])
            if f < 0 or f == e or held[two, f] or (e >= 0 and copies[e] < 2):
                continue
            _split(x[f], copies[f] + 1, new_f)
            extra = np.int64(0) if had[two, f] else np.int64(fill_cost)
            if in_domain[domain[two], f] == 0:
                extra -= away[f]
            if e >= 0:
                _split(x[e], copies[e] - 1, new_e)
                if not had[two, e]:
                    extra -= fill_cost
                if in_domain[domain[two], e] == 1:
                    extra += away[e]
            rest[:] = np.int32(0)
            for r in range(ranks):
                row = load[r]
                has_f, has_e = held[r, f], e >= 0 and held[r, e]
                if r == two:
                    old = share[max(e, 0)]
                    for t in range(width):
                        rest[t] = max(
                            rest[t], np.int32(row[t] + new_f[t] - (old[t] if e >= 0 else 0))
                        )
                elif has_f and has_e:
                    for t in range(width):
                        v = np.int32(row[t] + new_f[t] - share[f, t] + new_e[t] - share[e, t])
                        rest[t] = max(rest[t], v)
                elif has_f:
                    for t in range(width):
                        rest[t] = max(rest[t], np.int32(row[t] + new_f[t] - share[f, t]))
                elif has_e:
                    for t in range(width):
                        rest[t] = max(rest[t], np.int32(row[t] + new_e[t] - share[e, t]))
                else:
                    for t in range(width):
                        rest[t] = max(rest[t], row[t])
            delta = np.int64(_total(rest)) + extra - cost
            if delta >= limit:
                continue
            for r in range(ranks):
                if held[r, f]:
                    for t in range(width):
                        load[r, t] += new_f[t] - share[f, t]
                if e >= 0 and held[r, e] and r != two:
                    for t in range(width):
                        load[r, t] += new_e[t] - share[e, t]
            for t in range(width):
                load[two, t] += new_f[t]
            if e >= 0:
                for t in range(width):
                    load[two, t] -= share[e, t]
                share[e] = new_e
                copies[e] -= 1
                held[two, e] = False
                in_domain[domain[two], e] -= 1
            share[f] = new_f
            copies[f] += 1
            held[two, f] = True
            in_domain[domain[two], f] += 1
            slots[two, s] = f
        else:
            two = _next(state, ranks)
            if two == one:
                continue
            _others(top, load[one], load[two], rest)
            best, at, to = limit, -1, -1
            row_1, row_2 = load[one], load[two]
            d1, d2 = domain[one], domain[two]
            for i in range(size):
                a = slots[one, i]
                if a < 0 or held[two, a]:
                    continue
                for j in range(size):
                    b = slots[two, j]
                    if b < 0 or held[one, b]:
                        continue
                    delta = np.int64(_swapped(rest, row_1, row_2, share[a], share[b])) - cost
                    if fill_cost:
                        delta += fill_cost * (
                            np.int64(had[one, a])
                            - np.int64(had[two, a])
                            + np.int64(had[two, b])
                            - np.int64(had[one, b])
                        )
                    if d1 != d2:
                        delta += away[a] * (
                            np.int64(in_domain[d1, a] == 1) - np.int64(in_domain[d2, a] == 0)
                        ) + away[b] * (
                            np.int64(in_domain[d2, b] == 1) - np.int64(in_domain[d1, b] == 0)
                        )
                    if delta < best:
                        best, at, to = delta, i, j
            if at < 0:
                continue
            delta = best
            a, b = slots[one, at], slots[two, to]
            slots[one, at], slots[two, to] = b, a
            held[one, a], held[two, b], held[one, b], held[two, a] = False, False, True, True
            in_domain[d1, a] -= 1
            in_domain[d2, b] -= 1
            in_domain[d2, a] += 1
            in_domain[d1, b] += 1
            for t in range(width):
                d = np.int32(share[a, t] - share[b, t])
                row_1[t] -= d
                row_2[t] += d
        changed += delta
        cost = np.int64(_rank_peaks(load, top))
    return changed
