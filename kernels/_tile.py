"""The innermost product: a tile of rows and columns held in vector registers while k runs once.

Every element is one chain of fused multiply-adds in the order of k, so its bits depend neither on the tile it falls
into nor on the vector length of the machine. Written as LLVM IR, since the loop vectoriser keeps no tile in registers.
Weights are float32, or bfloat16 as int16: the upper halves of float32 values.

    y[m .. m + ROWS, n .. n + VECTORS * LANES] = x[m .. , k0 ..] @ w[:, n ..]
"""

from typing import Any

from llvmlite import binding, ir

from ._lanes import call, splat
from ._numba import cgutils, intrinsic, types

_HAS_512 = bool(binding.get_host_cpu_features().get("avx512f"))
LANES = 16 if _HAS_512 else 8
VECTORS = 4 if _HAS_512 else 2
WIDE = LANES * VECTORS
"""Columns of a full tile: with six rows it fills the vector registers."""

_INT = ir.IntType(64)
_FLOAT = ir.FloatType()


def _vector(element: Any, lanes: int) -> ir.VectorType:
    return ir.VectorType(element, lanes)


class _Tile:
    """Emits one tile; ``rows`` and ``vectors`` are unrolled, ``masked`` limits the columns to a count."""

    def __init__(self, builder: Any, rows: int, vectors: int, masked: bool, halves: bool) -> None:
        self._b = builder
        self._rows, self._vectors, self._halves = rows, vectors, halves
        self._masked = masked
        self._lane_type = _vector(_FLOAT, LANES)
        self._mask: Any = None

    def _constant(self, value: int) -> Any:
        return ir.Constant(_INT, value)

    def set_columns(self, columns: Any) -> None:
        """Mask of the lanes below ``columns``."""
        lanes = ir.Constant(_vector(_INT, LANES), list(range(LANES)))
        self._mask = self._b.icmp_signed("<", lanes, splat(self._b, columns, LANES))

    def _weights(self, pointer: Any, vector: int) -> Any:
        """``LANES`` weights behind ``pointer`` as float32."""
        b = self._b
        element = ir.IntType(16) if self._halves else _FLOAT
        kind = _vector(element, LANES)
        place = b.bitcast(b.gep(pointer, [self._constant(vector * LANES)]), kind.as_pointer())
        if self._masked:
            name = f"llvm.masked.load.v{LANES}{'i16' if self._halves else 'f32'}.p0"
            zero = ir.Constant(kind, None)
            align = ir.Constant(ir.IntType(32), 2 if self._halves else 4)
            loaded = call(b, name, kind, place, align, self._mask, zero)
        else:
            loaded = b.load(place, align=2 if self._halves else 4)
        if not self._halves:
            return loaded
        wide = _vector(ir.IntType(32), LANES)
        upper = b.shl(b.zext(loaded, wide), ir.Constant(wide, [16] * LANES))
        return b.bitcast(upper, self._lane_type)

    def _step(self, x: list[Any], k: Any, w: Any, sums: list[Any]) -> list[Any]:
        weights = [self._weights(w, vector) for vector in range(self._vectors)]
        after: list[Any] = []
        for row in range(self._rows):
            value = splat(self._b, self._b.load(self._b.gep(x[row], [k])), LANES)
            for vector in range(self._vectors):
                old = sums[row * self._vectors + vector]
                after.append(
                    call(
                        self._b,
                        f"llvm.fma.v{LANES}f32",
                        self._lane_type,
                        value,
                        weights[vector],
                        old,
                    )
                )
        return after

    def emit(self, x: list[Any], w: Any, stride: Any, depth: Any, y: list[Any]) -> None:
        """``x`` and ``y``: pointers to each row's first value; ``stride``: weights between two k."""
        b = self._b
        zero = ir.Constant(self._lane_type, None)
        count = self._rows * self._vectors
        before = b.block
        loop, done = b.append_basic_block("tile"), b.append_basic_block("tile.done")
        b.cbranch(b.icmp_signed(">", depth, self._constant(0)), loop, done)
        b.position_at_end(loop)
        k = b.phi(_INT)
        sums = [b.phi(self._lane_type) for _ in range(count)]
        after = self._step(x, k, b.gep(w, [b.mul(k, stride)]), sums)
        following = b.add(k, self._constant(1))
        k.add_incoming(self._constant(0), before)
        k.add_incoming(following, b.block)
        for held, new in zip(sums, after, strict=True):
            held.add_incoming(zero, before)
            held.add_incoming(new, b.block)
        last = b.block
        b.cbranch(b.icmp_signed("<", following, depth), loop, done)
        b.position_at_end(done)
        for i, new in enumerate(after):
            total = b.phi(self._lane_type)
            total.add_incoming(zero, before)
            total.add_incoming(new, last)
            after[i] = total
        for i, total in enumerate(after):
            row, vector = divmod(i, self._vectors)
            pointer = b.gep(y[row], [self._constant(vector * LANES)])
            place = b.bitcast(pointer, self._lane_type.as_pointer())
            if self._masked:
                align = ir.Constant(ir.IntType(32), 4)
                name = f"llvm.masked.store.v{LANES}f32.p0"
                call(b, name, ir.VoidType(), total, place, align, self._mask)
            else:
                b.store(total, place, align=4)


def _make(rows: int, vectors: int, masked: bool) -> Any:
    def tile(
        typing: Any, x: Any, m: Any, k0: Any, w: Any, n: Any, y: Any, to: Any, columns: Any
    ) -> Any:
        del typing, m, k0, n, to, columns
        index = types.int64
        signature = types.void(x, index, index, w, index, y, index, index)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            builder.function.attributes.add(
                "noinline"
            )  # one copy in a kernel that multiplies often
            kinds = sig.args
            xs, ws, ys = (
                context.make_array(kinds[i])(context, builder, args[i]) for i in (0, 3, 5)
            )
            m, k0, n, to, columns = args[1], args[2], args[4], args[6], args[7]

            def rows_of(array: Any, column: Any) -> list[Any]:
                stride = cgutils.unpack_tuple(builder, array.shape, 2)[1]
                base = builder.gep(array.data, [column])
                return [
                    builder.gep(base, [builder.mul(builder.add(m, ir.Constant(_INT, r)), stride)])
                    for r in range(rows)
                ]

            depth, stride = cgutils.unpack_tuple(builder, ws.shape, 2)
            emit = _Tile(builder, rows, vectors, masked, kinds[3].dtype == types.int16)
            if masked:
                emit.set_columns(columns)
            emit.emit(rows_of(xs, k0), builder.gep(ws.data, [n]), stride, depth, rows_of(ys, to))
            return context.get_dummy_value()

        return signature, generate

    return intrinsic(tile)


tile_6, tile_4, tile_2, tile_1 = (_make(rows, VECTORS, False) for rows in (6, 4, 2, 1))
"""Tiles of ``WIDE`` columns; the last argument is not used."""
edge_12, edge_4, edge_1 = (_make(rows, 1, True) for rows in (12, 4, 1))
"""Tiles of up to ``LANES`` columns, as many as the last argument says."""
