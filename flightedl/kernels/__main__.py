"""``python -m flightedl.kernels``: compiles all kernels now, so that no pserver does when it starts.

A pserver needs seconds for those of its optimizers where numba's cache has none, once on each kind of processor. The
cache lies beside the kernels' files, or in ``NUMBA_CACHE_DIR``.
"""

from __future__ import annotations

from rich.progress import track

from flightedl.kernels.ahead import all_kernels

if __name__ == "__main__":
    for compile_one in track(all_kernels(), "compiling kernels"):
        compile_one()
