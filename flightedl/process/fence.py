"""Memory fences between two processes that map the same memory: no access moves across a fence.

Processors reorder the reads and writes of a thread. x86 never reorders two reads or two writes, and never moves a write
before an earlier read. These guarantees are sufficient here, so the fence for x86 does nothing. Other processors, such
as ARM, need an instruction that Python does not offer. llvmlite, which comes with numba, compiles it, at the cost of 66
MiB and several tenths of a second. Trainers on x86 avoid this cost.

No fence is needed between writes and the message that follows them, because sockets use locks, which act as fences.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable

from flightedl.errors import UnavailableError

Fence = Callable[[], None]

_ORDERED = frozenset({"x86_64", "AMD64"})
#: The fence in LLVM's assembly language, which LLVM compiles for each processor.
SOURCE = "define void @fence() {\n  fence seq_cst\n  ret void\n}\n"


@functools.cache
def memory_fence() -> Fence:
    """Return the memory fence to call between two accesses. Raises UnavailableError if this system has none."""
    if platform.machine() in _ORDERED:
        return _nothing
    return compiled_fence()


@functools.cache
def compiled_fence() -> Fence:
    """Return a function that executes this processor's memory fence. Raises UnavailableError if LLVM is missing."""
    try:
        import llvmlite.binding as llvm  # type: ignore[import-untyped]

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(opt=2)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(SOURCE), machine)
        engine.finalize_object()
        call = ctypes.CFUNCTYPE(None)(engine.get_function_address("fence"))
    except (ImportError, OSError, RuntimeError) as error:
        raise UnavailableError(f"there is no memory fence on this system: {str(error)[:160]}") from None
    # Keep a reference to the engine, because it owns the machine code.
    return functools.partial(_call, call, engine)


def _call(call: Callable[[], object], _engine: object) -> None:
    call()


def _nothing() -> None:
    pass
