"""Compiled kernels, which process a block in one pass over memory without holding the GIL.

numba is slow to import, so only pservers, and trainers that send 16-bit floats, import this module.

Theory of operation: the loops in ``blocks``, which use the ``rules``, are compiled for exact argument types. Values and
slots are C-contiguous, aligned and writable; gradients may be read-only and unaligned, as network buffers are. The
signatures convert constants to the block's dtype.

A kernel is compiled at its first use. numba caches its machine code next to the source files or in ``NUMBA_CACHE_DIR``;
if neither is writable, in the user's cache directory or, as a last resort, in the directory for temporary files.
Changing any file in this package invalidates the cache.

Guarantees: a kernel accesses only its arguments, keeps no state and takes no locks, so any number of threads may run it
on different blocks. Results are bit-identical to those of ``tests.support.reference_updates``, with two exceptions:
LAMB's sums, and subnormal numbers, which count as zero (``subnormals``).

Limits: arrays of different lengths are rejected, but overlapping arrays are not detected. An update does not check that
gradients are finite; call ``all_finite`` before changing anything.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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
from flightedl.kernels import rules

Floats = npt.NDArray[Any]
Loop = Callable[..., Any]

#: Number of elements to update between two calls of ``after_piece``. With their slots, they fit into a core's cache.
_PIECE = 1 << 16
#: Loops whose sums may be reordered. No other rule of floating-point arithmetic is relaxed anywhere.
_REASSOCIATED = frozenset({kernels_blocks.lamb, kernels_blocks.all_finite})


def _number(dtype: str) -> Any:
    return {"float32": types.float32, "float64": types.float64, "uint16": types.uint16, "uint32": types.uint32}[dtype]


def _own(dtype: str) -> Any:
    return types.Array(_number(dtype), 1, "C")


def _received(dtype: str) -> Any:
    """Return the type of an array that may be read-only and unaligned. Also accepts the pserver's own arrays."""
    return types.Array(_number(dtype), 1, "C", readonly=True, aligned=False)


#: Called once, in the thread that set it, before this thread compiles a kernel that numba's cache lacks.
compiling_begins: ContextVar[Callable[[], object]] = ContextVar("compiling_begins", default=lambda: None)


class CompiledElsewhere(BaseException):
    """Another process compiles this kernel. Raised by ``compiling_begins``; not an error of numba or its cache."""


class _MachineCode(FunctionCache):
    """numba's cache, read without initializing the compiler, which saves 0.25 s at startup."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)
        code = None
        with self._guard_against_spurious_io_errors():
            code = self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        if code is None:
            compiling_begins.get()()
            compiling_begins.set(lambda: None)
            # ``compiling_begins`` may have waited until another process had compiled the kernel, so read the cache
            # again.
            with self._guard_against_spurious_io_errors():
                code = self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        return code


@cache
def machine_code(loop: Loop, signature: Any, *, allocates: bool = True) -> Any:
    """Return a loop that is compiled, or read from numba's cache, for exactly these types. It runs without the GIL.

    A loop that does not allocate memory need not count references to arrays. Counting would execute atomic instructions
    whenever functions pass arrays to each other.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    if not allocates:
        options["_nrt"] = False
    if loop in _REASSOCIATED:
        options["fastmath"] = {"reassoc"}
    try:
        code = numba.njit(**options)(loop)
        # numba checks only the file of the loop itself for changes, and has no public API for adding other files.
        code._cache = _cache_of(loop)  # noqa: SLF001
        code._cache._cache_file._source_stamp = _stamp()  # noqa: SLF001
        code.compile(signature)
        code.disable_compile()
    except Exception:  # noqa: BLE001 - numba has no class for cache errors; other errors are raised again below
        # The cache is not writable (read-only, or the disk is full) or contains a damaged file. Compile without the
        # cache.
        return numba.njit(signature, **options)(loop)
    return code


def _cache_of(loop: Loop) -> _MachineCode:
    """Return the cache of a loop. Raises RuntimeError if no directory is writable."""
    try:
        return _MachineCode(loop)  # type: ignore[no-untyped-call]
    except RuntimeError:
        # Machine code is executed, so only this user may have access to the directory.
        place = Path(tempfile.gettempdir()) / f"flightedl-kernels-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise
        numba.config.CACHE_DIR = str(place)  # type: ignore[attr-defined]  # numba sets its attributes itself
        return _MachineCode(loop)  # type: ignore[no-untyped-call]


@cache
def _stamp() -> int:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return xxhash.xxh3_64_intdigest(b"".join(file.read_bytes() for file in sources))


class Rule(NamedTuple):
    """The rule of an optimizer with its settings."""

    #: A function in ``rules``, or ``blocks.lamb``, which is a complete loop.
    function: Loop
    slot_count: int
    #: Learning rate -> constants of the rule, the first of which is ``rules.Constants.rate``.
    constants: Callable[[float], tuple[float, ...]]


