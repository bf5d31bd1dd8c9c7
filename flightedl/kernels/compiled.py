"""Compiled kernels: one pass over memory per block, without the GIL.

numba is heavy: only pservers import this, and trainers that send 16-bit floats.

Theory. The loops (``rules``, ``blocks``) are compiled for exact argument types: values and slots are
C-contiguous, aligned and writable; gradients may be read-only and at any address, as network buffers are. Constants are
cast to the block's type by those signatures. Kernels are compiled when first asked for, and numba keeps the machine
code in its cache beside these files, or in ``NUMBA_CACHE_DIR``; where no cache can be written, they are compiled each
time. Whatever changes in a file of this package, all are compiled anew.

Guarantees: a kernel touches only the arrays given, holds no state, takes no lock, and may run in any number of threads
on different blocks. Results have the bits of ``flightedl.testing.reference_updates`` but for
LAMB's sums and for subnormal numbers, which count as zero (``subnormals``).

Not guaranteed: anything about arrays of unequal length (they are refused) or overlapping arrays (they are not noticed).
Nothing here checks for finite gradients on its own: call ``all_finite`` before anything is applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import xxhash
from numba import types
from numba.core.caching import FunctionCache
from numba.core.runtime.nrt import rtsys

from flightedl.domain.model.optimizers import (
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Delta,
    Ftrl,
    Momentum,
    Optimizer,
    RMSprop,
)
from flightedl.errors import UsageError
from flightedl.kernels import blocks as kernels_blocks
from flightedl.kernels import rules as kernels_rules

Floats = npt.NDArray[Any]
Loop = Callable[..., Any]

#: Elements that are updated before somebody looks at them: few enough for the cache of one core, with their slots.
_PIECE = 1 << 16
#: The only relaxation of arithmetic, for sums: see the loops that need it.
_REASSOCIATED = frozenset({kernels_rules.lamb, kernels_blocks.all_finite})


def _number(dtype: str) -> Any:
    return {"float32": types.float32, "float64": types.float64, "uint16": types.uint16, "uint32": types.uint32}[dtype]


def _own(dtype: str) -> Any:
    """Type of an array of the pserver's own."""
    return types.Array(_number(dtype), 1, "C")


def _received(dtype: str) -> Any:
    """Type of an array that may be read-only and unaligned; own arrays fit too."""
    return types.Array(_number(dtype), 1, "C", readonly=True, aligned=False)


#: Called once, by the thread that set it, before that thread compiles what is not in numba's cache.
compiling_begins: ContextVar[Callable[[], object]] = ContextVar("compiling_begins", default=lambda: None)


class _MachineCode(FunctionCache):
    """numba's cache, from which machine code is read without what it takes to compile any: 0.25 s of a start."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)
        code = None
        with self._guard_against_spurious_io_errors():
            code = self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        if code is None:
            compiling_begins.get()()
            compiling_begins.set(lambda: None)
            # Another process may have compiled it while this one waited for its turn.
            with self._guard_against_spurious_io_errors():
                code = self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        return code


@cache
def machine_code(loop: Loop, signature: Any, *, allocates: bool = True) -> Any:
    """A loop compiled for exactly these types, or read from numba's cache; it runs without the GIL.

    One that does not allocate need not count references to arrays, which costs atomic instructions wherever functions
    hand arrays to each other.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    if not allocates:
        options["_nrt"] = False
    if loop in _REASSOCIATED:
        options["fastmath"] = {"reassoc"}
    try:
        code = numba.njit(**options)(loop)
        # numba looks for changes in the loop's own file alone, and has no public way to name others.
        code._cache = _MachineCode(loop)  # type: ignore[no-untyped-call] # noqa: SLF001
        code._cache._cache_file._source_stamp = _stamp()  # noqa: SLF001
        code.compile(signature)
        code.disable_compile()
    except Exception:  # noqa: BLE001 - numba has no class for it; what is not the cache's fault is raised again below
        # Nowhere to keep machine code (read-only or full disk), or a torn file there: start slower, run the same.
        return numba.njit(signature, **options)(loop)
    return code


