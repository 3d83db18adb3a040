"""Order among logits without sorting: the largest, and where a prefix of the sorted row ends."""

import numpy as np

from ._numba import Scalar, inner

NUM_DIGITS = 2048
NEGATIVE_INF_KEY = np.int32(-0x7F800001)
"""The key of -inf, the smallest of all numbers."""
_INF_KEY = np.int32(0x7F800000)
_ABS = np.int32(0x7FFFFFFF)


@inner("int64(float32[::1], int32[::1])")
def peak_of(row: np.ndarray, keys: np.ndarray) -> Scalar:
    """Index of the largest of ``row``; -1 if one is no number or +inf, or all are -inf.

    ``keys`` become integers in the order of the values.
    """
    bits = row.view(np.int32)
    high, low = np.int32(-0x80000000), _ABS
    for x in range(row.shape[0]):
        key = np.int32(bits[x] ^ ((bits[x] >> np.int32(31)) & _ABS))
        key = np.int32(0) if key == np.int32(-1) else key  # -0 and 0 are one value
        keys[x] = key
        high = max(high, key)
        low = min(low, key)
    # keys of what is no number lie beyond those of the infinities
    if high >= _INF_KEY or low < NEGATIVE_INF_KEY or high == NEGATIVE_INF_KEY:
        return -1
    for x in range(row.shape[0]):
        if keys[x] == high:
            return x
    return -1


@inner("UniTuple(int64, 2)(int32[::1], int64[::1], int64, int64, int64[::1], int64[::1])")
def prefix_end(
    keys: np.ndarray,
    masses: np.ndarray,
    most: Scalar,
    wanted: Scalar,
    counts: np.ndarray,
    sums: np.ndarray,
) -> tuple[Scalar, Scalar]:
    """Where the prefix of the sorted values ends that has ``most`` values or mass ``wanted``, whichever comes first.

    Returns its smallest key, and the last id with that key that belongs to it; ids and values beyond do not. A prefix
    that has all values above -inf ends at the smallest key of all. ``counts`` and ``sums`` [2048] are scratch.
    """
    prefix = np.uint32(0)
    above = np.uint32(31)
    for level in range(3):
        shift = np.uint32(21 if level == 0 else 10 if level == 1 else 0)
        digits = np.uint32(1023 if level == 2 else 2047)
        counts[:] = 0
        sums[:] = 0
        for x in range(keys.shape[0]):
            key = np.uint32(np.uint32(keys[x]) ^ np.uint32(0x80000000))
            if (level == 0 or (key >> above) == prefix) and keys[x] != NEGATIVE_INF_KEY:
                digit = np.int64((key >> shift) & digits)
                counts[digit] += 1
                sums[digit] += masses[x]
        digit = np.int64(digits)
        while digit >= 0 and counts[digit] < most and sums[digit] < wanted:
            most -= counts[digit]
            wanted -= sums[digit]
            digit -= 1
        if digit < 0:
            return np.int64(NEGATIVE_INF_KEY), np.int64(keys.shape[0])
        prefix = np.uint32((prefix << np.uint32(10 if level == 2 else 11)) | np.uint32(digit))
        above = shift
    last = np.int32(prefix ^ np.uint32(0x80000000))
    x = -1
    while most > 0 and wanted > 0:
        x += 1
        if keys[x] == last:
            most -= 1
            wanted -= masses[x]
    return np.int64(last), np.int64(x)