#: (True if centered, True if it has momentum) -> rule of RMSprop.
_RMSPROP = {
    (False, False): rules.rmsprop,
    (False, True): rules.rmsprop_momentum,
    (True, False): rules.rmsprop_centered,
    (True, True): rules.rmsprop_centered_momentum,
}
#: Type of an optimizer of blocks or of an elementwise optimizer of rows -> its rule.
_RULES: dict[type[Optimizer], Callable[[Any], Rule]] = {
    SGD: lambda _: Rule(rules.sgd, 0, lambda rate: (rate,)),
    Delta: lambda _: Rule(rules.sgd, 0, lambda rate: (rate,)),
    Momentum: lambda o: Rule(rules.nesterov if o.nesterov else rules.momentum, 1, lambda rate: (rate, o.momentum)),
    Adagrad: lambda o: Rule(rules.adagrad, 1, lambda rate: (rate, o.eps)),
    Adadelta: lambda o: Rule(rules.adadelta, 2, lambda rate: (rate, o.rho, 1 - o.rho, o.eps)),
    RMSprop: lambda o: Rule(
        _RMSPROP[o.centered, o.momentum > 0],
        1 + o.centered + (o.momentum > 0),
        lambda rate: (rate, o.alpha, 1 - o.alpha, o.eps, o.momentum),
    ),
    Adam: lambda o: Rule(rules.amsgrad if o.amsgrad else rules.adam, 2 + o.amsgrad, adam_constants(o)),
    Ftrl: lambda o: Rule(rules.ftrl, 2, lambda rate: (1 / rate, o.l1, o.beta, 2 * o.l2)),
    LAMB: lambda o: Rule(kernels_blocks.lamb, 2, adam_constants(o)),
}
_RULES[AdamW] = _RULES[Adam]


def adam_constants(optimizer: Any) -> Callable[[float], tuple[float, ...]]:
    """Return ``Rule.constants`` for Adam and the optimizers that are based on it."""
    rest = 1 - optimizer.beta1, optimizer.beta2, 1 - optimizer.beta2, optimizer.eps
    return lambda rate: (rate, *rest)


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return an optimizer's rule, or None if there is none for optimizers of this type."""
    bind = _RULES.get(type(optimizer))
    return None if bind is None else bind(optimizer)


def constants_of(
    optimizer: Optimizer,
    constants: tuple[float, ...],
    scale: float,
    corrections: tuple[float, float] = (1.0, 1.0),
    shrink: float = 1.0,
) -> tuple[float, ...]:
    """Return the numbers of ``rules.Constants``. The arguments correspond to its fields."""
    clip = math.inf if optimizer.clip_value is None else optimizer.clip_value
    decay = 0.0 if isinstance(optimizer, AdamW) else optimizer.weight_decay
    none = (0.0,) * (5 - len(constants))
    return (scale, clip, decay, *constants, *none, *corrections, shrink)


@dataclass(frozen=True, slots=True)
class Update:
    """Update of a block by an optimizer: its rule with constants, compiled for one dtype. Call it to update a block."""

    optimizer: Optimizer
    rule: Rule
    dtype: npt.DTypeLike
    #: The loop as machine code.
    code: Any = field(compare=False, repr=False)
    #: True if the constants depend on the number of earlier updates, because bias is corrected.
    is_corrected: bool
    #: (rate, scale, number of earlier updates or 0) of the last update, and its constants, which most updates reuse.
    known: dict[tuple[float, float, int], Floats] = field(default_factory=dict, compare=False, repr=False)

    def __call__(
        self,
        values: Floats,
        gradient: Floats,
        slots: Sequence[Floats],
        version: int,
        number: int,
        scale: float = 1.0,
        rate_factor: float = 1.0,
        after_piece: Callable[[Any], object] | None = None,
    ) -> None:
        """Update a block in place.

        Args:
            values: (n,) values of the dtype, aligned and contiguous.
            gradient: (n,) gradient of the dtype, contiguous. It may be read-only and unaligned, and must be finite.
            slots: One (n,) array for each of ``optimizer.slots``.
            version: Version of the block before this update, which determines the rate of a schedule.
            number: Number of earlier updates of the block, which determines bias corrections.
            scale: Factor of the gradient, for example 1 / total weight for a mean.
            rate_factor: Factor of the learning rate, for stale gradients.
            after_piece: Called with each piece of the new values while the piece is in the processor's cache.
        """
        size = values.size
        if gradient.size != size or len(slots) != self.rule.slot_count:
            raise ValueError("values and gradient must have the same length, and every slot must be there")
        for slot in slots:
            if slot.size != size:
                raise ValueError("values and slots must have the same length")
        optimizer = self.optimizer
        # In nearly every job, the rate is a plain number. Skip ``rate_at`` then, because only schedules need it.
        rate = getattr(optimizer, "lr", None)
        rate = (rate if isinstance(rate, float) else optimizer.rate_at(version)) * rate_factor
        if rate == 0 and isinstance(optimizer, Ftrl):
            if after_piece is not None:
                after_piece(values)
            return
        key = rate, scale, number if self.is_corrected else 0
        constants = self.known.get(key)
        if constants is None:
            constants = self._constants(*key)
        # LAMB needs the norm of the entire block.
        if after_piece is None or self.rule.function is kernels_blocks.lamb:
            self.code(values, gradient, tuple(slots), constants)
            if after_piece is not None:
                after_piece(values)
            return
        for start in range(0, size, _PIECE):
            piece = slice(start, start + _PIECE)
            self.code(values[piece], gradient[piece], tuple(slot[piece] for slot in slots), constants)
            after_piece(values[piece])

    def _constants(self, rate: float, scale: float, number: int) -> Floats:
        optimizer = self.optimizer
        given, corrections, shrink = rate, (1.0, 1.0), 1.0
        if isinstance(optimizer, Adam | LAMB):
            first, square = 1 - optimizer.beta1 ** (number + 1), 1 - optimizer.beta2 ** (number + 1)
            corrections = 1 / first, 1 / math.sqrt(square)
            if isinstance(optimizer, AdamW):
                shrink = 1 - rate * optimizer.weight_decay
            if isinstance(optimizer, Adam):
                given = rate / first
        numbers = constants_of(optimizer, self.rule.constants(given), scale, corrections, shrink)
        found = np.array(numbers, self.dtype)
        self.known.clear()
        self.known[rate, scale, number] = found
        return found


