"""``python -m flightedl.kernels``: compile all kernels in advance, so that pservers start faster.

If numba's cache lacks the machine code for a kind of processor, a pserver spends several seconds on compiling its
optimizers' kernels when it first starts there. The cache is located next to the kernels' source files, or in
``NUMBA_CACHE_DIR``.
"""

from __future__ import annotations

from rich.progress import track

from flightedl.kernels.ahead import all_kernels

if __name__ == "__main__":
    for compile_one in track(all_kernels(), "compiling kernels"):
        compile_one()
