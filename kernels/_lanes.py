"""Sixteen neighbouring float32 at a time, written as LLVM IR where the loop vectoriser gives up: ``exp``, and rounding.

Every lane is computed alike and alone, so a value's bits do not depend on its place.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from ._numba import cgutils, intrinsic, types

LANES = 16
INT, FLOAT = ir.IntType(32), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(INT, LANES), ir.VectorType(FLOAT, LANES)
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_EXP_TERMS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
"""Minimax polynomial of (exp(r) - 1 - r) / r^2 for |r| <= ln(2) / 2 (Cephes, expf)."""
_EXP_LEAST, _EXP_MOST = -87.0, 88.0
_FP8_MAX, _FP8_MIN_AMAX, _E4M3_NORMAL, _E4M3_MAGIC = 448.0, 1e-4, 2.0**-6, 1.5 * 2.0**14


def _float32(value: float) -> float:
    """``value`` as float32 holds it: LLVM's text takes no others."""
    return float(np.float32(value))


def splat(b: Any, scalar: Any, lanes: int = LANES) -> Any:
    """Vector of ``lanes`` times ``scalar``."""
    vector = ir.VectorType(scalar.type, lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(INT, 0))
    order = ir.Constant(ir.VectorType(INT, lanes), [0] * lanes)
    return b.shuffle_vector(first, undefined, order)