def kernel_for(optimizer: Optimizer, dtype: str) -> Update:
    """Return the compiled update for one parameter's blocks.

    The first use of an optimizer type takes a second for compilation, unless the machine code is in numba's cache.

    Args:
        optimizer: Settings of this parameter (``Optimizer.for_parameter``).
        dtype: ``"float32"`` or ``"float64"``, the parameter's storage dtype.

    Raises:
        UsageError: there is no kernel for this optimizer or dtype.
    """
    rule = rule_of(optimizer)
    if rule is None or dtype not in ("float32", "float64"):
        raise UsageError(f"there is no kernel for {type(optimizer).__name__} on {dtype}")
    function, count, _ = rule
    is_whole = function is kernels_blocks.lamb
    loop = function if is_whole else kernels_blocks.loop_of(function, rules.GETS[count], rules.PUTS[count])
    own = _own(dtype)
    slots = types.Tuple((own,) * count)  # type: ignore[no-untyped-call]
    code = machine_code(loop, types.void(own, _received(dtype), slots, own))
    return Update(optimizer, rule, np.dtype(dtype), code, isinstance(optimizer, Adam | LAMB))


@cache
def finite_copy() -> Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], bool]:
    """Return the kernel ``copy_finite(target, source)``, compiled or read from numba's cache.

    ``target`` and ``source`` are (n,) bytes, and ``target`` is aligned. The function returns True if the bytes are
    finite floats, read as float32 or as float64. It returns False if some may not be finite, or if n is not a multiple
    of 4.
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
    """Kernels for one dtype that do not depend on the optimizer. All arrays are (n,) with the same n.

    ``accumulate_first(total, gradient, weight)``: ``total = weight * gradient``.
    ``accumulate(total, gradient, weight)``: ``total += weight * gradient``.
    ``all_finite(gradient) -> bool``: True if no element is NaN or infinite.
    ``copy_finite(target, source) -> bool``: see ``finite_copy``; takes bytes of any dtype.
    """

    accumulate_first: Callable[[Floats, Floats, float], None]
    accumulate: Callable[[Floats, Floats, float], None]
    all_finite: Callable[[Floats], bool]
    copy_finite: Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], bool]


@cache
def block_kernels(dtype: str) -> BlockKernels:
    """Return the kernels for ``"float32"`` or ``"float64"``, compiled or read from numba's cache."""
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
    """Conversion between float32 and one kind of 16-bit floats, which are passed as their bits.

    All arrays are (n,) with the same n. Sources may be unaligned and read-only.
    """

    kind: str
    shorten_code: Any
    widen_code: Any

    def to_half(self, values: npt.NDArray[np.float32], out: npt.NDArray[np.uint16]) -> None:
        """Round to nearest, ties to even. Numbers that are out of range become infinite."""
        if self.kind == "float16":
            self.shorten_code(values.view(np.uint32), values, out)
        else:
            self.shorten_code(values.view(np.uint32), out)

    def to_float32(self, bits: npt.NDArray[np.uint16], out: npt.NDArray[np.float32]) -> None:
        if self.kind == "float16":
            self.widen_code(bits, out.view(np.uint32), out)
        else:
            self.widen_code(bits, out.view(np.uint32))


@cache
def half_kernels(kind: str) -> HalfKernels:
    """Return the conversions of ``"bfloat16"`` or ``"float16"``, compiled or read from numba's cache."""
    bits, wide, floats = _received("uint16"), _received("uint32"), _received("float32")
    if kind == "float16":
        shorten = machine_code(kernels_blocks.float32_to_float16, types.void(wide, floats, _own("uint16")))
        widen = machine_code(kernels_blocks.float16_to_float32, types.void(bits, _own("uint32"), _own("float32")))
    else:
        shorten = machine_code(kernels_blocks.float32_to_bfloat16, types.void(wide, _own("uint16")))
        widen = machine_code(kernels_blocks.bfloat16_to_float32, types.void(bits, _own("uint32")))
    return HalfKernels(kind, shorten, widen)
