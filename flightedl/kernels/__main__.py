"""``python -m flightedl.kernels``: compile all kernels in advance, so that pservers start faster.

Without machine code in numba's cache, a pserver compiles the kernels of its optimizers for several seconds at its first
start on each kind of processor. The cache is next to the source files of the kernels, or in ``NUMBA_CACHE_DIR``.
"""

from __future__ import annotations

from rich.progress import track

from flightedl.kernels.ahead import all_kernels

if __name__ == "__main__":
    for compile_one in track(all_kernels(), "compiling kernels"):
        compile_one()