def call(b: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call of an LLVM intrinsic."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def place(b: Any, array: Any, row: Any, column: Any) -> Any:
    """Pointer to sixteen float32 of a contiguous two-dimensional array."""
    width = cgutils.unpack_tuple(b, array.shape, 2)[1]
    pointer = b.gep(array.data, [b.add(b.mul(row, width), column)])
    return b.bitcast(pointer, _FLOATS.as_pointer())


def _int(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _real(value: float) -> Any:
    return ir.Constant(_FLOATS, [_float32(value)] * LANES)


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, "llvm.fma.v16f32", _FLOATS, x, y, z)


def _exp(b: Any, x: Any) -> Any:
    """exp to two units in the last place; below -87 as at -87."""
    x = b.select(b.fcmp_ordered("<", x, _real(_EXP_LEAST)), _real(_EXP_LEAST), x)
    x = b.select(b.fcmp_ordered(">", x, _real(_EXP_MOST)), _real(_EXP_MOST), x)
    power = call(b, "llvm.rint.v16f32", _FLOATS, b.fmul(x, _real(_LOG2_E)))
    rest = _fma(b, power, _real(-_LN2_HIGH), x)
    rest = _fma(b, power, _real(-_LN2_LOW), rest)
    total = _real(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        total = _fma(b, total, rest, _real(term))
    near = b.fadd(_fma(b, b.fmul(rest, rest), total, rest), _real(1.0))
    moved = b.shl(b.fptosi(power, _INTS), _int(23))
    return b.bitcast(b.add(b.bitcast(near, _INTS), moved), _FLOATS)


def _clamp(b: Any, x: Any, low: Any, high: Any) -> Any:
    if low is not None:
        x = b.select(b.fcmp_ordered("<", x, low), low, x)
    return b.select(b.fcmp_ordered(">", x, high), high, x)


def _exp_of_difference(typing: Any, x: Any, row: Any, column: Any, least: Any) -> Any:
    del typing, row, column, least

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, b, args[0])
        where = place(b, array, args[1], args[2])
        value = _exp(b, b.fsub(b.load(where, align=4), splat(b, args[3])))
        b.store(value, where, align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, types.float32), generate


exp_16: Any = intrinsic(_exp_of_difference)
"""``x[row, column : column + 16] = exp(itself - least)``."""


def _swiglu(
    typing: Any, x: Any, row: Any, column: Any, width: Any, limit: Any, scale: Any, out: Any
) -> Any:
    del typing, row, column, width, limit, scale

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(signature.args[0])(context, b, args[0])
        target = context.make_array(signature.args[6])(context, b, args[6])
        limit = splat(b, args[4])
        low = b.fsub(_real(-0.0), limit)
        gate = b.load(place(b, source, args[1], args[2]), align=4)
        up = b.load(place(b, source, args[1], b.add(args[2], args[3])), align=4)
        gate, up = _clamp(b, gate, None, limit), _clamp(b, up, low, limit)
        bottom = b.fadd(_real(1.0), _exp(b, b.fsub(_real(-0.0), gate)))
        value = b.fmul(b.fmul(b.fdiv(gate, bottom), up), splat(b, args[5]))
        b.store(value, place(b, target, args[1], args[2]), align=4)
        return context.get_dummy_value()

    index, real = types.int64, types.float32
    return types.void(x, index, index, index, real, real, out), generate


swiglu_16: Any = intrinsic(_swiglu)
"""``out[row, column ..] = silu(min(gate, limit)) * clamp(up) * scale`` of gates ``x[row, column ..]`` and ups that lie
``width`` columns further."""


def _round_e4m3(b: Any, x: Any) -> Any:
    """Nearest E4M3 value of ``x`` within +-448, ties to even."""
    bits = b.bitcast(x, _INTS)
    size_bits = b.and_(bits, _int(0x7FFFFFFF))
    size = b.bitcast(size_bits, _FLOATS)
    odd = b.and_(b.lshr(size_bits, _int(20)), _int(1))
    up = b.add(b.add(size_bits, _int(0x7FFFF)), odd)
    normal = b.bitcast(b.and_(up, _int(-0x100000)), _FLOATS)
    normal = _clamp(b, normal, None, _real(_FP8_MAX))
    below = b.fsub(b.fadd(size, _real(_E4M3_MAGIC)), _real(_E4M3_MAGIC))
    rounded = b.select(b.fcmp_ordered(">=", size, _real(_E4M3_NORMAL)), normal, below)
    sign = b.and_(bits, _int(-0x80000000))
    return b.bitcast(b.or_(b.bitcast(rounded, _INTS), sign), _FLOATS)


def _largest_bits(b: Any, vectors: list[Any]) -> Any:
    """Bits of the largest magnitude in ``vectors``: a positive float32 orders as its bits do."""
    sizes = [b.and_(b.bitcast(vector, _INTS), _int(0x7FFFFFFF)) for vector in vectors]
    most = sizes[0]
    for size in sizes[1:]:
        most = b.select(b.icmp_unsigned(">", size, most), size, most)
    return call(b, "llvm.vector.reduce.umax.v16i32", INT, most)


def _round_group(typing: Any, x: Any, row: Any, column: Any, out: Any) -> Any:
    del typing, row, column

    def generate(context: Any, b: Any, signature: Any, args: Any) -> Any:
        source = context.make_array(signature.args[0])(context, b, args[0])
        target = context.make_array(signature.args[3])(context, b, args[3])
        columns = [args[2], b.add(args[2], ir.Constant(args[2].type, LANES))]
        values = [b.load(place(b, source, args[1], at), align=4) for at in columns]
        most = b.bitcast(_largest_bits(b, values), FLOAT)
        least = ir.Constant(FLOAT, _float32(_FP8_MIN_AMAX))
        most = b.select(b.fcmp_ordered("<", most, least), least, most)
        ratio = b.bitcast(b.fdiv(most, ir.Constant(FLOAT, _FP8_MAX)), INT)
        power = b.and_(b.add(ratio, ir.Constant(INT, 0x7FFFFF)), ir.Constant(INT, 0x7F800000))
        scale = splat(b, b.bitcast(power, FLOAT))
        inverse = splat(b, b.bitcast(b.sub(ir.Constant(INT, 254 << 23), power), FLOAT))
        for at, value in zip(columns, values, strict=True):
            rounded = b.fmul(_round_e4m3(b, b.fmul(value, inverse)), scale)
            b.store(rounded, place(b, target, args[1], at), align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64, types.int64, out), generate


round_32_fp8: Any = intrinsic(_round_group)
"""``out[row, column : column + 32]`` = that group of ``x`` as E4M3 values with one UE8M0 scale will be read."""
