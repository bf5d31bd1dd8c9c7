"""Make kernels treat subnormal numbers as zero.

When the gradients of an element become zero, its moving average decays into the subnormal range (float32 below 1.2e-38)
and, because numbers are rounded to nearest, never leaves it. x86 processors handle such operands in microcode, which
made an Adam update 20 times slower for the rest of the job.

Each kernel therefore sets the two processor flags that make subnormal numbers count as zero, and restores the thread's
flags before it returns; both take nanoseconds. Other processors have no such penalty, so their flags are not changed.

Each operation may therefore differ from ordinary arithmetic by less than 1.2e-38 (float32) or 2.3e-308 (float64).
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: Flags of the x86 control register that replace subnormal results (0x8000) and subnormal operands (0x0040) with zero.
_FLAGS = 0x8040
_WORD = ir.IntType(32)


def _is_x86() -> bool:
    return str(binding.get_process_triple()).startswith(("x86_64", "i386", "i686"))


def _control(builder: Any, name: str, slot: Any) -> None:
    """Call a control-register instruction on ``slot``. The compiler does not move memory accesses across it."""
    barrier = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", side_effect=True)
    function_type = ir.FunctionType(ir.VoidType(), [slot.type])
    builder.call(barrier, [])
    instruction = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, function_type, f"llvm.x86.sse.{name}"
    )
    builder.call(instruction, [slot])
    builder.call(barrier, [])


def _flush(_typing: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if not _is_x86():
            return ir.Constant(_WORD, 0)
        slot = cgutils.alloca_once(builder, _WORD)  # type: ignore[no-untyped-call]
        _control(builder, "stmxcsr", slot)
        before = builder.load(slot)
        builder.store(builder.or_(before, ir.Constant(_WORD, _FLAGS)), slot)
        _control(builder, "ldmxcsr", slot)
        return before

    return types.uint32(), generate


def _restore(_typing: Any, state: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        if _is_x86():
            slot = cgutils.alloca_once(builder, _WORD)  # type: ignore[no-untyped-call]
            builder.store(arguments[0], slot)
            _control(builder, "ldmxcsr", slot)
        return context.get_dummy_value()

    return types.none(state), generate


#: ``state = flush_subnormals()``: set the flags and return their previous values. For use in compiled code only.
flush_subnormals: Any = intrinsic(_flush)
#: ``restore_subnormals(state)``: restore the flags. For use in compiled code only.
restore_subnormals: Any = intrinsic(_restore)