@cache
def _stamp() -> int:
    """Of all that loops call into: what is here, byte by byte."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return xxhash.xxh3_64_intdigest(b"".join(file.read_bytes() for file in sources))


@dataclass(frozen=True, slots=True)
class Update:
    """An optimizer's rule, bound to its constants and compiled for one dtype. Call it, see ``__call__``."""

    optimizer: Optimizer
    loop: Loop
    #: For each slot of the loop, whether this optimizer has it.
    slots_used: tuple[bool, ...]
    #: Arrays that a call must give as ``slots``.
    slot_count: int
    scalars: Callable[[Any, float, int], tuple[float, ...]]
    clip: float
    decay: float
    #: The loop as machine code.
    code: Any = field(compare=False, repr=False)

    def __call__(
        self,
        values: Floats,
        gradient: Floats,
        slots: Sequence[Floats],
        version: int,
        scale: float = 1.0,
        rate_factor: float = 1.0,
        after_piece: Callable[[Any], object] | None = None,
    ) -> None:
        """Take a block from ``version`` to ``version + 1``, in place.

        Args:
            values: (n,) of the dtype, aligned and contiguous.
            gradient: (n,) of the dtype, contiguous; may be read-only and unaligned. Must be finite.
            slots: One (n,) array for each of ``optimizer.slots``.
            version: Updates applied to the block before this one.
            scale: The gradient is multiplied by it: 1 / total weight, for a mean.
            rate_factor: The learning rate is multiplied by it, for stale gradients.
            after_piece: Called with the new values, a piece after the other, while they are in the processor's cache.
        """
        size = values.size
        if gradient.size != size or len(slots) != self.slot_count:
            raise ValueError("values and gradient must have the same length, and every slot must be there")
        for slot in slots:
            if slot.size != size:
                raise ValueError("values and slots must have the same length")
        # A plain number in nearly every job; only schedules are asked.
        rate: float = getattr(self.optimizer, "lr")  # noqa: B009 - every concrete optimizer has it
        rate = (rate if isinstance(rate, float) else self.optimizer.rate_at(version)) * rate_factor
        if rate == 0 and isinstance(self.optimizer, Ftrl):
            if after_piece is not None:
                after_piece(values)
            return
        arrays: list[Floats | None] = list(slots)
        if len(self.slots_used) != self.slot_count:
            given = iter(slots)
            arrays = [next(given) if used else None for used in self.slots_used]
        scalars = self.scalars(self.optimizer, rate, version + 1)
        if after_piece is None:
            self.code(values, gradient, *arrays, scale, self.clip, self.decay, *scalars)
            return
        # LAMB needs norms of the whole.
        length = size if self.loop is kernels_rules.lamb else _PIECE
        for start in range(0, size, max(length, 1)):
            piece = slice(start, start + length)
            part = values[piece]
            parts = [None if array is None else array[piece] for array in arrays]
            self.code(part, gradient[piece], *parts, scale, self.clip, self.decay, *scalars)
            after_piece(part)


def kernel_for(optimizer: Optimizer, dtype: str) -> Update:
    """The compiled update of one parameter's blocks, so that a caller needs no knowledge of rules.

    The first one of a kind takes a second to compile where numba has no machine code of it.

    Args:
        optimizer: Settings of this parameter (``Optimizer.for_parameter``).
        dtype: ``"float32"`` or ``"float64"``, the parameter's storage dtype.

    Raises:
        UsageError: there is no kernel for this optimizer or dtype.
    """
    bind = _RULES.get(type(optimizer))
    if bind is None or dtype not in ("float32", "float64"):
        raise UsageError(f"there is no kernel for {type(optimizer).__name__} on {dtype}")
    loop, slots_used, scalars = bind(optimizer)
    decoupled = isinstance(optimizer, AdamW)
    number = _number(dtype)
    slots = [_own(dtype) if used else types.none for used in slots_used]
    numbers = [number] * (3 + len(scalars(optimizer, 1.0, 1)))
    return Update(
        optimizer,
        loop,
        slots_used,
        sum(slots_used),
        scalars,
        math.inf if optimizer.clip_value is None else optimizer.clip_value,
        0.0 if decoupled else optimizer.weight_decay,
        machine_code(loop, types.void(_own(dtype), _received(dtype), *slots, *numbers)),
    )


def _adam_scalars(optimizer: Adam, rate: float, step: int) -> tuple[float, ...]:
    return (
        1 - rate * optimizer.weight_decay if isinstance(optimizer, AdamW) else 1.0,
        rate / (1 - optimizer.beta1**step),
        1 - optimizer.beta1,
        optimizer.beta2,
        1 - optimizer.beta2,
        1 / math.sqrt(1 - optimizer.beta2**step),
        optimizer.eps,
    )


def _lamb_scalars(optimizer: LAMB, rate: float, step: int) -> tuple[float, ...]:
    return (
        rate,
        1 - optimizer.beta1,
        optimizer.beta2,
        1 - optimizer.beta2,
        1 / (1 - optimizer.beta1**step),
        1 / math.sqrt(1 - optimizer.beta2**step),
        optimizer.eps,
    )


_Rule = tuple[Loop, tuple[bool, ...], Callable[[Any, float, int], tuple[float, ...]]]

