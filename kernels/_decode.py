"""Stored values to float32, sixteen at a time, written as LLVM IR: the loop vectoriser does not narrow the integers.

The bits of a code are moved to where float32 has exponent and mantissa, and the exponent's bias is corrected. A
subnormal code is given a leading one, which is taken off again: no float32 on the way is subnormal, which is slow.
"""

from typing import Any

from llvmlite import ir

from ._lanes import LANES, splat
from ._numba import cgutils, intrinsic, types

_BYTE, _INT, _FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
VALUES = LANES
"""Values that one call makes."""


def _e4m3(builder: Any, codes: Any) -> Any:
    """``codes`` <n x i32> as E4M3."""
    return _as_float(builder, codes, normal=0x08, sign=0x80, shift=20, bias=120, smallest=2.0**-6)


def _e2m1(builder: Any, codes: Any) -> Any:
    """Nibbles ``codes`` <n x i32> as E2M1."""
    return _as_float(builder, codes, normal=2, sign=8, shift=22, bias=126, smallest=1.0)


def _as_float(
    b: Any, codes: Any, *, normal: int, sign: int, shift: int, bias: int, smallest: float
) -> Any:
    """``normal``: least code, and ``smallest`` its value, from which a code has a leading one."""
    lanes = codes.type.count
    ints, floats = ir.VectorType(_INT, lanes), ir.VectorType(_FLOAT, lanes)

    def number(value: int) -> Any:
        return ir.Constant(ints, [value] * lanes)

    def real(value: float) -> Any:
        return ir.Constant(floats, [value] * lanes)

    size = b.and_(codes, number(sign - 1))
    below = b.icmp_unsigned("<", size, number(normal))
    moved = b.shl(b.select(below, b.or_(size, number(normal)), size), number(shift))
    value = b.bitcast(b.add(moved, number(bias << 23)), floats)
    exact = b.fsub(value, b.select(below, real(smallest), real(0.0)))
    signs = b.shl(b.and_(codes, number(sign)), number(32 - sign.bit_length()))
    return b.bitcast(b.or_(b.bitcast(exact, ints), signs), floats)


def _load_codes(b: Any, row: Any, at: Any, count: int) -> Any:
    kind = ir.VectorType(_BYTE, count)
    place = b.bitcast(b.gep(row, [at]), kind.as_pointer())
    return b.zext(b.load(place, align=1), ir.VectorType(_INT, count))


def _sixteen_e4m3(b: Any, row: Any, at: Any) -> Any:
    return _e4m3(b, _load_codes(b, row, at, VALUES))


def _sixteen_e2m1(b: Any, row: Any, at: Any) -> Any:
    packed = _load_codes(b, row, at, VALUES // 2)
    high = b.lshr(packed, ir.Constant(packed.type, [4] * (VALUES // 2)))
    order = [i // 2 + (VALUES // 2) * (i % 2) for i in range(VALUES)]
    codes = b.shuffle_vector(packed, high, ir.Constant(ir.VectorType(_INT, VALUES), order))
    return _e2m1(b, codes)


def _loader(decode: Any) -> Any:
    def load(
        typing: Any,
        stored: Any,
        outer: Any,
        inner: Any,
        at: Any,
        scale: Any,
        out: Any,
        row: Any,
        to: Any,
    ) -> Any:
        del typing, outer, inner, at, scale, row, to

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source = context.make_array(signature.args[0])(context, builder, args[0])
            target = context.make_array(signature.args[5])(context, builder, args[5])
            far, near, _ = cgutils.unpack_tuple(builder, source.strides, 3)
            width = cgutils.unpack_tuple(builder, target.shape, 2)[1]
            offset = builder.add(builder.mul(args[1], far), builder.mul(args[2], near))
            values = builder.fmul(
                decode(builder, builder.gep(source.data, [offset]), args[3]),
                splat(builder, args[4]),
            )
            column = builder.add(builder.mul(args[6], width), args[7])
            place = builder.gep(target.data, [column])
            builder.store(values, builder.bitcast(place, values.type.as_pointer()), align=4)
            return context.get_dummy_value()

        index = types.int64
        return types.void(stored, index, index, index, types.float32, out, index, index), generate

    return intrinsic(load)


load_e4m3: Any = _loader(_sixteen_e4m3)
"""``out[row, to : to + 16] = stored[outer, inner, at : at + 16] * scale``."""
load_e2m1: Any = _loader(_sixteen_e2m1)
"""``out[row, to : to + 16]`` = nibbles of ``stored[outer, inner, at : at + 8]``, the low one first, times ``scale``."""
