"""The ledger, which also writes down what it reads.

After each step, a trainer logs the version and a digest of each parameter's values. It also claims names with
``job.once``, and checks again and again whether it still holds them. ``reads`` checks these logs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flightedl as fe
from flightedl.client.model.parameters import Parameters
from flightedl.errors import FlightedlError
from flightedl.examples import ledger

#: Variable that names the directory of the logs.
DIRECTORY = "READS_LOG"
#: Steps between two checks of the names, and between two claims of a new name.
_CHECK_EVERY, _CLAIM_EVERY = 5, 40


class Log:
    """The log of this process: lines of JSON, which survive a kill."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / f"{os.getpid()}.reads").open("a", buffering=1)
        self._steps = 0
        self._held: dict[str, fe.Once] = {}
        self._job: fe.Job | None = None

    def values(self, model: Parameters) -> None:
        """Log the values that the trainer has after a step."""
        digests = {name: hashlib.sha256(values.tobytes()).hexdigest()[:16] for name, values in model.items()}
        ranges = {name: model.plan.block_range(name) for name in model}
        blocks = {name: [numbers.start, numbers.stop] for name, numbers in ranges.items()}
        self._write(at=time.monotonic(), versions=dict(model.versions), digests=digests, blocks=blocks)

    def names(self, job: fe.Job) -> None:
        """Claim a name from time to time, and check the names that this trainer has."""
        self._steps += 1
        if self._steps % _CLAIM_EVERY == 1:
            name = f"name-{self._steps // _CLAIM_EVERY % 3}"
            self._holding(name, functools.partial(self._claim, job, name))
        if self._steps % _CHECK_EVERY == 0:
            for name, won in list(self._held.items()):
                self._holding(name, functools.partial(self._check, won))

    def _claim(self, job: fe.Job, name: str) -> int:
        won = job.once(name)
        if won:
            self._held[name] = won
        return won.generation

    def _check(self, won: fe.Once) -> int:
        try:
            won.require()
        except FlightedlError:
            del self._held[won.name]
            return 0
        return won.generation

    def _holding(self, name: str, ask: Callable[[], int]) -> None:
        began = time.monotonic()
        if generation := ask():
            self._write(name=name, generation=generation, began=began, ended=time.monotonic())

    def _write(self, **fields: object) -> None:
        self._file.write(json.dumps(fields) + "\n")


def main() -> int:
    """Run the ledger with the script's arguments, and log its reads."""
    log = Log(Path(os.environ[DIRECTORY]))
    step, connect = Parameters.step, fe.connect
    jobs: list[fe.Job] = []

    def logging_step(self: Parameters, gradients: Mapping[str, Any]) -> None:
        step(self, gradients)
        log.values(self)
        log.names(jobs[0])

    def logging_connect(**arguments: Any) -> fe.Job:
        jobs[:] = [connect(**arguments)]
        return jobs[0]

    Parameters.step = logging_step  # type: ignore[method-assign]
    ledger.fe.connect = logging_connect  # type: ignore[attr-defined]
    return ledger.main()


if __name__ == "__main__":
    sys.exit(main())