#: Loop, slots used, and the loop's scalars from (optimizer, rate, step number from 1).
_RULES: dict[type[Optimizer], Callable[[Any], _Rule]] = {
    SGD: lambda _: (kernels_rules.sgd, (), lambda _o, rate, _t: (rate,)),
    Delta: lambda _: (kernels_rules.sgd, (), lambda _o, rate, _t: (rate,)),
    Momentum: lambda o: (
        kernels_rules.nesterov if o.nesterov else kernels_rules.momentum,
        (True,),
        lambda o, rate, _t: (rate, o.momentum),
    ),
    Adagrad: lambda _: (kernels_rules.adagrad, (True,), lambda o, rate, _t: (rate, o.eps)),
    Adadelta: lambda _: (kernels_rules.adadelta, (True, True), lambda o, rate, _t: (rate, o.rho, 1 - o.rho, o.eps)),
    RMSprop: lambda o: (
        kernels_rules.rmsprop,
        (True, o.centered, o.momentum > 0),
        lambda o, rate, _t: (rate, o.alpha, 1 - o.alpha, o.eps, o.momentum),
    ),
    Adam: lambda o: (kernels_rules.adam, (True, True, o.amsgrad), _adam_scalars),
    AdamW: lambda o: (kernels_rules.adam, (True, True, o.amsgrad), _adam_scalars),
    Ftrl: lambda _: (
        kernels_rules.ftrl,
        (True, True),
        lambda o, rate, _t: (1 / rate, o.l1, o.beta, 2 * o.l2),
    ),
    LAMB: lambda _: (kernels_rules.lamb, (True, True), _lamb_scalars),
}


@cache
def finite_copy() -> Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], bool]:
    """Compile, or read from numba's cache, ``copy_finite(target, source)``.

    Both are (n,) bytes, ``target`` aligned. False: some may be no finite floats of 32 or 64 bits, or they are not whole
    ones.
    """
    code = machine_code(kernels_blocks.copy_finite, types.boolean(_received("uint32"), _own("uint32")))

    def copy_finite(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> bool:
        if source.size % 4:
            np.copyto(target, source)
            return False
        if target.size != source.size:
            raise ValueError("a copy has as many bytes as what it is of")
        return bool(code(source.view(np.uint32), target.view(np.uint32)))

    return copy_finite


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """The kernels that do not depend on the optimizer, for one dtype; arrays are (n,), of equal length.

    ``accumulate_first(total, gradient, weight)``: ``total = weight * gradient``.
    ``accumulate(total, gradient, weight)``: ``total += weight * gradient``.
    ``all_finite(gradient) -> bool``: no element is NaN or infinite.
    ``copy_finite``: of any dtype's bytes, see ``finite_copy``.
    """

    accumulate_first: Callable[[Floats, Floats, float], None]
    accumulate: Callable[[Floats, Floats, float], None]
    all_finite: Callable[[Floats], bool]
    copy_finite: Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], bool]


@cache
def block_kernels(dtype: str) -> BlockKernels:
    """Compile, or read from numba's cache, the kernels for ``"float32"`` or ``"float64"``."""
    own, received, number = _own(dtype), _received(dtype), _number(dtype)
    add = types.void(own, received, number)
    return BlockKernels(
        machine_code(kernels_blocks.accumulate_first, add),
        machine_code(kernels_blocks.accumulate, add),
        machine_code(kernels_blocks.all_finite, types.boolean(received)),
        finite_copy(),
    )


@dataclass(frozen=True, slots=True)
class HalfKernels:
    """Conversion between float32 and one kind of 16-bit floats, given as their bits; arrays are (n,), of equal length.

    Sources may be unaligned and read-only. Machine code is looked up once, not with every block.
    """

    kind: str
    shorten_code: Any
    widen_code: Any

    def to_half(self, values: npt.NDArray[np.float32], out: npt.NDArray[np.uint16]) -> None:
        """Round to nearest, ties to even; what is beyond the range becomes infinite."""
        if self.kind == "float16":
            self.shorten_code(values.view(np.uint32), values, out)
        else:
            self.shorten_code(values.view(np.uint32), out)

    def to_float32(self, bits: npt.NDArray[np.uint16], out: npt.NDArray[np.float32]) -> None:
        """Exact."""
        if self.kind == "float16":
            self.widen_code(bits, out.view(np.uint32), out)
        else:
            self.widen_code(bits, out.view(np.uint32))


@cache
def half_kernels(kind: str) -> HalfKernels:
    """Compile, or read from numba's cache, the conversions of ``"bfloat16"`` or ``"float16"``."""
    bits, wide, floats = _received("uint16"), _received("uint32"), _received("float32")
    if kind == "float16":
        shorten = machine_code(kernels_blocks.float32_to_float16, types.void(wide, floats, _own("uint16")))
        widen = machine_code(kernels_blocks.float16_to_float32, types.void(bits, _own("uint32"), _own("float32")))
    else:
        shorten = machine_code(kernels_blocks.float32_to_bfloat16, types.void(wide, _own("uint16")))
        widen = machine_code(kernels_blocks.bfloat16_to_float32, types.void(bits, _own("uint32")))
    return HalfKernels(kind, shorten, widen)
