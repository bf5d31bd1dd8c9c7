"""Processor instructions that numba lacks. For use in compiled code only."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

_BIT = ir.IntType(1)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_EIGHT = ir.VectorType(ir.FloatType(), 8)


def _prefetch(_typing: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        data = context.make_array(kind)(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [place.type, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
        # Constant arguments of the prefetch instruction: data is prefetched for reading, into all levels of the cache.
        builder.call(function, [place, _INT32(0), _INT32(3), _INT32(1)])
        return context.get_dummy_value()

    return types.none(array, index), generate


def _copy(_typing: Any, target: Any, _at: Any, source: Any, _start: Any, _count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def place(array: int, index: int) -> Any:
            kind = signature.args[array]
            data = context.make_array(kind)(context, builder, arguments[array]).data
            return builder.gep(data, [arguments[index]])

        size = builder.mul(arguments[4], _INT64(target.dtype.bitwidth // 8))
        cgutils.raw_memcpy(builder, place(0, 1), place(2, 3), size, 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    number = types.int64
    return types.none(target, number, source, number, number), generate


def _atomic(order: str) -> Any:
    def typed(_typing: Any, array: Any, _index: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            return builder.atomic_rmw(order, builder.gep(data, [arguments[1]]), arguments[2], "monotonic")

        return number(array, types.int64, number), generate

    return typed


def _array_at(kind: Any) -> Any:
    def typed(_typing: Any, numbers: Any, _at: Any) -> Any:
        array = types.Array(kind, 1, "C")

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            address, size = (
                builder.load(builder.gep(data, [builder.add(arguments[1], _INT64(place))])) for place in (0, 1)
            )
            found = context.make_array(array)(context, builder)
            item_size = kind.bitwidth // 8
            populate_array(  # type: ignore[no-untyped-call]
                found,
                data=builder.inttoptr(address, found.data.type),
                shape=[size],
                strides=[_INT64(item_size)],
                itemsize=_INT64(item_size),
                meminfo=None,
            )
            return found._getvalue()  # noqa: SLF001 - numba's way

        return array(numbers, types.int64), generate

    return typed


def _place(context: Any, builder: Any, signature: Any, arguments: Any, array: int, index: Any) -> Any:
    """Return a pointer to eight numbers of an array, which begin at ``index`` plus the following argument."""
    kind = signature.args[array]
    data = context.make_array(kind)(context, builder, arguments[array]).data
    place = builder.gep(data, [builder.add(arguments[array + 1], index)])
    return builder.bitcast(place, _EIGHT.as_pointer())


def _spread(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(_EIGHT, ir.Undefined)
    first = builder.insert_element(undefined, number, _INT32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INT32, 8), [0] * 8))


def _each_eight(context: Any, builder: Any, signature: Any, arguments: Any, use: Any) -> None:
    """Generate a loop that calls ``use(place, values, gradients)``. For the gradients see ``rules.gradient_at``."""
    scale, clip, decay = (_spread(builder, number) for number in arguments[5:8])
    below = builder.fneg(clip)
    with cgutils.for_range(builder, arguments[4]) as loop:
        index = builder.mul(loop.index, _INT64(8))
        place, given = (_place(context, builder, signature, arguments, array, index) for array in (0, 2))
        values, scaled = builder.load(place, align=4), builder.fmul(builder.load(given, align=4), scale)
        raised = builder.select(builder.fcmp_ordered("<", scaled, below), below, scaled)
        clipped = builder.select(builder.fcmp_ordered(">", raised, clip), clip, raised)
        use(place, values, builder.fadd(clipped, builder.fmul(decay, values)))


def _square_sum(
    _typing: Any, w: Any, _at: Any, g: Any, _row: Any, _eights: Any, _scale: Any, _clip: Any, _decay: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        zeros = ir.Constant(_EIGHT, [0.0] * 8)
        total = cgutils.alloca_once_value(builder, zeros)  # type: ignore[no-untyped-call]

        def add(_place: Any, _values: Any, gradients: Any) -> None:
            builder.store(builder.fadd(builder.load(total), builder.fmul(gradients, gradients)), total)

        _each_eight(context, builder, signature, arguments, add)
        left = builder.load(total)
        for width in (4, 2, 1):
            halves = [
                builder.shuffle_vector(left, left, ir.Constant(ir.VectorType(_INT32, width), list(places)))
                for places in (range(width), range(width, 2 * width))
            ]
            left = builder.fadd(*halves)
        return builder.extract_element(left, _INT32(0))

    return types.float32(w, types.int64, g, types.int64, types.int64, *[types.float32] * 3), generate


def _descend(
    _typing: Any, w: Any, _at: Any, g: Any, _row: Any, _eights: Any, _scale: Any, _clip: Any, _decay: Any, _rate: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rate = _spread(builder, arguments[8])

        def step(place: Any, values: Any, gradients: Any) -> None:
            builder.store(builder.fsub(values, builder.fmul(rate, gradients)), place, align=4)

        _each_eight(context, builder, signature, arguments, step)
        return context.get_dummy_value()

    return types.none(w, types.int64, g, types.int64, types.int64, *[types.float32] * 4), generate


def _trailing_zeros(_typing: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], _BIT(1))

    return types.int64(types.uint64), generate


#: ``words_at(numbers, at)`` and similar functions: return the array with the address ``numbers[at]`` and the size
#: ``numbers[at + 1]``.
words_at: Any = intrinsic(_array_at(types.uint32))
longs_at: Any = intrinsic(_array_at(types.uint64))
counts_at: Any = intrinsic(_array_at(types.int32))
numbers_at: Any = intrinsic(_array_at(types.int64))
floats_at: Any = intrinsic(_array_at(types.float32))
halves_at: Any = intrinsic(_array_at(types.uint16))
#: ``prefetch(array, index)``: start loading the cache line of this element, without waiting. Any index is safe.
prefetch: Any = intrinsic(_prefetch)
#: ``atomic_or(array, index, bits)``, ``atomic_add(array, index, number)``: change an element that other threads may be
#: changing, and return its previous value.
atomic_or: Any = intrinsic(_atomic("or"))
atomic_add: Any = intrinsic(_atomic("add"))
#: ``copy(target, at, source, start, count)``: copy elements between two arrays of the same type that do not overlap.
copy: Any = intrinsic(_copy)
#: ``trailing_zeros(bits)``: count the trailing zeros of a non-zero 64-bit number.
trailing_zeros: Any = intrinsic(_trailing_zeros)

#: ``square_sum(w, at, g, row, eights, scale, clip, decay)``: return the sum of the squared gradients of ``8 * eights``
#: values, added in a fixed order. It is vectorized by hand, because compilers do not vectorize loops over short rows in
#: arrays that may overlap.
square_sum: Any = intrinsic(_square_sum)
#: ``descend(w, at, g, row, eights, scale, clip, decay, rate)``: subtract the gradients, multiplied by ``rate``, from
#: the values.
descend: Any = intrinsic(_descend)
