"""Two instructions that numba has no name for; in compiled code only."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_BIT = ir.IntType(1)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)


def _prefetch(_typing: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        data = context.make_array(kind)(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [place.type, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
        # For reading, into all caches, data.
        builder.call(function, [place, _INT32(0), _INT32(3), _INT32(1)])
        return context.get_dummy_value()

    return types.none(array, index), generate


def _trailing_zeros(_typing: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], _BIT(1))

    return types.int64(types.uint64), generate


#: ``prefetch(array, index)``: the processor begins to load this element's cache line; any index, nothing waits.
prefetch: Any = intrinsic(_prefetch)
#: ``trailing_zeros(bits)``: of 64 bits that are not all zero.
trailing_zeros: Any = intrinsic(_trailing_zeros)
